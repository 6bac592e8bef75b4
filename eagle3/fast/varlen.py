"""Causal attention over segments of ragged length, with the logsumexp of the scores.

A segment's last query sits at its last key; each query sees the keys up to its own. On a GPU this
is the flash attention inside PyTorch, called below autograd: its logsumexp lets further keys be
merged in, and its backward accepts the merged logsumexp and output, since the weight of a key is
exp(score - logsumexp) whichever keys went into it. Every query head has a key/value head of its own
here. Letters in shapes: S queries, M keys, Q heads, D head size.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from eagle3.fast.layout import Layout


def forward(q: Tensor, keys: Tensor, values: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Queries [S, Q, D] on keys and values [M, Q, D] -> output [S, Q, D], logsumexp [Q, S]."""
    if not q.is_cuda:
        return forward_reference(q, keys, values, layout)
    out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
        q, keys, values, layout.query_starts, layout.key_starts, layout.max_queries,
        layout.max_keys, 0.0, True, False,
    )  # fmt: skip
    return out, logsumexp


def backward(
    grad_out: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    layout: Layout,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q [S, Q, D], keys and values [M, Q, D]."""
    if not q.is_cuda:
        return backward_reference(grad_out, q, keys, values, out, logsumexp, layout)
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # dropout's random state
    return torch.ops.aten._flash_attention_backward(
        grad_out, q, keys, values, out, logsumexp, layout.query_starts, layout.key_starts,
        layout.max_queries, layout.max_keys, 0.0, True, unused, unused,
    )  # fmt: skip


def forward_reference(
    q: Tensor, keys: Tensor, values: Tensor, layout: Layout
) -> tuple[Tensor, Tensor]:
    """The same segment by segment."""
    out = torch.empty_like(q)
    logsumexp = q.new_empty(q.shape[1], q.shape[0])
    for queries, seen in _segments(layout):
        scores = _scores(q[queries], keys[seen])
        logsumexp[:, queries] = scores.logsumexp(dim=-1)
        out[queries] = torch.einsum("qsm,mqd->sqd", scores.softmax(dim=-1), values[seen])
    return out, logsumexp


def backward_reference(
    grad_out: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    layout: Layout,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same segment by segment."""
    grad_q, grad_keys, grad_values = map(torch.zeros_like, (q, keys, values))
    for queries, seen in _segments(layout):
        grad = grad_out[queries]
        weights = (_scores(q[queries], keys[seen]) - logsumexp[:, queries, None]).exp()
        delta = (grad * out[queries]).sum(-1).T  # [Q, s]
        grad_scores = weights * (
            torch.einsum("sqd,mqd->qsm", grad, values[seen]) - delta[..., None]
        )
        grad_scores *= q.shape[-1] ** -0.5
        grad_q[queries] = torch.einsum("qsm,mqd->sqd", grad_scores, keys[seen])
        # a segment's keys are its own copy: nothing to add to
        grad_keys[seen] = torch.einsum("qsm,sqd->mqd", grad_scores, q[queries])
        grad_values[seen] = torch.einsum("qsm,sqd->mqd", weights, grad)
    return grad_q, grad_keys, grad_values


def _segments(layout: Layout) -> list[tuple[slice, slice]]:
    bounds = (
        [slice(*pair) for pair in pairwise(starts.tolist())]
        for starts in (layout.query_starts, layout.key_starts)
    )
    return list(zip(*bounds, strict=True))


def _scores(q: Tensor, keys: Tensor) -> Tensor:
    """Scaled scores, those of later keys masked [Q, s, m]."""
    scores = torch.einsum("sqd,mqd->qsm", q, keys) * q.shape[-1] ** -0.5
    num_queries, num_keys = scores.shape[1:]
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device)
    return scores.masked_fill(~visible.tril(num_keys - num_queries), float("-inf"))
