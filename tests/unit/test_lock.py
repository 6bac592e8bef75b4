"""A folder is held by one process, whatever its file system can lock."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3.errors import UserError
from eagle3.lock import exclusive

HOLD = """
import sys
from pathlib import Path
from eagle3.lock import exclusive
with exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(params=["local", "nfs"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param == "nfs":  # as there: no lock on what is open for reading only
        real = fcntl.flock

        def flock(handle: int, how: int) -> None:
            if stat.S_ISDIR(os.fstat(handle).st_mode):
                raise OSError(errno.EBADF, "Bad file descriptor")
            real(handle, how)

        monkeypatch.setattr(fcntl, "flock", flock)
    made = tmp_path / "store"
    made.mkdir()
    return made


def test_a_second_one_is_refused_until_the_first_is_gone(folder: Path) -> None:
    for _ in range(2):
        refused = pytest.raises(UserError, match="another process is at work")
        with exclusive(folder), refused, exclusive(folder):
            pass
    assert list(folder.iterdir()) == []


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match="another process"), exclusive(tmp_path):
            pass
        other.kill()
        other.wait()
    with exclusive(tmp_path):
        pass


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with exclusive(tmp_path):
        assert "cannot be locked" in caplog.text and "No locks available" in caplog.text
