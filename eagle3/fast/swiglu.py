"""SwiGLU: silu(gate) * up, of gate and up projections side by side.

Letters in shapes: R rows, I intermediate size.
"""

from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _swiglu_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = row * 2 * width + column
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward_kernel(gate_up, grad_out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = row * 2 * width + column
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_out + row * width + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(gate_up + at, grad_gate.to(gate_up.dtype.element_ty), mask=inside)
    grad_up = grad * gate * sigmoid
    tl.store(gate_up + at + width, grad_up.to(gate_up.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor, out: Tensor) -> None:
    """Gates then ups [R, 2I] -> `out` [R, I]."""
    rows, width = out.shape
    grid = (rows, triton.cdiv(width, BLOCK))
    _swiglu_kernel[grid](gate_up, out, width, BLOCK=BLOCK, num_warps=8)


def swiglu_backward_(gate_up: Tensor, grad_out: Tensor) -> None:
    """Replace `gate_up` [R, 2I] by its gradient, given that of the output [R, I]."""
    rows, width = grad_out.shape
    grid = (rows, triton.cdiv(width, BLOCK))
    _swiglu_backward_kernel[grid](gate_up, grad_out, width, BLOCK=BLOCK, num_warps=8)


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [R, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
