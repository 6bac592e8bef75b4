"""lm_head and loss in row chunks; the gradients are made while the logits exist.

The losses are those of `eagle3.loss`, with p the teacher, q the drafter and x its logits:

    soft_ce         -sum p log q           gradient in x: q - p
    hard_ce         -log q[best of p]      q - (1 at the best of p)
    tv              1 - A                  q * (S - [q < p])
    log_acceptance  -log A                 q * (S - [q < p]) / A

where A = sum min(p, q) and S sums q where q < p. soft_ce takes p in the states' type, which moves
its gradient by that type's rounding of p and halves what is read; the others, which compare p with
q, take it from the teacher's float32 logits. Letters in shapes: R rows, M teacher rows, H
hidden size, V draft vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3.loss import LEAST_OVERLAP, wide_product

CHUNK_BYTES = 2**31
"""Size of the largest logits and their gradients that ever exist."""

BLOCK, NUM_WARPS = 8192, 16
"""Columns at a time, and warps, of a program."""

WHOLE_ROW = 32768
"""Columns that a program's registers hold."""

LOWEST = tl.constexpr(-1e30)
"""Below every logit, and finite: a difference of two is not NaN."""

NAN = tl.constexpr(tl.PropagateNan.ALL)
"""For a minimum or maximum of what may be NaN: by default the other one is taken, and training that
diverged would show a finite loss."""


@triton.jit
def _running_softmax(peak, total, best, x, column):
    """One more block of columns; each lane keeps a softmax of its own: no reduction, and one
    exponential, a column."""
    higher = x > peak
    ratio = tl.exp(-tl.abs(x - peak))
    total = tl.where(higher, total * ratio + 1.0, total + ratio)
    return tl.maximum(peak, x), total, tl.where(higher, column, best)


@triton.jit
def _softmax_of_lanes(lane_peak, lane_total, lane_best, num_columns):
    """The row's logsumexp and its highest column, the first one if there are several."""
    peak = tl.max(lane_peak, 0)
    total = tl.sum(lane_total * tl.exp(lane_peak - peak), 0)
    return peak + tl.log(total), tl.min(tl.where(lane_peak == peak, lane_best, num_columns), 0)


@triton.jit
def _teacher_kernel(logits, logsumexp, top1, probabilities, num_columns, BLOCK: tl.constexpr):
    """One row a program; probabilities only where there is room for them."""
    row = tl.program_id(0).to(tl.int64)
    peak = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    best = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        at = logits + row * num_columns + column
        x = tl.load(at, mask=column < num_columns, other=LOWEST).to(tl.float32)
        peak, total, best = _running_softmax(peak, total, best, x, column)
    lse, highest = _softmax_of_lanes(peak, total, best, num_columns)
    tl.store(logsumexp + row, lse)
    tl.store(top1 + row, highest)
    if probabilities is not None:
        for start in range(0, num_columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            at = row * num_columns + column
            x = tl.load(logits + at, mask=column < num_columns, other=LOWEST).to(tl.float32)
            p = tl.exp(x - lse).to(probabilities.dtype.element_ty)
            tl.store(probabilities + at, p, mask=column < num_columns)


@triton.jit
def _cross_entropy_kernel(
    logits, teacher, teacher_top1, teacher_rows, row_weights, loss, top1, grads, num_columns,
    HARD: tl.constexpr, NEED_GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program: loss = logsumexp(x) - sum_v p(v) x(v); its gradient goes to `grads`."""
    row = tl.program_id(0).to(tl.int64)
    taught = tl.load(teacher_rows + row)
    label = tl.load(teacher_top1 + taught)
    x_row = logits + row * num_columns
    p_row = taught * num_columns
    peak = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    best = tl.zeros([BLOCK], tl.int32)
    lane_dot = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < num_columns
        x = tl.load(x_row + column, mask=inside, other=LOWEST).to(tl.float32)
        peak, total, best = _running_softmax(peak, total, best, x, column)
        if HARD:
            lane_dot += tl.where(column == label, x, 0.0)
        else:
            lane_dot += tl.load(teacher + p_row + column, mask=inside, other=0.0).to(tl.float32) * x
    normaliser, highest = _softmax_of_lanes(peak, total, best, num_columns)
    tl.store(loss + row, normaliser - tl.sum(lane_dot, 0))
    tl.store(top1 + row, highest)
    if NEED_GRAD:
        weight = tl.load(row_weights + row)
        for start in range(0, num_columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < num_columns
            x = tl.load(x_row + column, mask=inside, other=LOWEST).to(tl.float32)
            if HARD:
                p = tl.where(column == label, 1.0, 0.0)
            else:
                p = tl.load(teacher + p_row + column, mask=inside, other=0.0).to(tl.float32)
            grad = weight * (tl.exp(x - normaliser) - p)
            at = grads + row * num_columns + column
            tl.store(at, grad.to(grads.dtype.element_ty), mask=inside)


@triton.jit
def _cross_entropy_of_whole_rows_kernel(
    logits, teacher, teacher_top1, teacher_rows, row_weights, loss, top1, grads, num_columns,
    HARD: tl.constexpr, NEED_GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same for rows that fit into a program's registers: everything is read once."""
    row = tl.program_id(0).to(tl.int64)
    taught = tl.load(teacher_rows + row)
    column = tl.arange(0, BLOCK)
    inside = column < num_columns
    x = tl.load(logits + row * num_columns + column, mask=inside, other=LOWEST).to(tl.float32)
    if HARD:
        p = tl.where(column == tl.load(teacher_top1 + taught), 1.0, 0.0)
    else:
        p = tl.load(teacher + taught * num_columns + column, mask=inside, other=0.0).to(tl.float32)
    peak = tl.max(x, 0)
    exponential = tl.exp(x - peak)
    total = tl.sum(exponential, 0)
    tl.store(loss + row, peak + tl.log(total) - tl.sum(p * x, 0))
    tl.store(top1 + row, tl.min(tl.where(x == peak, column, num_columns), 0))
    if NEED_GRAD:
        grad = tl.load(row_weights + row) * (exponential / total - p)
        at = grads + row * num_columns + column
        tl.store(at, grad.to(grads.dtype.element_ty), mask=inside)


@triton.jit
def _overlap_kernel(
    logits, teacher_logits, teacher_lse, teacher_rows, row_weights, loss, top1, grads, num_columns,
    least, LOG: tl.constexpr, NEED_GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program: loss = 1 - A, or -log max(A, least); its gradient goes to `grads`."""
    row = tl.program_id(0).to(tl.int64)
    taught = tl.load(teacher_rows + row)
    lse = tl.load(teacher_lse + taught)
    x_row = logits + row * num_columns
    t_row = teacher_logits + taught * num_columns
    peak = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    best = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_row + column, mask=column < num_columns, other=LOWEST).to(tl.float32)
        peak, total, best = _running_softmax(peak, total, best, x, column)
    normaliser, highest = _softmax_of_lanes(peak, total, best, num_columns)
    lane_overlap = tl.zeros([BLOCK], tl.float32)
    lane_below = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < num_columns
        x = tl.load(x_row + column, mask=inside, other=LOWEST).to(tl.float32)
        t = tl.load(t_row + column, mask=inside, other=LOWEST).to(tl.float32)
        q = tl.exp(x - normaliser)
        p = tl.exp(t - lse)
        lane_overlap += tl.minimum(p, q, NAN)
        lane_below += tl.where(q < p, q, 0.0)
    overlap = tl.sum(lane_overlap, 0)
    below = tl.sum(lane_below, 0)
    factor = 1.0
    if LOG:
        clamped = tl.maximum(overlap, least, NAN)
        factor = tl.where(overlap < least, 0.0, 1.0 / clamped)
        tl.store(loss + row, -tl.log(clamped))
    else:
        tl.store(loss + row, 1.0 - overlap)
    tl.store(top1 + row, highest)
    if NEED_GRAD:
        factor *= tl.load(row_weights + row)
        for start in range(0, num_columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < num_columns
            x = tl.load(x_row + column, mask=inside, other=LOWEST).to(tl.float32)
            t = tl.load(t_row + column, mask=inside, other=LOWEST).to(tl.float32)
            q = tl.exp(x - normaliser)
            grad = factor * q * (below - tl.where(q < tl.exp(t - lse), 1.0, 0.0))
            at = grads + row * num_columns + column
            tl.store(at, grad.to(grads.dtype.element_ty), mask=inside)


def lm_head_loss(
    states: Tensor,
    weight: Tensor,
    teacher_logits: Tensor,
    teacher_rows: Tensor,
    row_weights: Tensor,
    kind: str,
    need_grad: bool,
    train_weight: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Loss of each row, as `eagle3.loss` defines it.

    Args:
        states: normed drafter states [R, H]; with `need_grad` their gradient replaces them.
        weight: drafter lm_head [V, H].
        teacher_logits: float32 [M, V]; row `teacher_rows[i]` teaches row i.
        row_weights: factor of each row's loss in what the gradients are of [R], float32.
        kind: one of `eagle3.loss.LOSSES`.
        train_weight: also make the gradient of `weight`, if any.

    Returns:
        Unweighted loss and top-1 draft id of each row [R], and the float32 gradient of `weight`.
    """
    num_rows, num_columns = states.shape[0], weight.shape[0]
    constants = {
        "BLOCK": min(BLOCK, triton.next_power_of_2(num_columns)), "num_warps": NUM_WARPS
    }  # fmt: skip
    teacher_lse = torch.empty(len(teacher_logits), device=states.device, dtype=torch.float32)
    teacher_top1 = torch.empty(len(teacher_logits), device=states.device, dtype=torch.int32)
    probabilities = None
    if kind == "soft_ce":
        probabilities = torch.empty_like(teacher_logits, dtype=states.dtype)
    _teacher_kernel[(len(teacher_logits),)](
        teacher_logits, teacher_lse, teacher_top1, probabilities, num_columns, **constants
    )
    loss = torch.empty(num_rows, device=states.device, dtype=torch.float32)
    top1 = torch.empty(num_rows, device=states.device, dtype=torch.int64)
    grad_weight = None
    if need_grad and train_weight:
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
    cross_entropy, block = _cross_entropy_kernel, constants["BLOCK"]
    if num_columns <= WHOLE_ROW:
        cross_entropy = _cross_entropy_of_whole_rows_kernel
        block = triton.next_power_of_2(num_columns)
    chunk = max(128, CHUNK_BYTES // (num_columns * (4 + states.element_size())) // 128 * 128)
    for start in range(0, num_rows, chunk):
        part = slice(start, start + chunk)
        rows = teacher_rows[part], row_weights[part], loss[part], top1[part]
        logits = wide_product(states[part], weight.T)
        grads = torch.empty_like(logits, dtype=states.dtype) if need_grad else logits
        if kind in ("tv", "log_acceptance"):
            _overlap_kernel[(logits.shape[0],)](
                logits, teacher_logits, teacher_lse, *rows, grads, num_columns, LEAST_OVERLAP,
                LOG=kind == "log_acceptance", NEED_GRAD=need_grad, **constants,
            )  # fmt: skip
        else:
            cross_entropy[(logits.shape[0],)](
                logits, probabilities, teacher_top1, *rows, grads, num_columns,
                HARD=probabilities is None, NEED_GRAD=need_grad, BLOCK=block, num_warps=NUM_WARPS,
            )  # fmt: skip
        del logits
        if grad_weight is not None:
            _add_product(grad_weight, grads.T, states[part])
        if need_grad:
            torch.mm(grads, weight, out=states[part])
        del grads
    return loss, top1, grad_weight


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b in float32, whatever a and b are."""
    if a.dtype == torch.float32 or not a.is_cuda:
        total.addmm_(a.float(), b.float())
    else:
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)
