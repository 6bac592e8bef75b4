"""One process at a time in a folder."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle3.errors import UserError

log = logging.getLogger(__name__)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold a folder for this process; the system lets go of it however the process ends.

    A file system that has no locks is told about, and nothing is held.

    Raises:
        UserError: another process holds it.
    """
    handles: list[int] = []
    try:
        try:
            _lock(os.open(folder, os.O_RDONLY), handles)
        except BlockingIOError:
            raise
        except OSError:  # NFS locks only what is open for writing, which a folder cannot be
            beside = folder.resolve().parent / f".{folder.name}.lock"
            _lock(os.open(beside, os.O_RDWR | os.O_CREAT, 0o600), handles)
    except BlockingIOError:
        _close(handles)
        raise UserError(f"another process is at work in {folder}; wait for it or end it") from None
    except OSError as error:
        log.warning("%s cannot be locked (%s): let no other process work in it", folder, error)
    try:
        yield
    finally:
        _close(handles)


def _lock(handle: int, handles: list[int]) -> None:
    handles.append(handle)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _close(handles: list[int]) -> None:
    for handle in handles:
        os.close(handle)
