"""What a command costs: its time, and the peak memory of it and all its children."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from eagle3.manifest import read_json, write_json

PERIOD_S = 2.0


@contextlib.contextmanager
def recorded(name: str, path: Path) -> Iterator[None]:
    """Add {name: {seconds, peak_memory_gb}} to the JSON file at `path` when the block succeeds; to
    what the same command took before, since it goes on where it was.

    Memory is the proportional set size summed over the process tree, so that what processes share
    counts once; it is sampled every PERIOD_S seconds.

    Raises:
        UserError: before the block, the file is damaged.
    """
    read(path)
    stop = threading.Event()
    peak = 0.0

    def sample() -> None:
        nonlocal peak
        while True:
            peak = max(peak, tree_memory_gb())
            if stop.wait(PERIOD_S):
                return

    start = time.monotonic()
    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    usage = read(path)  # again: other commands may have come to their end
    before = usage.get(name, {"seconds": 0.0, "peak_memory_gb": 0.0})  # it was resumed
    usage[name] = {
        "seconds": round(before["seconds"] + time.monotonic() - start, 1),
        "peak_memory_gb": round(max(before["peak_memory_gb"], peak), 2),
    }
    write_json(path, usage)


def read(path: Path) -> dict[str, dict[str, float]]:
    """Seconds and peak memory of the commands so far, by name.

    Raises:
        UserError: the file is damaged.
    """
    return read_json(path, "remove it, it only keeps figures") if path.exists() else {}


def tree_memory_gb() -> float:
    """Memory of this process and its descendants, in GB (10^9 bytes)."""
    me = psutil.Process()
    total = 0
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += process.memory_full_info().pss
    return total / 1e9
