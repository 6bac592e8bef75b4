"""What an extraction will take, worked out before its first request."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from eagle3.errors import UserError
from eagle3.store.codecs import Codec

INDEX_BYTES_PER_SAMPLE = 200


@dataclass(kw_only=True, slots=True)
class Budget:
    """Size of a store and of the work to fill it; `hours` is None without a known rate."""

    num_samples: int
    num_tokens: int
    store_bytes: int
    bytes_per_token: float
    free_bytes: int
    hours: float | None

    def lines(self) -> list[str]:
        """For the console."""
        hours = "unknown rate" if self.hours is None else f"{self.hours:.2f} h"
        return [
            f"samples {self.num_samples:,}, tokens {self.num_tokens:,}, {hours}",
            f"store {self.store_bytes / 1e9:.2f} GB ({self.bytes_per_token:,.0f} bytes/token), "
            f"free {self.free_bytes / 1e9:.2f} GB",
        ]


def plan(
    folder: Path,
    codec: Codec,
    *,
    num_samples: int,
    num_tokens: int,
    num_final: int,
    num_aux: int,
    hidden_size: int,
    tokens_per_s: float | None = None,
) -> Budget:
    """Budget of a store with `num_final` of its `num_tokens` rows keeping their final state."""
    aux = num_tokens * (codec.bytes_per_row(num_aux * hidden_size) + 5)
    final = num_final * codec.bytes_per_row(hidden_size)
    total = aux + final + num_samples * INDEX_BYTES_PER_SAMPLE
    existing = folder
    while not existing.exists():
        existing = existing.parent
    return Budget(
        num_samples=num_samples,
        num_tokens=num_tokens,
        store_bytes=total,
        bytes_per_token=total / max(num_tokens, 1),
        free_bytes=shutil.disk_usage(existing).free,
        hours=num_tokens / tokens_per_s / 3600 if tokens_per_s else None,
    )


def require_space(budget: Budget, folder: Path, max_bytes: int | None) -> None:
    """Refuse what does not fit the disk or the user's limit.

    Raises:
        UserError: with the numbers.
    """
    if budget.store_bytes > budget.free_bytes:
        raise UserError(
            f"the store needs {budget.store_bytes:,} bytes and {folder} has {budget.free_bytes:,} "
            "free: take fewer samples, a smaller codec, or another disk"
        )
    if max_bytes is not None and budget.store_bytes > max_bytes:
        raise UserError(
            f"the store needs {budget.store_bytes:,} bytes, over extract.max_bytes={max_bytes:,}"
        )
