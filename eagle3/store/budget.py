"""What an extraction will take, worked out before its first request."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from eagle3.errors import UserError
from eagle3.store.codecs import Codec

INDEX_BYTES_PER_SAMPLE = 200
TOKEN_BYTES = 5
"""An int32 id and a byte of loss mask."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What is to be captured: samples, their tokens, and how many of those keep a final state."""

    num_samples: int
    num_tokens: int
    num_final: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Size of a store and of the work to fill it; `hours` is None without a known rate."""

    codec: str
    work: Workload
    store_bytes: int
    free_bytes: int
    hours: float | None

    @property
    def bytes_per_token(self) -> float:
        return self.store_bytes / max(self.work.num_tokens, 1)

    @property
    def fits(self) -> bool:
        return self.store_bytes <= self.free_bytes

    def __str__(self) -> str:
        hours = "" if self.hours is None else f", {self.hours:.2f} h"
        return (
            f"{self.work.num_samples:,} samples, {self.work.num_tokens:,} tokens{hours}; "
            f"{self.codec}: {self.store_bytes / 1e9:,.2f} GB ({self.bytes_per_token:,.0f} bytes a "
            f"token), {self.free_bytes / 1e9:,.2f} GB free"
        )


def plan(
    folder: Path,
    codec: Codec,
    work: Workload,
    *,
    num_aux: int,
    hidden_size: int,
    tokens_per_s: float | None = None,
) -> Budget:
    """Budget of a store in a folder that need not exist yet."""
    aux, final = codec.bytes_per_row(num_aux, hidden_size)
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return Budget(
        codec=codec.name,
        work=work,
        store_bytes=work.num_tokens * (aux + TOKEN_BYTES)
        + work.num_final * final
        + work.num_samples * INDEX_BYTES_PER_SAMPLE,
        free_bytes=shutil.disk_usage(existing).free,
        hours=work.num_tokens / tokens_per_s / 3600 if tokens_per_s else None,
    )


def require(
    budget: Budget, folder: Path, *, max_bytes: int | None = None, max_hours: float | None = None
) -> None:
    """Refuse what does not fit the disk or the user's limits.

    Raises:
        UserError: with the numbers.
    """
    if not budget.fits:
        raise UserError(
            f"the store needs {budget.store_bytes:,} bytes and {folder} has {budget.free_bytes:,} "
            "free: take fewer samples, a smaller codec, or another disk"
        )
    if max_bytes is not None and budget.store_bytes > max_bytes:
        raise UserError(
            f"the store needs {budget.store_bytes:,} bytes, over extract.max_bytes={max_bytes:,}"
        )
    if max_hours is not None and budget.hours is not None and budget.hours > max_hours:
        raise UserError(
            f"{budget.work.num_tokens:,} tokens take {budget.hours:.2f} h, over "
            f"extract.max_hours={max_hours}"
        )
