"""How hidden states are kept on disk: one tensor in, a few named tensors out, and back.

Every codec works row by row, so that any row range can be decoded on its own, and on any device.
Shapes: R rows of W values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from eagle3.errors import UserError

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
INT4_MAX = 7


class Codec(Protocol):
    """Encodes rows [R, W] into named tensors of R rows each."""

    name: str

    def encode(self, states: Tensor) -> dict[str, Tensor]:
        """Rows [R, W] in any float type -> named tensors."""

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Named tensors of R rows -> [R, W], in bf16 unless the codec keeps more."""

    def bytes_per_row(self, width: int) -> int:
        """Size of an encoded row of `width` values."""


class Cast:
    """Keeps the values in one float type: exact when the target runs in that type."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
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

    def __init__(self, name: str, block: int) -> None:
        self.name = name
        self.block = block

    def encode(self, states: Tensor) -> dict[str, Tensor]:
        blocks = _blocks(states, self.block)
        scales = _scales(blocks, FP8_MAX)
        values = (blocks / scales.float()).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        return {"values": values.flatten(1)[:, : states.shape[1]], "scales": scales.squeeze(-1)}

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        width = parts["values"].shape[1]
        blocks = _blocks(parts["values"], self.block) * parts["scales"].float()[..., None]
        return blocks.flatten(1)[:, :width].bfloat16()

    def bytes_per_row(self, width: int) -> int:
        return width + 2 * -(-width // self.block)


class RotatedInt4:
    """4-bit integers after a Hadamard rotation, with one bf16 scale for each block of a row.

    Hidden states have a few channels far larger than the rest, which would leave the others no
    levels. The rotation spreads every channel over its block; it is orthogonal, so decoding rotates
    back and the error stays spread out. Needs a width that is a multiple of the block.
    """

    def __init__(self, name: str, block: int) -> None:
        assert block & (block - 1) == 0, "Hadamard matrices here have a power of two"
        self.name = name
        self.block = block

    def encode(self, states: Tensor) -> dict[str, Tensor]:
        if states.shape[1] % self.block:
            raise UserError(
                f"codec.name={self.name} needs a hidden size that is a multiple of {self.block}; "
                f"{states.shape[1]} values a row are not"
            )
        rotated = _blocks(states, self.block) @ hadamard(self.block, states.device)
        scales = _scales(rotated, INT4_MAX)
        levels = (rotated / scales.float()).round().clamp(-INT4_MAX, INT4_MAX)
        nibbles = (levels + 8).to(torch.uint8).flatten(1)
        return {"values": nibbles[:, ::2] | nibbles[:, 1::2] << 4, "scales": scales.squeeze(-1)}

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        packed = parts["values"]
        nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
        blocks = _blocks(nibbles.float() - 8, self.block) * parts["scales"].float()[..., None]
        return (blocks @ hadamard(self.block, packed.device)).flatten(1).bfloat16()

    def bytes_per_row(self, width: int) -> int:
        return width // 2 + 2 * (width // self.block)


def hadamard(size: int, device: torch.device) -> Tensor:
    """Orthogonal, symmetric Hadamard matrix [size, size] of a power of two: its own inverse."""
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < size:
        matrix = torch.cat(
            [torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)]
        )
    return matrix / size**0.5


def _blocks(rows: Tensor, block: int) -> Tensor:
    """[R, W] -> float32 [R, ceil(W / block), block], padded with zeros."""
    padding = -rows.shape[1] % block
    wide = torch.nn.functional.pad(rows.float(), (0, padding))
    return wide.unflatten(1, (-1, block))


def _scales(blocks: Tensor, largest: float) -> Tensor:
    """bf16 scale of each block [R, B, 1], rounded up so that no value leaves the range."""
    exact = (blocks.abs().amax(dim=-1, keepdim=True) / largest).clamp(min=1e-30)
    scales = exact.bfloat16()
    return torch.where(scales.float() < exact, scales * (1 + 2**-7), scales)


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Cast("bf16", torch.bfloat16),
        Cast("fp32", torch.float32),
        BlockFp8("fp8", block=128),
        RotatedInt4("int4", block=64),
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
