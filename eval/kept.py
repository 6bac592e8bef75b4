"""What servers gave, kept as soon as it is there: eval and tune may be ended at any instant.

    <folder>/manifest.json        what all of it was measured with
    <folder>/<server>/<piece>.json

A piece is a run (one benchmark at one concurrency) or what was looked up about it. Each carries the
settings that its server ran with, when that server was there, and a hash, so that what is read is
what was measured.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eagle3 import provenance
from eagle3.errors import UserError
from eagle3.lock import exclusive
from eagle3.manifest import NAME, Manifest, require_match, write_text

log = logging.getLogger(__name__)
KIND = "kept"
ANEW = "It is measured anew."


@contextmanager
def claimed(folder: Path, manifest: Manifest, refuse: bool) -> Iterator[None]:
    """Hold a folder that has nothing in it but what was measured as its manifest says.

    refuse: whether what was measured otherwise is left alone and an error; else it is told and
    removed.

    Raises:
        UserError: another process is at work in it; with `refuse`, what is in it was measured
            otherwise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder):
        begun = any(folder.glob("*/*.json"))
        remedy = f"Remove {folder} to measure anew, or choose another run_name."
        where = f"what is kept in {folder}"
        try:
            resumes = manifest.resumes(folder, where, remedy if refuse else ANEW, begun)
        except UserError as differing:
            if refuse:
                raise
            log.warning("%s", differing)
            resumes = False
        if not resumes:
            if begun:
                log.warning("%s is removed", where)
            _empty(folder)
            manifest.save(folder)
        yield


def discard(folder: Path) -> None:
    """Remove a folder that is held; one that is half removed is none to go on with."""
    _empty(folder)
    folder.rmdir()


def _empty(folder: Path) -> None:
    (folder / NAME).unlink(missing_ok=True)
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def now() -> str:
    """UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Kept:
    """The pieces of one server, by name; all of one server's were measured with the same settings.

    A file that is not what was written is told and removed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pieces: dict[str, dict[str, Any]] = {}
        self._start: dict[str, Any] = {}
        for path in sorted(folder.glob("*.json")):
            try:
                found = json.loads(path.read_bytes())
                whole = found.pop("sha256") == provenance.hash_json(found)
            except (ValueError, KeyError, AttributeError, TypeError):
                whole = False
            if whole:
                self._pieces[path.stem] = found
            else:
                log.warning("%s is damaged: what it held is measured again", path)
                path.unlink()

    def __contains__(self, name: str) -> bool:
        return name in self._pieces

    def __getitem__(self, name: str) -> Any:
        return self._pieces[name]["value"]

    def start(self, name: str) -> str:
        """When the server was there that gave this piece; of a running one, when it was asked."""
        return self._pieces[name]["start"]

    @property
    def settings(self) -> dict[str, Any]:
        """In force at the server that all pieces come from. There must be one."""
        return next(iter(self._pieces.values()))["settings"]

    def begin(self, settings: dict[str, Any]) -> None:
        """A server is there, and further pieces come from it. What ran with other settings is told
        and removed."""
        self._start = {"start": now(), "settings": settings}
        if not self._pieces:
            return
        try:
            where = f"the server that gave what is kept in {self.folder}"
            require_match({"settings": settings}, {"settings": self.settings}, where, ANEW)
        except UserError as differing:
            log.warning("%s", differing)
            for name in list(self._pieces):
                (self.folder / f"{name}.json").unlink()
                del self._pieces[name]

    def add(self, name: str, value: Any) -> None:
        """Keep a JSON value; all or nothing."""
        piece = {**self._start, "value": value}
        text = json.dumps({"sha256": provenance.hash_json(piece), **piece})
        write_text(self.folder / f"{name}.json", text)
        self._pieces[name] = piece
