"""Adding rows to others: what PyTorch also does, but rounded once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _add_rows_kernel(x, rows, out, width, BLOCK: tl.constexpr):
    """A piece of one row a program; the rows are distinct, so nothing is atomic."""
    index = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = out + tl.load(rows + index) * width + column
    value = tl.load(x + index * width + column, mask=inside).to(tl.float32)
    value += tl.load(at, mask=inside).to(tl.float32)
    tl.store(at, value.to(out.dtype.element_ty), mask=inside)


def add_rows(x: Tensor, rows: Tensor, out: Tensor) -> None:
    """Add, in float32, row i of x [R, H] to row `rows[i]`, all distinct, of `out` [N, H]."""
    width = x.shape[1]
    grid = (x.shape[0], triton.cdiv(width, BLOCK))
    _add_rows_kernel[grid](x, rows, out, width, BLOCK=BLOCK, num_warps=4)


def add_rows_reference(x: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    """What `out` becomes."""
    return out.index_add(0, rows, x)
