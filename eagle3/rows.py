"""Rows of the files and data sets that people bring, as they are.

JSON Lines and JSON are read row by row, so that mixed types across rows cannot break a schema;
Parquet and hub data sets go through `datasets`, which gives every object the keys of all: what is
null there is left out again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from eagle3.errors import UserError

UNREADABLE = {
    b"\x1f\x8b": "is compressed (gzip): unpack it",
    b"\x28\xb5\x2f\xfd": "is compressed (zstd): unpack it",
    b"BZh": "is compressed (bzip2): unpack it",
    b"\xfd7zXZ": "is compressed (xz): unpack it",
    b"PK\x03\x04": "is a zip archive: unpack it",
    b"PAR1": "is a Parquet file: name it .parquet",
}
"""What other files begin with -> what to do."""


def rows(path: str, split: str) -> Iterator[tuple[str, Any]]:
    """Each row, after where it is.

    Raises:
        UserError: nothing there, or nothing of a form that can be read.
    """
    if not path:
        raise UserError("the name of a data file is empty: give one")
    file = Path(path)
    if file.suffix == ".jsonl":
        with _text(file) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    try:
                        row = json.loads(line)
                    except (ValueError, RecursionError):
                        row = None
                    yield f"line {number}", row
    elif file.suffix == ".json":
        try:
            with _text(file) as text:
                data = json.loads(text.read())
        except UserError:
            raise
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{file} is not JSON ({error}); a file with a row on each line is named .jsonl"
            ) from error
        yield from _numbered(data if isinstance(data, list) else [data])
    else:
        yield from _numbered(map(_without_nulls, _data_set(path, split)))


@contextmanager
def _text(file: Path) -> Iterator[TextIO]:
    """A file as text; bytes that are no UTF-8 become lone surrogates, for rows to be counted by."""
    _require(file)
    try:
        with file.open("rb") as raw:
            head = raw.read(8)
    except OSError as error:
        raise UserError(f"data file {file} cannot be read: {error.strerror}") from error
    for sign, words in UNREADABLE.items():
        if head.startswith(sign):
            raise UserError(f"data file {file} {words}")
    if b"\0" in head:
        raise UserError(f"data file {file} is no UTF-8 text (UTF-16, perhaps): convert it to UTF-8")
    with file.open(encoding="utf-8-sig", errors="surrogateescape") as text:
        yield text


def _data_set(path: str, split: str) -> Iterable[Any]:
    """A Parquet file, or a data set of the hub."""
    import datasets
    import pyarrow

    file = Path(path)
    try:
        if file.suffix == ".parquet":
            _require(file)
            return datasets.load_dataset("parquet", data_files=str(file), split="train")
        if file.is_file():
            raise UserError(
                f"data file {file} cannot be read: it is none of .jsonl, .json and .parquet. "
                "Convert or unpack it, or give it the name of its form"
            )
        name, _, subset = path.partition(":")
        return datasets.load_dataset(name, subset or None, split=split)
    except UserError:
        raise
    except (
        OSError,
        ValueError,
        RuntimeError,  # a data set that is a script
        datasets.exceptions.DatasetsError,
        pyarrow.ArrowException,
    ) as error:
        raise UserError(
            f"{path} (split {split}) cannot be read, neither as a .jsonl, .json or .parquet file "
            f"nor from the hub: {type(error).__name__}: {error}"
        ) from error


def _without_nulls(value: Any) -> Any:
    """The same without keys whose value is None, also of objects inside it."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list) and any(isinstance(part, dict | list) for part in value):
        return [_without_nulls(part) for part in value]
    return value


def _numbered(rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"row {number}", row) for number, row in enumerate(rows, start=1))


def _require(file: Path) -> None:
    if not file.exists():
        raise UserError(f"data file {file} does not exist")
    if file.is_dir():
        raise UserError(f"{file} is a folder: name a file in it")
