"""The figures of `bench/extract.py`: rounds to rows, and what the disk takes."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle3.store import safetensors_file


@dataclass(kw_only=True, slots=True)
class Row:
    """One codec: medians over the rounds.

    capture_tok_s: until the store is finished. captured_tok_s: until the last capture has arrived
    at the writer, finish_s before the end. ratio: capture_tok_s / plain_tok_s of the same rounds.
    bytes_per_token: of the store. spool_gb_s: those bytes a second. disk_mb_s: what the disk of the
    store takes, in millions of bytes. gpu_gib: GPU memory in use by both servers at the end, None
    without a GPU.
    """

    codec: str
    plain_tok_s: float
    capture_tok_s: float
    captured_tok_s: float
    finish_s: float
    ratio: float
    bytes_per_token: float
    spool_gb_s: float
    disk_mb_s: float
    gpu_gib: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """Speed of prefilling some tokens, and how long capturing them took: captured_s until the last
    one had arrived, finish_s from there to the finished store of `size` bytes."""

    tokens: int
    plain_tok_s: float
    captured_s: float
    finish_s: float
    size: int

    @property
    def capture_tok_s(self) -> float:
        return self.tokens / (self.captured_s + self.finish_s)


def row_of(codec: str, rounds: list[Round], disk_mb_s: float, gpu: float | None) -> Row:
    """Medians of a codec's rounds."""
    plain_tok_s = statistics.median(r.plain_tok_s for r in rounds)
    capture_tok_s = statistics.median(r.capture_tok_s for r in rounds)
    bytes_per_token = rounds[0].size / rounds[0].tokens
    return Row(
        codec=codec,
        plain_tok_s=plain_tok_s,
        capture_tok_s=capture_tok_s,
        captured_tok_s=statistics.median(r.tokens / r.captured_s for r in rounds),
        finish_s=statistics.median(r.finish_s for r in rounds),
        ratio=capture_tok_s / plain_tok_s,
        bytes_per_token=bytes_per_token,
        spool_gb_s=bytes_per_token * capture_tok_s / 1e9,
        disk_mb_s=disk_mb_s,
        gpu_gib=gpu,
    )


def disk_mb_s(folder: Path, size: int = 10**9) -> float:
    """Millions of bytes per second of a file of `size` random bytes, written as shards are."""
    data = torch.randint(256, (size,), dtype=torch.uint8)
    path = folder / "disk.safetensors"
    start = time.perf_counter()
    safetensors_file.write(path, {"data": [data]})
    with path.open("rb") as file:
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return size / 1e6 / seconds
