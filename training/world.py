"""This process among the ranks: joining them, its share of the cores, leaving them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

ALONE = torch.get_num_threads()
"""Threads that torch takes by itself: all cores, or what OMP_NUM_THREADS says."""

BESIDE_A_GPU = 8
"""Threads of a rank whose work a GPU does: more only wait for each other in short operations."""


@dataclass(frozen=True, slots=True)
class World:
    """This process among the ranks."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def join(cls) -> World:
        """Join the process group: the launcher's, or one of a single process without a launcher."""
        import deepspeed

        if "RANK" not in os.environ:
            with socket.socket() as sock:
                sock.bind(("127.0.0.1", 0))
                port = sock.getsockname()[1]
            os.environ |= {
                "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        use_threads(host_works=device.type == "cpu")
        backend = "nccl" if device.type == "cuda" else "gloo"
        if device.type == "cpu":
            # DeepSpeed would compile a C++ extension for shared-memory collectives: minutes, and it
            # needs a compiler. gloo does the same work. Safe: the table only says what may be
            # built.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend=backend, verbose=False)
        return cls(dist.get_rank(), dist.get_world_size(), device)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, on every rank."""
        if self.size > 1:
            dist.all_reduce(values)
        return values


@contextlib.contextmanager
def group_left_at_end() -> Iterator[None]:
    """Around a program: leave the process group, if one was joined, before the interpreter ends.

    A group that is still there then may abort the process: its threads drop what they hold while
    the interpreter they need goes away. Seen in one of ten ends of gloo's ranks on busy cores.
    An error other than a user's mistake leaves nothing: it may have come amid an operation whose
    end the other ranks will never reach, and leaving would wait for it.
    """
    try:
        yield
    except SystemExit as stop:
        if stop.code not in (None, 0, 2):
            raise
        _leave()
        raise
    _leave()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def use_threads(host_works: bool) -> None:
    """Take this rank's share of the machine's cores, unless OMP_NUM_THREADS says how many.

    torchrun sets it to 1 for several ranks if it is not set. One rank that works on the CPU keeps
    what it has, so its results do too.

    Args:
        host_works: the CPU does what takes time; else at most BESIDE_A_GPU threads are of use.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    # of torchrun, of DeepSpeed's launcher; without either all ranks may be on this machine
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE")
    ranks = int(next(os.environ[name] for name in names if name in os.environ))
    threads = max(1, ALONE // ranks)
    if not host_works:
        threads = min(threads, BESIDE_A_GPU)
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
