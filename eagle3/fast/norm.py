"""Residual sum and RMS norms in one pass over the rows.

Letters in shapes: R rows, H hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 264
"""Programs of the backward kernel, each with a partial sum of the weight gradients: two for each
multiprocessor of the largest GPUs."""


@triton.jit(do_not_specialize=["num_second"])
def _add_norm_kernel(
    x, residual, weight, second_weight, total, normed, second, rstd, num_second, width, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program: total = x + residual, then one or two norms of it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(rstd + row, factor)
    value *= factor
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, (value * w).to(normed.dtype.element_ty), mask=inside)
    if second_weight is not None:  # noqa: SIM102
        if row < num_second:
            w = tl.load(second_weight + column, mask=inside, other=0.0).to(tl.float32)
            tl.store(second + at, (value * w).to(second.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_residual", "num_second"])
def _norm_backward_kernel(
    x, rstd, weight, grad_normed, second_weight, grad_second, grad_residual, grad_x,
    weight_sums, second_sums, num_rows, num_residual, num_second, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows dealt out to a fixed number of programs, which sum up the weight gradients."""
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros([BLOCK], tl.float32)
    second_sum = tl.zeros([BLOCK], tl.float32)
    for index in range(program, num_rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        at = row * width + column
        factor = tl.load(rstd + row)
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * factor
        grad = tl.load(grad_normed + at, mask=inside, other=0.0).to(tl.float32)
        weight_sum += grad * value
        grad *= w
        if second_weight is not None:  # noqa: SIM102
            if row < num_second:
                w2 = tl.load(second_weight + column, mask=inside, other=0.0).to(tl.float32)
                grad2 = tl.load(grad_second + at, mask=inside, other=0.0).to(tl.float32)
                second_sum += grad2 * value
                grad += grad2 * w2
        grad = factor * (grad - value * (tl.sum(grad * value, 0) / width))
        if grad_residual is not None:  # noqa: SIM102
            if row < num_residual:
                grad += tl.load(grad_residual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + at, grad.to(grad_x.dtype.element_ty), mask=inside)
    sums = tl.cast(program, tl.int64) * width + column
    tl.store(weight_sums + sums, weight_sum, mask=inside)
    if second_weight is not None:
        tl.store(second_sums + sums, second_sum, mask=inside)


def add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    normed: Tensor,
    total: Tensor | None = None,
    second_weight: Tensor | None = None,
    second: Tensor | None = None,
) -> Tensor:
    """Write x + residual to `total`, its RMS norm to `normed`, and perhaps another to `second`.

    Args:
        x, residual, total, normed: [R, H]; without a residual there is no total.
        second: another norm, with weight `second_weight`, of the first rows only [R2 <= R, H].

    Returns:
        Reciprocal root mean squares [R], float32.
    """
    rows, width = x.shape
    rstd = torch.empty(rows, device=x.device, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    _add_norm_kernel[(rows,)](
        x, residual, weight, second_weight, total, normed, second, rstd,
        0 if second is None else second.shape[0], width, eps,
        BLOCK=block, num_warps=_num_warps(block),
    )  # fmt: skip
    return rstd


def norm_backward(
    x: Tensor,
    rstd: Tensor,
    weight: Tensor,
    grad_normed: Tensor,
    grad_x: Tensor,
    grad_residual: Tensor | None = None,
    second_weight: Tensor | None = None,
    grad_second: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Write the gradient of the normed rows x [R, H], from all that reads them, to `grad_x`.

    Args:
        grad_normed: gradient of the norm with `weight` [R, H].
        grad_second: gradient of the first rows' norm with `second_weight` [R2 <= R, H].
        grad_residual: gradient that reaches the first rows directly [R3 <= R, H].

    Returns:
        Gradients of `weight` and `second_weight` [H], float32.
    """
    rows, width = x.shape
    programs = min(rows, PROGRAMS)
    block = triton.next_power_of_2(width)
    sums = torch.empty(2, programs, width, device=x.device, dtype=torch.float32)
    _norm_backward_kernel[(programs,)](
        x, rstd, weight, grad_normed, second_weight, grad_second, grad_residual, grad_x,
        sums[0], sums[1], rows,
        0 if grad_residual is None else grad_residual.shape[0],
        0 if grad_second is None else grad_second.shape[0],
        width, BLOCK=block, num_warps=_num_warps(block),
    )  # fmt: skip
    return sums[0].sum(0), None if second_weight is None else sums[1].sum(0)


def norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of each row."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def _num_warps(block: int) -> int:
    return min(max(block // 512, 1), 16)
