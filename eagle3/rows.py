"""Rows of the files and data sets that people bring, as they are.

JSON Lines and JSON are read row by row, so that mixed types across rows cannot break a schema;
Parquet and hub data sets go through `datasets`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from eagle3.errors import UserError


def rows(path: str, split: str) -> Iterator[tuple[str, Any]]:
    """Each row, after where it is."""
    file = Path(path)
    if file.suffix == ".jsonl":
        _require(file)
        with file.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    try:
                        row = json.loads(line)
                    except ValueError:
                        row = None
                    yield f"line {number}", row
    elif file.suffix == ".json":
        _require(file)
        try:
            data = json.loads(file.read_text(encoding="utf-8-sig", errors="surrogateescape"))
        except ValueError as error:
            raise UserError(
                f"{file} is not JSON ({error}); a file with a row on each line is named .jsonl"
            ) from error
        yield from _numbered(data if isinstance(data, list) else [data])
    else:
        yield from _numbered(_data_set(path, split))


def _data_set(path: str, split: str) -> Iterable[Any]:
    """A Parquet file, or a data set of the hub."""
    import datasets
    import pyarrow

    file = Path(path)
    try:
        if file.suffix == ".parquet":
            _require(file)
            return datasets.load_dataset("parquet", data_files=str(file), split="train")
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


def _numbered(rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"row {number}", row) for number, row in enumerate(rows, start=1))


def _require(file: Path) -> None:
    if not file.exists():
        raise UserError(f"data file {file} does not exist")
