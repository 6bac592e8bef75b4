"""Write a safetensors file from tensors that need not be joined first.

The library's `save_file` copies every tensor to a bytes object while it holds Python's lock, which
keeps a server's scheduler from launching its next forward; here bytes go from tensor to file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3", torch.int32: "I32", torch.uint8: "U8",
}  # fmt: skip


def write(path: Path, columns: Mapping[str, Sequence[Tensor]]) -> None:
    """Write CPU tensors, each column's end to end along the first dimension.

    Raises:
        OSError: the file cannot be written; a part of it may be left.
    """
    # widest types first, so that every tensor starts at a multiple of its type's size
    names = sorted(columns, key=lambda name: (-columns[name][0].element_size(), name))
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        parts = columns[name]
        start, end = end, end + sum(part.nbytes for part in parts)
        header[name] = {
            "dtype": DTYPES[parts[0].dtype],
            "shape": [sum(len(part) for part in parts), *parts[0].shape[1:]],
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        _write_all(file, len(text).to_bytes(8, "little") + text)
        for name in names:
            for part in columns[name]:
                if part.numel():
                    _write_all(file, part.contiguous().view(torch.uint8).numpy().data)


def _write_all(file: Any, data: bytes | memoryview) -> None:
    """An unbuffered write may take only a part."""
    rest = memoryview(data).cast("B")
    while len(rest):
        rest = rest[file.write(rest) :]
