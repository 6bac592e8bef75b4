"""Find what is wrong with a store, and where: index, sizes, checksums, values, argmax agreement.

Everything that reads a store trusts it after opening; this is the thorough look, run on demand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eagle3 import provenance
from eagle3.batch import needed_final
from eagle3.errors import UserError
from eagle3.manifest import Manifest
from eagle3.store.reader import StoreReader
from eagle3.store.writer import KIND, index_files, shard_paths

FEW_ROWS = 16


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong (`what`) and with which shard or sample (`where`)."""

    where: str
    what: str


@dataclass(kw_only=True, slots=True)
class Findings:
    """Outcome of `verify`.

    agreement: share of rows whose stored final state has its largest logit at the next token of the
    text; near 1 for greedy text of the same target, None without an lm_head.
    """

    problems: list[Problem]
    samples: int
    rows: int
    agreement: float | None


def verify(folder: Path, lm_head: Tensor | None = None, min_agreement: float = 0.0) -> Findings:
    """Check a store from the folder down to every value.

    Args:
        lm_head: the target's [vocab_size, H]; with it, every sample's final states are asked for
            the next token, on its device.
        min_agreement: least share of right answers of a sample of FEW_ROWS rows or more.
    """
    try:
        if problems := list(_changed_indexes(folder)):  # nothing in them can be believed
            return Findings(problems=problems, samples=0, rows=0, agreement=None)
        reader = StoreReader(folder)
    except UserError as error:
        problems = [Problem(str(folder), str(error))]
        return Findings(problems=problems, samples=0, rows=0, agreement=None)
    rows = int(reader.lengths.sum())
    if problems := list(_index_problems(reader)):  # samples cannot be located, let alone checked
        return Findings(problems=problems, samples=len(reader), rows=rows, agreement=None)
    agreed = asked = 0
    for number in range(len(reader)):
        where = f"sample {number} ({reader.ids[number]})"
        problems += [Problem(where, what) for what in _sample_problems(reader, number)]
        if lm_head is not None and (not problems or problems[-1].where != where):
            hits, total = _agreement(reader, number, lm_head)
            agreed, asked = agreed + hits, asked + total
            if total >= FEW_ROWS and hits < min_agreement * total:
                what = f"final states predict {hits} of {total} next tokens: of another text?"
                problems.append(Problem(where, what))
    return Findings(
        problems=problems,
        samples=len(reader),
        rows=rows,
        agreement=agreed / asked if asked else None,
    )


def _changed_indexes(folder: Path) -> Iterator[Problem]:
    """Index files that are not the ones extraction wrote, before anything tries to read them."""
    hashes = Manifest.load(folder, KIND).facts.get("index_sha256", [])
    for path, wanted in zip(index_files(folder), hashes, strict=False):
        if provenance.hash_file(path) != wanted:
            yield Problem(path.name, "is not the index file that extraction wrote")


def _index_problems(reader: StoreReader) -> Iterator[Problem]:
    """Index against the data files and the sizes of their tensors."""
    from safetensors import SafetensorError, safe_open

    known = set()
    table = reader.index.with_format("arrow")[:]
    names = ("shard", "start", "rows", "final_start", "final_rows")
    index = {name: table[name].to_numpy() for name in names}
    order = index["shard"].argsort(kind="stable")
    num_shards = len(index_files(reader.folder))
    bounds = np.searchsorted(index["shard"], np.arange(num_shards + 1), sorter=order)
    for shard in range(num_shards):
        path, _ = shard_paths(reader.folder, shard)
        known.add(path.name)
        mine = order[bounds[shard] : bounds[shard + 1]]
        ends = {kind: index[kind][mine].cumsum() for kind in ("rows", "final_rows")}
        misplaced = (index["start"][mine] != ends["rows"] - index["rows"][mine]) | (
            index["final_start"][mine] != ends["final_rows"] - index["final_rows"][mine]
        )
        for number in mine[misplaced]:
            yield Problem(f"sample {number} ({reader.ids[number]})", "is not where it should be")
        totals = {kind: int(end[-1]) if len(end) else 0 for kind, end in ends.items()}
        try:
            with safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118
                    wanted = totals["final_rows" if key.startswith("final.") else "rows"]
                    found = file.get_slice(key).get_shape()[0]
                    if found != wanted:
                        yield Problem(path.name, f"{key} has {found} rows, the index {wanted}")
        except (OSError, SafetensorError) as error:
            yield Problem(path.name, f"is missing or damaged: {error}")
    for path in reader.folder.glob("shard-*.safetensors"):
        if path.name not in known:
            yield Problem(path.name, "is in no index")


def _sample_problems(reader: StoreReader, number: int) -> Iterator[str]:
    """Checksum and values of one sample."""
    if reader.damaged(number):
        yield "checksum differs"
        return
    _, mask = reader.tokens(number)
    aux, final = reader.states(number)
    if len(final) != int(needed_final(mask).sum()):
        yield "final states do not fit the loss mask"
    for name, states in (("aux", aux.float()), ("final", final.float())):
        if not torch.isfinite(states).all():
            yield f"{name} states are not finite"
        elif len(states) and (states.amax(dim=1) == states.amin(dim=1)).any():
            yield f"{name} states are constant in a row"


def _agreement(reader: StoreReader, number: int, lm_head: Tensor) -> tuple[int, int]:
    """Rows whose largest logit is the next token, and rows asked."""
    ids, mask = reader.tokens(number)
    _, final = reader.states(number)
    following = ids[needed_final(mask).nonzero().flatten() + 1]
    best = (final.to(lm_head.device, lm_head.dtype) @ lm_head.T).argmax(dim=-1)
    return int((best.cpu() == following).sum()), len(following)
