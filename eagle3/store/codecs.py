"""How hidden states are kept on disk: one tensor in, a few named tensors out, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from eagle3.errors import UserError


class Codec(Protocol):
    """Encodes rows [R, W] so that any row range can be decoded on its own."""

    name: str

    def encode(self, states: Tensor) -> dict[str, Tensor]:
        """Rows [R, W] in any float type -> named tensors, each with R rows."""

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Named tensors of R rows -> [R, W]."""

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


CODECS: dict[str, Codec] = {
    "bf16": Cast("bf16", torch.bfloat16),
    "fp32": Cast("fp32", torch.float32),
}


def get(name: str) -> Codec:
    """Codec of that name.

    Raises:
        UserError: there is none.
    """
    if name not in CODECS:
        raise UserError(f"codec.name={name} is not one of {sorted(CODECS)}")
    return CODECS[name]
