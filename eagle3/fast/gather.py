"""Adding up and moving rows: what PyTorch also does, in one pass instead of two or three.

Letters in shapes: R rows, N rows of the result, Q query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _scatter_kernel(x, rows, out, width, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """A piece of one row a program; the rows are distinct, so nothing is atomic."""
    index = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + index * width + column, mask=inside)
    at = out + tl.load(rows + index) * width + column
    if ADD:
        value = value.to(tl.float32) + tl.load(at, mask=inside).to(tl.float32)
    tl.store(at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_groups_kernel(
    x, total, GROUPS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_GROUPS)[:, None]
    column = tl.arange(0, BLOCK_SIZE)[None, :]
    inside = (group < GROUPS) & (column < SIZE)
    at = total + row * (GROUPS * SIZE) + group * SIZE + column
    value = tl.load(at, mask=inside)
    for head in tl.static_range(HEADS):
        source = x + (row * GROUPS * HEADS + group * HEADS + head) * SIZE + column
        value += tl.load(source, mask=inside).to(tl.float32)
    tl.store(at, value, mask=inside)


def scatter_rows(x: Tensor, rows: Tensor, out: Tensor, add: bool) -> None:
    """Write (or add, in float32) row i of x [R, ...] to row `rows[i]`, all distinct, of `out`."""
    width = x[0].numel()
    grid = (x.shape[0], triton.cdiv(width, BLOCK))
    _scatter_kernel[grid](x, rows, out, width, ADD=add, BLOCK=BLOCK, num_warps=4)


def add_groups(x: Tensor, total: Tensor) -> None:
    """Add the sums of x [N, Q, D] over the query heads of a group to `total` [N, G, D], float32."""
    rows, groups, size = total.shape
    _add_groups_kernel[(rows,)](
        x, total, GROUPS=groups, HEADS=x.shape[1] // groups, SIZE=size,
        BLOCK_GROUPS=triton.next_power_of_2(groups), BLOCK_SIZE=triton.next_power_of_2(size),
        num_warps=2,
    )  # fmt: skip


def scatter_rows_reference(x: Tensor, rows: Tensor, out: Tensor, add: bool) -> Tensor:
    """What `out` becomes."""
    return out.index_add(0, rows, x) if add else out.index_copy(0, rows, x)


def add_groups_reference(x: Tensor, total: Tensor) -> Tensor:
    """What `total` becomes."""
    return total + x.unflatten(1, (total.shape[1], -1)).sum(dim=2)
