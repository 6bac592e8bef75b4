"""The GPU, where there is one."""

from __future__ import annotations

import torch


def synchronize() -> None:
    """Wait until it has done its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def allocated() -> int:
    """Bytes that this process's tensors take up there; 0 without one."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
