"""Console logging and progress bars: rank 0 speaks, the others warn only."""

from __future__ import annotations

import logging
import os
import sys

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def rank() -> int:
    """This process's rank as the launcher set it (0 without a launcher)."""
    return int(os.environ.get("RANK", "0"))


def setup() -> None:
    """Send INFO and above (WARNING on ranks > 0) to stderr, with time, level and module."""
    level = logging.INFO if rank() == 0 else logging.WARNING
    logging.basicConfig(
        level=level,
        stream=sys.stderr,
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    for chatty in ("httpx", "urllib3", "filelock", "fsspec", "DeepSpeed", "matplotlib"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def progress(description: str) -> Progress:
    """A progress bar for long work; on a pipe or on ranks > 0 it stays silent.

    The caller adds its task: `task = bar.add_task(description, total=n, note="")`.
    """
    console = Console(stderr=True)
    return Progress(
        TextColumn("[bold]" + description),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=rank() != 0 or not console.is_terminal,
    )
