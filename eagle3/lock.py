"""One process at a time in a folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle3.errors import UserError


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold a folder for this process; the system lets go of it however the process ends.

    Raises:
        UserError: another process holds it.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process is at work in {folder}; wait for it or end it"
            ) from None
        yield
    finally:
        os.close(handle)
