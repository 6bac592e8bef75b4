"""TTT attention: step-0 keys of the document up to the row, then the row's own later keys.

At TTT step k the query of row t sees the step-0 keys of rows <= t of its document, and the keys
that row t itself produced at steps 1..k (the drafts it has already made). Letters in shapes: R
query rows, N all rows, Q query heads, G key/value heads, D head size.

`reference` is the definition, with an explicit mask over everything. `segmented` is the same sum
over only the keys a query can see; it is what training uses on the plain path
(`fast/flash.py` on a GPU).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(kw_only=True, slots=True)
class Segment:
    """Consecutive query rows of one document: queries [start, end) of the query tensor.

    The first of them sits at row `first_row` of the batch, the document starts at row `doc_start`.
    """

    start: int
    end: int
    first_row: int
    doc_start: int


MOST_ROWS = 512
"""Rows of a segment, which bounds the scores that exist at a time."""


def segments(rows: Tensor, doc_starts: Tensor) -> list[Segment]:
    """Cut ascending query rows [R] into short runs of consecutive rows inside one document."""
    if rows.numel() == 0:
        return []
    docs = torch.searchsorted(doc_starts, rows, right=True) - 1
    breaks = ((rows.diff() != 1) | (docs.diff() != 0)).nonzero().flatten() + 1
    starts = [0, *breaks.tolist()]
    ends = [*breaks.tolist(), rows.numel()]
    first_rows = rows[starts].tolist()
    first_docs = doc_starts[docs[starts]].tolist()
    return [
        Segment(start=part, end=min(part + MOST_ROWS, e), first_row=r + part - s, doc_start=d)
        for s, e, r, d in zip(starts, ends, first_rows, first_docs, strict=True)
        for part in range(s, e, MOST_ROWS)
    ]


def reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    rows: Tensor,
    doc_starts: Tensor,
) -> Tensor:
    """The definition, with an explicit [R, N + k] mask.

    Args:
        q: queries [R, Q, D] of the ascending batch rows `rows` [R].
        keys, values: step-0 keys and values of all rows [N, G, D].
        own_keys, own_values: for each step 1..k, those of the query rows [R, G, D].

    Returns:
        [R, Q, D]
    """
    num_rows, groups = q.shape[0], q.shape[1] // keys.shape[1]
    docs = torch.searchsorted(doc_starts, torch.arange(keys.shape[0], device=q.device), right=True)
    row_docs = torch.searchsorted(doc_starts, rows, right=True)
    visible = (row_docs[:, None] == docs[None, :]) & (
        rows[:, None] >= torch.arange(keys.shape[0], device=q.device)[None, :]
    )
    all_keys, all_values, all_visible = [keys], [values], [visible]
    for own_key, own_value in zip(own_keys, own_values, strict=True):
        all_keys.append(own_key)
        all_values.append(own_value)
        all_visible.append(torch.eye(num_rows, dtype=torch.bool, device=q.device))
    k = torch.cat(all_keys).repeat_interleave(groups, dim=1)
    v = torch.cat(all_values).repeat_interleave(groups, dim=1)
    scores = torch.einsum("rqd,nqd->qrn", q, k) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~torch.cat(all_visible, dim=1)[None], float("-inf"))
    return torch.einsum("qrn,nqd->rqd", scores.softmax(dim=-1), v)


def segmented(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    pieces: Sequence[Segment],
) -> Tensor:
    """As `reference`, computed segment by segment over the visible keys only.

    The row's own keys enter as k extra score columns, so no key tensor ever grows and no score is
    computed between a query and another row's later keys.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv = keys.shape[1]
    if not pieces:  # nothing to compute, but gradients (zeros) must reach every input
        return q * (keys.sum() + values.sum())
    grouped = q.view(num_rows, num_kv, num_heads // num_kv, head_dim) / math.sqrt(head_dim)
    own_scores = None
    if own_keys:
        own_k = torch.stack(tuple(own_keys), dim=1)  # [R, k, G, D]
        own_v = torch.stack(tuple(own_values), dim=1)
        own_scores = torch.einsum("rgqd,rkgd->grqk", grouped, own_k)
    outputs = []
    for piece in pieces:
        queries = grouped[piece.start : piece.end].permute(1, 0, 2, 3)  # [G, r, Q/G, D]
        count = piece.end - piece.start
        seen = slice(piece.doc_start, piece.first_row + count)
        k, v = keys[seen].transpose(0, 1), values[seen].transpose(0, 1)  # [G, n, D]
        flat = queries.reshape(num_kv, -1, head_dim)
        scores = (flat @ k.transpose(1, 2)).view(num_kv, count, -1, k.shape[1])
        future = torch.ones(count, count, dtype=torch.bool, device=q.device).triu(1)
        scores[..., -count:].masked_fill_(future[:, None, :], float("-inf"))
        if own_scores is not None:
            scores = torch.cat([scores, own_scores[:, piece.start : piece.end]], dim=-1)
        weights = scores.softmax(dim=-1)
        mixed = weights[..., : k.shape[1]].reshape(num_kv, -1, k.shape[1]) @ v
        mixed = mixed.view(num_kv, count, -1, head_dim).transpose(0, 1)  # [r, G, Q/G, D]
        if own_scores is not None:
            own_weights = weights[..., k.shape[1] :]
            mixed = mixed + torch.einsum(
                "grqk,rkgd->rgqd", own_weights, own_v[piece.start : piece.end]
            )
        outputs.append(mixed.reshape(count, num_heads, head_dim))
    return torch.cat(outputs)
