"""manifest.json: what an output folder is, what made it, and what the next stage must match."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eagle3 import provenance
from eagle3.errors import UserError

FORMAT = 1
NAME = "manifest.json"
MADE_BY = {
    "responses": "respond", "store": "extract", "checkpoints": "train", "drafter": "export",
    "eval": "eval", "kept": "eval",
}  # fmt: skip
"""Kind of a folder -> the command that writes it."""
REMEDY = "Restore it, or make the folder anew"


class _Found(dict[str, Any]):
    """Part of a manifest that was read: of a key that is not there, the user is told."""

    path: Path | None = None

    def __missing__(self, key: str) -> Any:
        raise UserError(f"{self.path} is damaged: it does not say {key!r}. {REMEDY}")


@dataclass(kw_only=True, slots=True)
class Manifest:
    """Contents of manifest.json.

    `kind` says what the folder is (one of MADE_BY). `match` holds the
    facts that a later stage, or the same stage resuming, must agree with; everything else is
    record.
    """

    kind: str
    match: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=provenance.versions)
    git_commit: str = field(default_factory=provenance.git_commit)
    format: int = FORMAT

    def save(self, folder: Path) -> None:
        write_json(folder / NAME, asdict(self))

    @classmethod
    def load(cls, folder: Path, kind: str) -> Manifest:
        """Read a folder's manifest.

        Raises:
            UserError: there is none, it is damaged, of another kind of folder, or of another
                format version.
        """
        path = folder / NAME
        if not path.exists():
            raise UserError(
                f"{folder} has no {NAME}, so it holds no {kind}: run `{MADE_BY[kind]}` first, or "
                "correct run_name"
            )
        data = read_json(path, REMEDY)
        try:
            if data["format"] != FORMAT:
                raise UserError(f"{path} has format {data['format']}; this version reads {FORMAT}")
            found = cls(**data)
            for name in ("match", "facts"):
                part = _Found(getattr(found, name))
                part.path = path
                setattr(found, name, part)
        except UserError:
            raise
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{path} is damaged: {error!r}. {REMEDY}") from error
        if found.kind != kind:
            raise UserError(f"{folder} holds {found.kind!r}, expected {kind!r}")
        return found

    @staticmethod
    def of_ours(folder: Path) -> bool:
        """Whether a folder has a manifest that is not some other tool's file of that name."""
        try:
            return "format" in json.loads((folder / NAME).read_text())
        except (OSError, ValueError, TypeError):
            return False

    def resumes(self, folder: Path, where: str, remedy: str, begun: bool = True) -> bool:
        """Whether the folder holds an earlier part of this same run.

        Args:
            begun: whether there is any result of it; without one, another run may take its place.

        Raises:
            UserError: it holds another kind of folder, or one whose `match` differs.
        """
        if not (folder / NAME).exists():
            return False
        found = Manifest.load(folder, self.kind)
        if begun:
            require_match(self.match, found.match, where, remedy)
        return begun

    def hash(self) -> str:
        """Identity of this folder for the manifests of the stages that read it: what it was made
        from and how, not how long that took."""
        return provenance.hash_json([self.kind, self.match, self.inputs])


def require_match(wanted: dict[str, Any], found: dict[str, Any], where: str, remedy: str) -> None:
    """Raise UserError naming every key on which two `match` dicts differ.

    Only keys present in both are compared: a stage states what it depends on.
    """
    differing = [k for k in wanted if k in found and wanted[k] != found[k]]
    if differing:
        lines = [line for k in differing for line in _differences(k, wanted[k], found[k])]
        raise UserError("\n".join([f"{where} does not match:", *lines, remedy]))


def _differences(key: str, wanted: Any, found: Any) -> list[str]:
    """A line for each value in which two that differ do."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        return [
            line
            for k in dict.fromkeys([*wanted, *found])
            if wanted.get(k) != found.get(k)
            for line in _differences(f"{key}.{k}", wanted.get(k), found.get(k))
        ]
    return [f"  {key}: configured {wanted!r}, found {found!r}"]


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        UserError: it cannot be read, or holds none; tells the remedy.
    """
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is damaged, not JSON ({error}): {remedy}") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} is damaged, not a JSON object: {remedy}")
    return data


def write_json(path: Path, value: Any) -> None:
    """Write JSON as `write_text` does."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write to a temporary name beside `path`, sync, rename: never half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
