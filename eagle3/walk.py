"""Replay speculative decoding over a finished text: which drafts would have been accepted.

The text is what the target generated greedily, so a draft is accepted iff it equals the next
recorded token, and the walk visits exactly the verify steps that a live server would have gone
through. Evaluation and training count acceptance with the code here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from eagle3.decode import ChainDrafter
from eagle3.drafter import Drafter

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


def sample_histograms(
    drafter: Drafter, tokens: list[int], loss_mask: list[int], aux: Tensor, num_steps: int
) -> list[list[int]]:
    """Histogram of each generated span of one sample.

    Args:
        aux: [T, A * H], on the drafter's device and in its dtype.
        num_steps: drafts per verify step.
    """
    chain = ChainDrafter(drafter)
    ids = torch.tensor(tokens, device=aux.device)
    known = 0

    def draft(last: int, steps: int) -> list[int]:
        nonlocal known
        # the server has verified tokens 0..last: it knows states 0..last-1 and what follows each
        chain.extend(aux[known:last], ids[known + 1 : last + 1])
        known = last
        return chain.draft(steps)

    return [walk(tokens, span, draft, num_steps) for span in generated_spans(loss_mask)]


def marginals(histogram: np.ndarray) -> np.ndarray:
    """Histogram [..., K + 1] -> marginals [..., K]; 0 where there was no verify step.

    marginal_k is the share of verify steps with more than k accepted drafts; accept length is 1
    plus their sum.
    """
    more_than = histogram[..., ::-1].cumsum(axis=-1)[..., ::-1][..., 1:]
    return more_than / np.maximum(histogram.sum(axis=-1, keepdims=True), 1)
