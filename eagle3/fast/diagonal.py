"""A row's own later keys, merged into its attention over step-0 keys.

At TTT step k a row also sees the k keys that it made at steps 1..k: k scores a row and head, next
to the hundreds over step-0 keys. Own keys of all steps lie end to end, those of step j from
`starts[j]` on (`layout`). Letters in shapes: R rows of the step, S attention queries, T rows of all
steps together, Q query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["num_own"])
def _merge_kernel(
    q, own_keys, own_values, slots, starts, attended, logsumexp, out, num_own, scale,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """One row and key/value head a program: a running softmax that starts from the attention."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    slot = tl.load(slots + row)
    head = tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, BLOCK_SIZE)
    inside = (head[:, None] < HEADS) & (column[None, :] < SIZE)
    at = (group * HEADS + head[:, None]) * SIZE + column[None, :]
    width = GROUPS * HEADS * SIZE
    query = tl.load(q + slot * width + at, mask=inside, other=0.0).to(tl.float32) * scale
    mixed = tl.load(attended + slot * width + at, mask=inside, other=0.0).to(tl.float32)
    lse_at = logsumexp + (slot * GROUPS + group) * HEADS + head
    peak = tl.load(lse_at, mask=head < HEADS, other=0.0)
    total = tl.full([BLOCK_HEADS], 1.0, tl.float32)
    for step in range(1, num_own + 1):
        own = (tl.load(starts + step) + row) * (GROUPS * SIZE) + group * SIZE + column
        key = tl.load(own_keys + own, mask=column < SIZE, other=0.0).to(tl.float32)
        value = tl.load(own_values + own, mask=column < SIZE, other=0.0).to(tl.float32)
        score = tl.sum(query * key[None, :], 1)
        new_peak = tl.maximum(peak, score)
        kept = tl.exp(peak - new_peak)
        weight = tl.exp(score - new_peak)
        mixed = mixed * kept[:, None] + weight[:, None] * value[None, :]
        total = total * kept + weight
        peak = new_peak
    mixed /= total[:, None]
    tl.store(out + row * width + at, mixed.to(out.dtype.element_ty), mask=inside)
    tl.store(lse_at, peak + tl.log(total), mask=head < HEADS)


@triton.jit(do_not_specialize=["num_own"])
def _merge_backward_kernel(
    q, own_keys, own_values, slots, starts, mixed, logsumexp, grad_mixed, grad_slots, deltas,
    grad_q, grad_own_keys, grad_own_values, num_own, scale,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """One row and key/value head a program; nothing else touches the row's own keys."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    slot = tl.load(slots + row)
    head = tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, BLOCK_SIZE)
    inside = (head[:, None] < HEADS) & (column[None, :] < SIZE)
    at = (group * HEADS + head[:, None]) * SIZE + column[None, :]
    width = GROUPS * HEADS * SIZE
    query = tl.load(q + slot * width + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_mixed + row * width + at, mask=inside, other=0.0)
    tl.store(grad_slots + slot * width + at, grad, mask=inside)
    grad = grad.to(tl.float32)
    output = tl.load(mixed + row * width + at, mask=inside, other=0.0).to(tl.float32)
    delta = tl.sum(output * grad, 1)
    of_head = (slot * GROUPS + group) * HEADS + head
    tl.store(deltas + of_head, delta, mask=head < HEADS)
    lse = tl.load(logsumexp + of_head, mask=head < HEADS, other=float("inf"))
    grad_query = tl.zeros([BLOCK_HEADS, BLOCK_SIZE], tl.float32)
    for step in range(1, num_own + 1):
        own = (tl.load(starts + step) + row) * (GROUPS * SIZE) + group * SIZE + column
        key = tl.load(own_keys + own, mask=column < SIZE, other=0.0).to(tl.float32)
        value = tl.load(own_values + own, mask=column < SIZE, other=0.0).to(tl.float32)
        weight = tl.exp(tl.sum(query * key[None, :], 1) * scale - lse)
        grad_score = weight * (tl.sum(grad * value[None, :], 1) - delta) * scale
        grad_query += grad_score[:, None] * key[None, :]
        grad_key = tl.load(grad_own_keys + own, mask=column < SIZE, other=0.0)
        grad_key += tl.sum(grad_score[:, None] * query, 0)
        tl.store(grad_own_keys + own, grad_key, mask=column < SIZE)
        grad_value = tl.load(grad_own_values + own, mask=column < SIZE, other=0.0)
        grad_value += tl.sum(weight[:, None] * grad, 0)
        tl.store(grad_own_values + own, grad_value, mask=column < SIZE)
    tl.store(grad_q + slot * width + at, grad_query.to(grad_q.dtype.element_ty), mask=inside)


def merge(
    q: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    num_own: int,
    slots: Tensor,
    starts: Tensor,
    attended: Tensor,
    logsumexp: Tensor,
    out: Tensor,
) -> None:
    """Merge own keys of steps 1..num_own; without any, only reorder.

    Args:
        q: rotated queries [S, Q, D]. own_keys, own_values: of all steps [T, G, D].
        slots: place of each row among the queries [>= R].
        attended: attention output over step-0 keys [S, Q, D].
        logsumexp: of its scores [S, Q], float32; becomes that of all scores in place.
        out: merged output in row order [R, Q, D].
    """
    rows, groups = out.shape[0], own_keys.shape[1]
    _merge_kernel[(rows, groups)](
        q, own_keys, own_values, slots, starts, attended, logsumexp, out, num_own,
        q.shape[-1] ** -0.5, **_constants(q, groups),
    )  # fmt: skip


def merge_backward(
    q: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    num_own: int,
    slots: Tensor,
    starts: Tensor,
    mixed: Tensor,
    logsumexp: Tensor,
    grad_mixed: Tensor,
    grad_slots: Tensor,
    delta: Tensor,
    grad_q: Tensor,
    grad_own_keys: Tensor,
    grad_own_values: Tensor,
) -> None:
    """Gradients through the own keys, and what those through the others need (`flash`).

    Args:
        mixed, grad_mixed: merged output and its gradient [R, Q, D]. logsumexp: merged [S, Q].
        grad_slots: where the latter goes in the queries' order [S, Q, D].
        delta: where its product with the output goes [S, Q], float32.
        grad_q: where the gradient of the queries goes, in their order [S, Q, D].
        grad_own_keys, grad_own_values: float32 [T, G, D]; added to.
    """
    rows, groups = mixed.shape[0], own_keys.shape[1]
    _merge_backward_kernel[(rows, groups)](
        q, own_keys, own_values, slots, starts, mixed, logsumexp, grad_mixed, grad_slots, delta,
        grad_q, grad_own_keys, grad_own_values, num_own, q.shape[-1] ** -0.5,
        **_constants(q, groups),
    )  # fmt: skip


def merge_reference(
    q: Tensor, own_keys: Tensor, own_values: Tensor, attended: Tensor, logsumexp: Tensor
) -> tuple[Tensor, Tensor]:
    """Merged output [R, Q, D] and logsumexp [R, Q]; own keys [R, k, G, D], all in row order."""
    repeats = q.shape[1] // own_keys.shape[2]
    k, v = (x.repeat_interleave(repeats, dim=2) for x in (own_keys, own_values))
    scores = torch.einsum("rqd,rkqd->rqk", q, k) * q.shape[-1] ** -0.5
    merged = torch.cat([logsumexp[..., None], scores], dim=-1).logsumexp(dim=-1)
    first = (logsumexp - merged).exp()[..., None] * attended
    own = torch.einsum("rqk,rkqd->rqd", (scores - merged[..., None]).exp(), v)
    return first + own, merged


def _constants(q: Tensor, groups: int) -> dict[str, int]:
    heads, size = q.shape[1] // groups, q.shape[2]
    return {
        "GROUPS": groups,
        "HEADS": heads,
        "SIZE": size,
        "BLOCK_HEADS": triton.next_power_of_2(heads),
        "BLOCK_SIZE": triton.next_power_of_2(size),
        "num_warps": 1,
    }
