"""Matrix products with a weight, in its own type or in fp8.

In fp8 both factors are rounded to e4m3, every row of the input and every row (output) of the weight
with a scale of its own, and their product is summed as a GPU's fp8 units do fastest, a little short
of float32. The gradient of the input is made in the same way, of the output's gradient, by rows,
and the unrounded weight, by columns (inputs). The gradient of the weight is made of what was not
rounded, in the weight's type. Letters in shapes: R rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
SMALLEST_PEAK = 1e-12
"""Rows whose largest entry is below this are taken as zero."""


@triton.jit
def _quantise_kernel(x, stride, out, scales, width, smallest, largest, BLOCK: tl.constexpr):
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * stride + column, mask=column < width, other=0.0).to(tl.float32)
        lane = tl.maximum(lane, tl.abs(value))
    scale = tl.div_rn(tl.maximum(tl.max(lane, 0), smallest), largest)
    tl.store(scales + row, scale)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * stride + column, mask=column < width, other=0.0).to(tl.float32)
        rounded = tl.div_rn(value, scale).to(out.dtype.element_ty)
        tl.store(out + row * width + column, rounded, mask=column < width)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [R, I] -> e4m3 [R, I] and scales [R, 1], float32; their product is about x."""
    if not x.is_cuda:  # Triton's interpreter rounds to e4m3 otherwise than a GPU
        return quantise_reference(x)
    rows, width = x.shape
    out = torch.empty(rows, width, device=x.device, dtype=E4M3)
    scales = torch.empty(rows, 1, device=x.device, dtype=torch.float32)
    block = min(4096, triton.next_power_of_2(width))
    _quantise_kernel[(rows,)](
        x, x.stride(0), out, scales, width, SMALLEST_PEAK, LARGEST, BLOCK=block, num_warps=8
    )
    return out, scales


def quantise_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same, to the nearest e4m3 number."""
    scales = x.float().abs().amax(dim=1, keepdim=True).clamp(min=SMALLEST_PEAK) / LARGEST
    return (x.float() / scales).to(E4M3), scales


def product_reference(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T of the rounded factors [R, O], in x's type."""
    a, b = (data.float() * scales for data, scales in map(quantise_reference, (x, weight)))
    return (a @ b.T).to(x.dtype)


class Product:
    """x [R, I] -> x @ weight.T [R, O] and the gradient of x; the weight [O, I] is rounded once."""

    def __init__(self, weight: Tensor, fp8: bool) -> None:
        self.weight = weight
        self.rounded = quantise(weight) if fp8 else None
        # by rows of the transposed weight; what a product reads lies in one piece
        self.transposed: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __call__(
        self, x: Tensor, out: Tensor | None = None, outputs: slice = slice(None)
    ) -> Tensor:
        """All outputs, or some of them."""
        if self.rounded is None:
            return torch.mm(x, self.weight[outputs].T, out=out)
        data, scales = (part[outputs] for part in self.rounded)
        return _scaled_product(x, data.T, scales.T, out)

    def grad_input(self, grad: Tensor, outputs: slice = slice(None)) -> Tensor:
        """Gradient of all outputs, or of some of them [R, O] -> that of x [R, I]."""
        if self.rounded is None:
            return grad @ self.weight[outputs]
        start, stop, _ = outputs.indices(len(self.weight))
        if (start, stop) not in self.transposed:
            self.transposed[start, stop] = quantise(self.weight[outputs].T.contiguous())
        data, scales = self.transposed[start, stop]
        return _scaled_product(grad, data.T, scales.T)


def _scaled_product(x: Tensor, data: Tensor, scales: Tensor, out: Tensor | None = None) -> Tensor:
    """x [R, I], rounded, times data [I, O], whose columns lie together, times scales [1, O]."""
    rounded, own_scales = quantise(x)
    if out is None:
        out = x.new_empty(x.shape[0], data.shape[1])
    return torch.ops.aten._scaled_mm.out(
        rounded, data, own_scales, scales, None, None, x.dtype, True, out=out
    )
