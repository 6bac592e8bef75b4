"""Heads of a projection: its hidden half plus its token half, rotated to their position.

The attention input is [token state, hidden state], so a projection is the sum of two halves. The
token half depends on the token alone: it is computed once and read one place further at each step.
Letters in shapes: R rows, N batch rows (as many tokens), h heads, D head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["step", "num_tokens"])
def _heads_kernel(
    hidden, hidden_stride, token, token_stride, rows, slots, positions, table, out, step,
    num_tokens, HEADS: tl.constexpr, HALF: tl.constexpr, ROTATED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """All heads of one row a program."""
    index = tl.program_id(0).to(tl.int64)
    row = index if rows is None else tl.load(rows + index)
    slot = index if slots is None else tl.load(slots + index)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    half = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (head < HEADS) & (half < HALF)
    at = head * (2 * HALF) + half
    h = hidden + index * hidden_stride + at
    t = token + ((row + 1 + step) % num_tokens) * token_stride + at
    a = tl.load(h, mask=inside).to(tl.float32) + tl.load(t, mask=inside).to(tl.float32)
    b = tl.load(h + HALF, mask=inside).to(tl.float32)
    b += tl.load(t + HALF, mask=inside).to(tl.float32)
    if ROTATED:
        angle = table + (tl.load(positions + row) + step) * (2 * HALF) + half
        cos = tl.load(angle, mask=half < HALF)
        sin = tl.load(angle + HALF, mask=half < HALF)
        turned = a * cos - b * sin
        b = b * cos + a * sin
        a = turned
    o = out + slot * (HEADS * 2 * HALF) + at
    tl.store(o, a.to(out.dtype.element_ty), mask=inside)
    tl.store(o + HALF, b.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["step", "num_tokens"])
def _heads_backward_kernel(
    grad, rows, slots, positions, table, grad_hidden, hidden_stride, grad_token, token_stride, step,
    num_tokens, HEADS: tl.constexpr, HALF: tl.constexpr, ROTATED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """All heads of one row a program. No two rows of a step read the same token: no atomics."""
    index = tl.program_id(0).to(tl.int64)
    row = index if rows is None else tl.load(rows + index)
    slot = index if slots is None else tl.load(slots + index)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    half = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (head < HEADS) & (half < HALF)
    at = head * (2 * HALF) + half
    g = grad + slot * (HEADS * 2 * HALF) + at
    a = tl.load(g, mask=inside).to(tl.float32)
    b = tl.load(g + HALF, mask=inside).to(tl.float32)
    if ROTATED:
        angle = table + (tl.load(positions + row) + step) * (2 * HALF) + half
        cos = tl.load(angle, mask=half < HALF)
        sin = tl.load(angle + HALF, mask=half < HALF)
        turned = a * cos + b * sin
        b = b * cos - a * sin
        a = turned
    h = grad_hidden + index * hidden_stride + at
    tl.store(h, a.to(grad_hidden.dtype.element_ty), mask=inside)
    tl.store(h + HALF, b.to(grad_hidden.dtype.element_ty), mask=inside)
    t = grad_token + ((row + 1 + step) % num_tokens) * token_stride + at
    tl.store(t, tl.load(t, mask=inside) + a, mask=inside)
    tl.store(t + HALF, tl.load(t + HALF, mask=inside) + b, mask=inside)


def rotation_table(num_positions: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Cosines, then sines, of each position [num_positions, D], float32."""
    half = torch.arange(head_dim // 2, device=device, dtype=torch.float64)
    frequency = theta ** -(half / (head_dim // 2))
    angles = torch.arange(num_positions, device=device)[:, None] * frequency
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()


def heads(
    hidden: Tensor,
    token: Tensor,
    rows: Tensor | None,
    positions: Tensor,
    table: Tensor | None,
    step: int,
    out: Tensor,
    slots: Tensor | None = None,
) -> None:
    """Add the halves of a projection and rotate them, at TTT step `step`.

    Args:
        hidden: hidden half of each row [R, h * D]. token: token half of each token [N, h * D].
        rows: batch rows, None for all of them; row t reads token t + 1 + step.
        positions: of each batch row [N]. table: `rotation_table`, None not to rotate.
        out: where the heads go [*, h, D], to place `slots[i]` those of row i (to place i if None).
    """
    num_heads, head_dim = out.shape[-2:]
    _heads_kernel[(hidden.shape[0],)](
        hidden, hidden.stride(0), token, token.stride(0), rows, slots, positions, table, out,
        step, token.shape[0], **_constants(num_heads, head_dim, table),
    )  # fmt: skip


def heads_backward(
    grad: Tensor,
    rows: Tensor | None,
    positions: Tensor,
    table: Tensor | None,
    step: int,
    grad_hidden: Tensor,
    grad_token: Tensor,
    slots: Tensor | None = None,
) -> None:
    """Write the gradient of the hidden halves, and add that of the token halves.

    Args:
        grad: gradient of the heads [*, h, D], that of row i at `slots[i]` (at i if None).
        grad_hidden: [R, h * D]. grad_token: float32 [N, h * D]. Both may be columns of wider ones.
    """
    num_heads, head_dim = grad.shape[-2:]
    _heads_backward_kernel[(grad_hidden.shape[0],)](
        grad, rows, slots, positions, table, grad_hidden, grad_hidden.stride(0), grad_token,
        grad_token.stride(0), step, grad_token.shape[0], **_constants(num_heads, head_dim, table),
    )  # fmt: skip


def heads_reference(
    hidden: Tensor, token: Tensor, rows: Tensor, positions: Tensor, table: Tensor | None,
    step: int, num_heads: int,
) -> Tensor:  # fmt: skip
    """What `heads` writes, in the order of `rows` [R, h, D]."""
    x = hidden + token[(rows + 1 + step) % token.shape[0]]
    x = x.view(x.shape[0], num_heads, -1)
    if table is None:
        return x
    cos, sin = table[positions[rows] + step][:, None].to(x.dtype).chunk(2, dim=-1)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _constants(num_heads: int, head_dim: int, table: Tensor | None) -> dict[str, int | bool]:
    return {
        "HEADS": num_heads,
        "HALF": head_dim // 2,
        "ROTATED": table is not None,
        "BLOCK_HEADS": triton.next_power_of_2(num_heads),
        "BLOCK_HALF": triton.next_power_of_2(head_dim // 2),
        "num_warps": 4 if num_heads * head_dim >= 2048 else 1,
    }
