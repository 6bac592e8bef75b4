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

from eagle3.batch import Batch
from eagle3.drafter import Drafter
from eagle3.ttt import unroll

Draft = Callable[[int, int], list[int]]
"""(index of the last known token, number of drafts) -> draft token ids."""

ROWS = 1024
"""Rows whose logits exist at a time."""


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
    return replayed(teacher_forced(drafter, tokens, loss_mask, aux, num_steps), tokens, loss_mask)


def replayed(drafts: Tensor, tokens: list[int], loss_mask: list[int]) -> list[list[int]]:
    """Histogram of each generated span, given every row's drafts [K, T] (`teacher_forced`)."""

    def draft(last: int, steps: int) -> list[int]:
        # the server has verified tokens 0..last: row last - 1 reads the last of them
        return drafts[:steps, last - 1].tolist()

    return [walk(tokens, span, draft, len(drafts)) for span in generated_spans(loss_mask)]


@torch.no_grad()
def teacher_forced(
    drafter: Drafter, tokens: list[int], loss_mask: list[int], aux: Tensor, num_steps: int
) -> Tensor:
    """Every row's drafts, each made after the recorded tokens in place of the drafts before it.

    As long as the drafts before it were accepted these are the same tokens, so up to and with its
    first wrong one a chain's drafts are right here, and no walk looks further. All rows go through
    the drafter together: one pass instead of one for each draft.

    Returns:
        Target ids [K, T]; -1 where a row's draft would be of a token that was not generated.
    """
    ids = torch.tensor(tokens, device=aux.device)
    batch = Batch(
        input_ids=ids,
        loss_mask=torch.tensor(loss_mask, dtype=torch.bool, device=aux.device),
        doc_starts=torch.tensor([0, len(tokens)], device=aux.device),
        aux=aux,
        final=aux.new_empty(0, drafter.config.hidden_size),
        final_index=torch.full_like(ids, -1),
    )
    drafts = torch.full((num_steps, len(tokens)), -1)
    for k, step in enumerate(unroll(drafter, batch, num_steps)):
        for rows, states in zip(step.rows.split(ROWS), step.states.split(ROWS), strict=True):
            drafts[k, rows.cpu()] = drafter.vocab.target_ids[
                drafter.lm_head(states).argmax(dim=-1)
            ].cpu()
    return drafts


def marginals(histogram: np.ndarray) -> np.ndarray:
    """Histogram [..., K + 1] -> marginals [..., K]; 0 where there was no verify step.

    marginal_k is the share of verify steps with more than k accepted drafts; accept length is 1
    plus their sum.
    """
    more_than = histogram[..., ::-1].cumsum(axis=-1)[..., ::-1][..., 1:]
    return more_than / np.maximum(histogram.sum(axis=-1, keepdims=True), 1)
