"""How hidden states are kept on disk: one tensor in, a few named tensors out, and back.

A codec is a row format for the aux states and one for the final states: the drafter's input bears
more noise than the teacher's. Every format works row by row, so that any row range can be decoded
on its own, and on any device. Shapes: R rows of W values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from eagle3.errors import UserError

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


class Format(Protocol):
    """Encodes rows [R, W] into named tensors of R rows each."""

    def encode(self, states: Tensor) -> dict[str, Tensor]:
        """Rows [R, W] in any float type -> named tensors."""

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Named tensors of R rows -> [R, W], in bf16 unless the codec keeps more."""

    def bytes_per_row(self, width: int) -> int:
        """Size of an encoded row of `width` values."""


class Cast:
    """Keeps the values in one float type: exact when the target runs in that type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def encode(self, states: Tensor) -> dict[str, Tensor]:
        return {"values": states.to(self.dtype)}

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["values"]

    def bytes_per_row(self, width: int) -> int:
        return width * self.dtype.itemsize


class BlockFp8:
    """float8 e4m3 with one bf16 scale for each block of a row.

    The largest value of a block maps to the largest float8, so the error is relative: at most 1/16
    of a value, whatever the row's outliers in other blocks.
    """

    def __init__(self, block: int) -> None:
        self.block = block

    def encode(self, states: Tensor) -> dict[str, Tensor]:
        blocks = _blocks(states, self.block)
        scales = _scales(blocks, FP8_MAX)
        values = (blocks / scales.float()).to(torch.float8_e4m3fn)
        return {"values": values.flatten(1)[:, : states.shape[1]], "scales": scales.squeeze(-1)}

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        width = parts["values"].shape[1]
        blocks = _blocks(parts["values"], self.block) * parts["scales"].float()[..., None]
        return blocks.flatten(1)[:, :width].bfloat16()

    def bytes_per_row(self, width: int) -> int:
        return width + 2 * -(-width // self.block)


class RotatedInt:
    """4-, 6- or 8-bit integers after a Hadamard rotation, a bf16 scale for each block of a row.

    Hidden states have a few channels far larger than the rest, which would leave the others no
    levels. The rotation spreads every channel over its block; it is orthogonal, so decoding rotates
    back and the error stays spread out. Needs a width that is a multiple of the block.
    """

    def __init__(self, bits: int, block: int) -> None:
        assert block & (block - 1) == 0, "Hadamard matrices here have a power of two"
        self.bits = bits
        self.block = block
        self.largest = 2 ** (bits - 1) - 1

    def encode(self, states: Tensor) -> dict[str, Tensor]:
        if states.shape[1] % self.block:
            raise UserError(
                f"a {self.bits}-bit codec needs a hidden size that is a multiple of {self.block}; "
                f"{states.shape[1]} values a row are not: take codec=fp8"
            )
        rotated = _blocks(states, self.block) @ hadamard(self.block, states.device)
        scales = _scales(rotated, self.largest)
        # Adding 2^23 rounds to the nearest integer, ties to even (the offset is even), and leaves
        # that integer in the low bits of the sum.
        levels = (rotated / scales.float()).add_(2**23 + self.largest + 1).view(torch.int32)
        return {"values": _pack(levels.flatten(1), self.bits), "scales": scales.squeeze(-1)}

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        levels = _unpack(parts["values"], self.bits).float() - (self.largest + 1)
        blocks = _blocks(levels, self.block) * parts["scales"].float()[..., None]
        return (blocks @ hadamard(self.block, levels.device)).flatten(1).bfloat16()

    def bytes_per_row(self, width: int) -> int:
        return width * self.bits // 8 + 2 * (width // self.block)


def _pack(levels: Tensor, bits: int) -> Tensor:
    """Low `bits` bits of int32 [R, W] -> uint8 [R, W * bits / 8], lowest bits first.

    The other bits of a level are 0, but those above the 24th may be anything.
    """
    if bits == 8:
        return levels.to(torch.uint8)
    if bits == 4:
        return levels[:, ::2].add(levels[:, 1::2], alpha=16).to(torch.uint8)
    a, b, c, d = levels.unflatten(1, (-1, 4)).unbind(-1)
    words = a.add(b, alpha=1 << 6).add_(c.add(d, alpha=1 << 6), alpha=1 << 12)
    return words.view(torch.uint8).unflatten(1, (-1, 4))[..., :3].flatten(1)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """Inverse of `_pack`."""
    if bits == 8:
        return packed
    if bits == 4:
        return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
    x, y, z = packed.unflatten(1, (-1, 3)).unbind(-1)
    levels = [x & 63, (x >> 6 | y << 2) & 63, (y >> 4 | z << 4) & 63, z >> 2]
    return torch.stack(levels, dim=-1).flatten(1)


@cache
def hadamard(size: int, device: torch.device) -> Tensor:
    """Orthogonal, symmetric Hadamard matrix [size, size] of a power of two: its own inverse."""
    matrix = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    while matrix.shape[0] < size:
        matrix = torch.cat(
            [torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)]
        )
    # made on the CPU, so that it is there before a kernel of any stream reads it
    return (matrix / size**0.5).to(device)


def _blocks(rows: Tensor, block: int) -> Tensor:
    """[R, W] -> float32 [R, ceil(W / block), block], padded with zeros."""
    wide, padding = rows.float(), -rows.shape[1] % block
    if padding:  # by 0 would be a copy
        wide = torch.nn.functional.pad(wide, (0, padding))
    return wide.unflatten(1, (-1, block))


def _scales(blocks: Tensor, largest: float) -> Tensor:
    """bf16 scale of each block [R, B, 1]: rounded up, so that blocks / scales rounds to no more
    than `largest`."""
    ends = torch.linalg.vector_norm(blocks, torch.inf, dim=-1, keepdim=True)
    exact = (ends / largest).clamp(min=1e-30)
    scales = exact.bfloat16()
    return torch.where(scales.float() < exact, scales * (1 + 2**-7), scales)


@dataclass(frozen=True, slots=True)
class Codec:
    """The formats of a store's two kinds of states."""

    name: str
    aux: Format
    final: Format

    @property
    def formats(self) -> dict[str, Format]:
        return {"aux": self.aux, "final": self.final}

    def encode(self, **states: Tensor) -> dict[str, Tensor]:
        """States by kind (aux [R, A * H], final [M, H]) -> tensors `<kind>.<part>`."""
        return {
            f"{kind}.{part}": tensor.contiguous()
            for kind, rows in states.items()
            for part, tensor in self.formats[kind].encode(rows).items()
        }

    def decode(self, kind: str, parts: Mapping[str, Tensor]) -> Tensor:
        """The states of one kind out of encoded tensors; others are ignored."""
        prefix = f"{kind}."
        mine = {k.removeprefix(prefix): v for k, v in parts.items() if k.startswith(prefix)}
        return self.formats[kind].decode(mine)

    def bytes_per_row(self, num_aux: int, hidden_size: int) -> tuple[int, int]:
        """Bytes of a row's aux states, and of its final state where that is kept."""
        return self.aux.bytes_per_row(num_aux * hidden_size), self.final.bytes_per_row(hidden_size)


_bf16, _fp32, _fp8 = Cast(torch.bfloat16), Cast(torch.float32), BlockFp8(block=128)
CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("bf16", _bf16, _bf16),
        Codec("fp32", _fp32, _fp32),
        Codec("fp8", _fp8, _fp8),
        Codec("int6", RotatedInt(6, block=32), RotatedInt(8, block=64)),
        Codec("int4", RotatedInt(4, block=32), RotatedInt(6, block=32)),
    )
}


def get(name: str) -> Codec:
    """Codec of that name.

    Raises:
        UserError: there is none.
    """
    if name not in CODECS:
        raise UserError(f"codec.name={name} is not one of {sorted(CODECS)}")
    return CODECS[name]
