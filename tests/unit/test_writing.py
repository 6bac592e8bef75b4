"""What the system refuses in a run's folders is told as a mistake; all else stays a defect."""

import errno
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from eagle3 import writing
from eagle3.errors import UserError


def test_a_folder_that_cannot_be_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing.require(tmp_path / "not" / "yet")
    assert list(tmp_path.iterdir()) == []
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to(tmp_path / "nowhere")
    for there in (file, link):
        for folder in (there, there / "run"):
            with pytest.raises(UserError, match=f"{there} is not a folder.*choose another runs_di"):
                writing.require(folder)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(UserError, match=f"{tmp_path} is not writable.*get the right to"):
        writing.require(tmp_path / "run")


@pytest.mark.parametrize(
    "kind", [errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.EISDIR]
)
def test_what_hinders_in_the_folders_or_on_the_way_to_them_is_told(
    tmp_path: Path, kind: int
) -> None:
    run, other = tmp_path / "runs" / "a", tmp_path / "else"
    for name in (run / "train" / "x.json", run, run.parent, other / "b"):
        with (
            pytest.raises(UserError, match=f"{name}: {os.strerror(kind)}"),
            writing.told(run, other),
        ):
            raise OSError(kind, os.strerror(kind), str(name))


@pytest.mark.parametrize("kind", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_whoever_noticed(tmp_path: Path, kind: int) -> None:
    reason = os.strerror(kind)
    for error in (
        OSError(kind, reason),
        OSError(kind, reason, "/somewhere/else"),
        SafetensorError(f"Error while serializing: I/O error: {reason} (os error {kind})"),
    ):
        told = rf"(?s){reason}.*{tmp_path}/run has [\d,]+ bytes free"
        with pytest.raises(UserError, match=told), writing.told(tmp_path / "run"):
            raise error


@pytest.mark.parametrize(
    "error",
    [
        SafetensorError("Error while deserializing header: header too small"),
        SafetensorError("I/O error: Input/output error (os error 5)"),
        OSError(errno.EACCES, "denied", "/somewhere/else"),
        OSError(errno.EACCES, "denied"),
        OSError(errno.ENOENT, "not there", "/runs/a/train/manifest.json"),  # we should have made it
        OSError(errno.EIO, "broken disk", "/runs/a/x"),
        ValueError("x"),
    ],
)
def test_everything_else_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, writing.told(Path("/runs/a")):
        raise error
    assert raised.value is error


def test_a_folder_that_the_system_does_not_let_be_made_is_told() -> None:
    with (
        pytest.raises(UserError, match="/proc/nope: No such file"),
        writing.told(Path("/proc/nope/run")),
    ):
        Path("/proc/nope/run").mkdir(parents=True)
