"""Replay speculative decoding over a finished text: which drafts would have been accepted.

The text is what the target generated greedily, so a draft is accepted iff it equals the next
recorded token, and the walk visits exactly the verify steps that a live server would have gone
through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Draft = Callable[[int, int], list[int]]
"""(index of the last known token, number of drafts) -> draft token ids."""


def generated_spans(loss_mask: Sequence[int]) -> list[tuple[int, int]]:
    """First index and end of each run of generated tokens."""
    flags = np.diff(np.concatenate([[0], np.asarray(loss_mask, dtype=np.int8), [0]]))
    return list(
        zip(np.flatnonzero(flags == 1).tolist(), np.flatnonzero(flags == -1).tolist(), strict=True)
    )


def walk(tokens: Sequence[int], span: tuple[int, int], draft: Draft, num_steps: int) -> list[int]:
    """Histogram [num_steps + 1] of accepted drafts over the verify steps of one generated span.

    The span's first token comes from prefill. Each verify step drafts after the last known token
    and yields its accepted drafts and one token of the target's own. Drafts beyond the span's end
    count as
    not accepted: the answer was over.
    """
    start, end = span
    histogram = [0] * (num_steps + 1)
    last = start
    while last + 1 < end:
        drafts = draft(last, num_steps)
        accepted = 0
        while (
            accepted < num_steps
            and last + 1 + accepted < end
            and drafts[accepted] == tokens[last + 1 + accepted]
        ):
            accepted += 1
        histogram[accepted] += 1
        last += accepted + 1
    return histogram
