"""lm_head and soft cross-entropy in row chunks; the gradients are made while the logits exist.

Letters in shapes: R rows, M teacher rows, H hidden size, V draft vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK_BYTES = 2**31
"""Size of the largest logits that ever exist."""

BLOCK, NUM_WARPS = 4096, 8
"""Columns at a time, and warps, of a program."""

LOWEST = tl.constexpr(-1e30)
"""Below every logit, and finite: a difference of two is not NaN."""


@triton.jit
def _logsumexp_kernel(logits, out, num_columns, BLOCK: tl.constexpr):
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    peak = float("-inf")
    total = 0.0
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        at = logits + row * num_columns + column
        x = tl.load(at, mask=column < num_columns, other=float("-inf")).to(tl.float32)
        new_peak = tl.maximum(peak, tl.max(x, 0))
        total = total * tl.exp(peak - new_peak) + tl.sum(tl.exp(x - new_peak), 0)
        peak = new_peak
    tl.store(out + row, peak + tl.log(total))


@triton.jit
def _loss_kernel(
    logits, teacher_logits, teacher_lse, teacher_rows, row_weights, loss, top1, num_columns,
    NEED_GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program: loss = logsumexp(x) - sum_v p(v) x(v); its gradient replaces x."""
    row = tl.program_id(0).to(tl.int64)
    taught = tl.load(teacher_rows + row)
    lse = tl.load(teacher_lse + taught)
    x_row = logits + row * num_columns
    t_row = teacher_logits + taught * num_columns
    # each lane keeps a running softmax of its own: no reduction, and one exponential, a column
    lane_peak = tl.full([BLOCK], LOWEST, tl.float32)
    lane_total = tl.zeros([BLOCK], tl.float32)
    lane_dot = tl.zeros([BLOCK], tl.float32)
    lane_best = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < num_columns
        x = tl.load(x_row + column, mask=inside, other=LOWEST).to(tl.float32)
        t = tl.load(t_row + column, mask=inside, other=LOWEST).to(tl.float32)
        higher = x > lane_peak
        ratio = tl.exp(-tl.abs(x - lane_peak))
        lane_total = tl.where(higher, lane_total * ratio + 1.0, lane_total + ratio)
        lane_best = tl.where(higher, column, lane_best)
        lane_peak = tl.maximum(lane_peak, x)
        lane_dot += tl.exp(t - lse) * x
    peak = tl.max(lane_peak, 0)
    total = tl.sum(lane_total * tl.exp(lane_peak - peak), 0)
    best = tl.min(tl.where(lane_peak == peak, lane_best, num_columns), 0)
    dot = tl.sum(lane_dot, 0)
    normaliser = peak + tl.log(total)
    tl.store(loss + row, normaliser - dot)
    tl.store(top1 + row, best)
    if NEED_GRAD:
        weight = tl.load(row_weights + row)
        for start in range(0, num_columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < num_columns
            x = tl.load(x_row + column, mask=inside, other=LOWEST).to(tl.float32)
            t = tl.load(t_row + column, mask=inside, other=LOWEST).to(tl.float32)
            grad = weight * (tl.exp(x - normaliser) - tl.exp(t - lse))
            tl.store(x_row + column, grad.to(logits.dtype.element_ty), mask=inside)


def logsumexp(logits: Tensor) -> Tensor:
    """Of each row [M, V] -> [M], float32."""
    out = torch.empty(logits.shape[0], device=logits.device, dtype=torch.float32)
    _logsumexp_kernel[(logits.shape[0],)](
        logits, out, logits.shape[1], **_constants(logits.shape[1])
    )
    return out


def soft_cross_entropy(
    states: Tensor,
    weight: Tensor,
    teacher_logits: Tensor,
    teacher_rows: Tensor,
    row_weights: Tensor,
    need_grad: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Soft cross-entropy of each row, as `eagle3.loss` defines it.

    Args:
        states: normed drafter states [R, H]; with `need_grad` their gradient replaces them.
        weight: drafter lm_head [V, H]. teacher_logits: [M, V]; row `teacher_rows[i]` teaches row i.
        row_weights: factor of each row's loss in what the gradients are of [R], float32.

    Returns:
        Unweighted loss and top-1 draft id of each row [R], and the float32 gradient of `weight`.
    """
    num_rows, num_columns = states.shape[0], weight.shape[0]
    teacher_lse = logsumexp(teacher_logits)
    loss = torch.empty(num_rows, device=states.device, dtype=torch.float32)
    top1 = torch.empty(num_rows, device=states.device, dtype=torch.int64)
    grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_grad else None
    chunk = max(128, CHUNK_BYTES // (num_columns * states.element_size()) // 128 * 128)
    for start in range(0, num_rows, chunk):
        part = slice(start, start + chunk)
        logits = states[part] @ weight.T
        _loss_kernel[(logits.shape[0],)](
            logits, teacher_logits, teacher_lse, teacher_rows[part], row_weights[part], loss[part],
            top1[part], num_columns, NEED_GRAD=need_grad, **_constants(num_columns),
        )  # fmt: skip
        if grad_weight is not None:
            _add_product(grad_weight, logits.T, states[part])
            torch.mm(logits, weight, out=states[part])
    return loss, top1, grad_weight


def soft_cross_entropy_reference(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Soft cross-entropy of each row [R]."""
    return -(teacher_logits.softmax(dim=-1) * logits.log_softmax(dim=-1)).sum(dim=-1)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b in float32, whatever a and b are."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    else:
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)


def _constants(num_columns: int) -> dict[str, int]:
    return {"BLOCK": min(BLOCK, triton.next_power_of_2(num_columns)), "num_warps": NUM_WARPS}
