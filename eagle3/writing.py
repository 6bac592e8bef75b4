"""A run's folders, and what keeps a command from working in them that its user can mend."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from eagle3.errors import UserError

REMEDY = (
    "The run's files are there: move away what is in the way, get the right to read and write, or "
    "choose another runs_dir, run_name or train_dir"
)
HINDRANCES = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP,
    errno.ENAMETOOLONG,
}  # fmt: skip
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def require(folder: Path) -> None:
    """Refuse, before any work, a folder that is not there and cannot be made, or takes no files.

    Raises:
        UserError: names what is in the way.
    """
    there = _nearest(folder)
    if not there.is_dir():
        raise UserError(f"{there} is not a folder. {REMEDY}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{there} is not writable for this user. {REMEDY}")


@contextmanager
def told(*folders: Path) -> Iterator[None]:
    """Tell what the system refuses to do in these folders, or on the way to them, as a mistake;
    and a full disk, wherever it is, for the system does not say.

    Raises:
        UserError: names the file, where it is known, and the reason.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        if _full(error):
            free = shutil.disk_usage(_nearest(folders[0])).free
            raise UserError(
                f"a disk is full: {error} ({folders[0]} has {free:,} bytes free). Free some space, "
                "or choose another runs_dir, and run the same command again: what was finished is "
                "kept"
            ) from error
        if isinstance(error, OSError) and any(_hinders(error, f.absolute()) for f in folders):
            raise UserError(f"{error.filename}: {error.strerror}. {REMEDY}") from error
        raise


def _nearest(folder: Path) -> Path:
    """The folder, or what there is on the way to it."""
    there = folder.absolute()
    while not os.path.lexists(there):
        there = there.parent
    return there


def _full(error: OSError | SafetensorError) -> bool:
    if isinstance(error, OSError):
        return error.errno in FULL
    code = re.search(r"os error (\d+)", str(error))  # of safetensors' own writing
    return code is not None and int(code[1]) in FULL


def _hinders(error: OSError, folder: Path) -> bool:
    """Whether it is the reason why something in a folder, or the folder, could not be made."""
    if not isinstance(error.filename, str):
        return False
    path = Path(error.filename).absolute()
    if folder.is_relative_to(path):
        return error.errno in {*HINDRANCES, errno.ENOENT}
    return path.is_relative_to(folder) and error.errno in HINDRANCES
