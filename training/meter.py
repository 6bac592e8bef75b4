"""Speed, utilisation and memory of a run between two lines of metrics, over all ranks."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from typing import Any

import torch

from eagle3 import flops
from training.data import Loaded
from training.world import World


class Meter:
    """Counts what this rank trains on since the last `restart`; `values` adds the ranks up.

    Args:
        peak_tflops: of one device; None leaves out MFU.
    """

    def __init__(self, world: World, peak_tflops: float | None) -> None:
        self.world, self.peak_tflops = world, peak_tflops
        self.restart()

    def restart(self) -> None:
        self.started = time.perf_counter()
        self.tokens, self.generated, self.flops, self.waited_s = 0, 0, 0.0, 0.0

    def take(self, batches: Iterator[Loaded], count: int) -> list[Loaded]:
        """The next `count` batches; the time they are not ready yet is waiting for data."""
        before = time.perf_counter()
        window = [next(batches) for _ in range(count)]
        self.waited_s += time.perf_counter() - before
        self.tokens += sum(loaded.batch.num_rows for loaded in window)
        self.generated += sum(loaded.generated for loaded in window)
        self.flops += sum(loaded.flops for loaded in window)
        return window

    def values(self) -> dict[str, Any]:
        """Metrics of all ranks, reduced once; every rank takes part.

        Time is the caller's clock, the same on all ranks since they step together.
        """
        elapsed_s, size = time.perf_counter() - self.started, self.world.size
        own = torch.zeros(4 + size, dtype=torch.float64, device=self.world.device)
        own[:4] = own.new_tensor([self.tokens, self.generated, self.flops, self.waited_s])
        own[4 + self.world.rank] = self._peak_memory_gb()
        tokens, generated, done, waited_s, *memory = self.world.sum(own).tolist()
        values = {
            "train/tokens_per_s": tokens / elapsed_s,
            "train/supervised_tokens_per_s": generated / elapsed_s,
            "train/data_wait": waited_s / size / elapsed_s,
            "train/peak_memory_gb": max(memory),
        }
        if self.peak_tflops is not None:
            values["train/mfu"] = done / (elapsed_s * size * self.peak_tflops * 1e12)
        return values

    def _peak_memory_gb(self) -> float:
        """Peak of the GPU's memory, or of this process's resident memory without a GPU."""
        if self.world.device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 1e9
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


TIMED = (
    "train/tokens_per_s", "train/supervised_tokens_per_s", "train/data_wait",
    "train/peak_memory_gb", "train/mfu",
)  # fmt: skip
"""What differs between two runs that are the same."""


def device_peak_tflops(configured: float | None, world: World, bf16: bool) -> float | None:
    """`train.peak_tflops`, or that of a GPU in the table that computes in bf16."""
    if configured is None and world.device.type == "cuda" and bf16:
        return flops.peak_tflops(torch.cuda.get_device_name(world.device))
    return configured
