"""When to give up on a server process, and how to end it with all its children."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from eagle3.errors import UserError

PR_SET_PDEATHSIG = 1
"""prctl option, from linux/prctl.h."""


@dataclass(kw_only=True, slots=True)
class Limits:
    """A starting server is ended when it breaks one of these.

    deadline_s: seconds from launch to the first real answer. memory_gb: resident memory of any one
    process. stall_s: seconds without a new log line. None switches a limit off.
    """

    deadline_s: float
    memory_gb: float | None
    stall_s: float | None


class ServerFailed(UserError):
    """A starting server died or was ended: what it was told to run with does not work here, as a
    rule. The message gives the reason and the log's tail."""


def tail(log: Path, num_lines: int = 40) -> str:
    """Last lines of a log file, each cut to a readable width."""
    if not log.exists():
        return "(no log)"
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 65536))
        lines = file.read().decode(errors="replace").splitlines()[-num_lines:]
    return "\n".join(line if len(line) <= 400 else line[:400] + " ..." for line in lines)


def wait_until(
    ready: Callable[[], bool], pid: int, log: Path, limits: Limits, poll_s: float = 0.5
) -> float:
    """Poll `ready` until it is true; return the seconds it took.

    Raises:
        ServerFailed: the process ended or broke a limit first. The caller still has to `end` it.
    """
    start = progress = time.monotonic()
    size = 0
    while True:
        now = time.monotonic()
        reason = _broken(pid, now - start, limits)
        grown = log.stat().st_size if log.exists() else 0
        if grown != size:
            size, progress = grown, now
        elif limits.stall_s is not None and now - progress > limits.stall_s:
            reason = f"no log line for {limits.stall_s:.0f} s and no answer"
        if reason is None and ready():
            return time.monotonic() - start
        if reason is not None:
            raise ServerFailed(f"server (pid {pid}): {reason}. End of {log}:\n{tail(log)}")
        time.sleep(poll_s)


def _broken(pid: int, elapsed_s: float, limits: Limits) -> str | None:
    """Which limit a server has broken, if any."""
    try:
        main = psutil.Process(pid)
        if main.status() == psutil.STATUS_ZOMBIE:
            return "the process ended"
        family = [main, *main.children(recursive=True)]
    except psutil.NoSuchProcess:
        return "the process ended"
    if elapsed_s > limits.deadline_s:
        return f"not ready within {limits.deadline_s:.0f} s"
    if limits.memory_gb is not None:
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                used = process.memory_info().rss / 1e9
                if used > limits.memory_gb:
                    return (
                        f"process {process.pid} uses {used:.1f} GB, over the limit of "
                        f"{limits.memory_gb:.1f} GB"
                    )
    return None


def die_with_parent() -> None:
    """In a child before it executes: be killed when the parent dies, even by SIGKILL (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end(pid: int, grace_s: float = 10.0) -> None:
    """End a process that leads its own group, with every descendant wherever it went.

    SIGKILL at once: a server has nothing to save, and takes SIGTERM for a crash to be diagnosed at
    length. Python's resource trackers are left a moment to remove shared memory, which they do when
    their parents are gone.
    """
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        main = psutil.Process(pid)
        family = [main, *main.children(recursive=True)]
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            if not any("resource_tracker" in part for part in process.cmdline()):
                process.kill()
    _, alive = psutil.wait_procs(family, timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=grace_s)
