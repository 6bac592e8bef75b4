"""Random access to a store's samples, and packed batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3.batch import Batch, needed_final
from eagle3.errors import UserError
from eagle3.manifest import Manifest
from eagle3.store.codecs import get
from eagle3.store.writer import KIND, digest, index_files, shard_paths


class StoreReader:
    """A finished store, memory-mapped.

    Args:
        folder: the store.
        allow_incomplete: read what is committed of a store whose extraction has not finished.

    Raises:
        UserError: no store, an unfinished one, or missing shards.
    """

    def __init__(self, folder: Path, allow_incomplete: bool = False) -> None:
        from datasets import Dataset, concatenate_datasets

        self.folder = folder
        self.manifest = Manifest.load(folder, KIND)
        self.codec = get(self.manifest.match["codec"])
        files = index_files(folder)
        complete = self.manifest.facts.get("complete", False)
        if not complete and not allow_incomplete:
            raise UserError(f"the store in {folder} is not finished; run the extract command again")
        if not files or (complete and len(files) != self.manifest.facts["shards"]):
            raise UserError(f"the store in {folder} lacks shards: {len(files)} found")
        self.index = concatenate_datasets([_index(Dataset, f) for f in files])
        table = self.index.with_format("numpy")
        self.ids: list[str] = list(self.index["id"])
        self.lengths: np.ndarray = np.asarray(table["rows"])
        self._shard, self._start = np.asarray(table["shard"]), np.asarray(table["start"])
        self._final_start = np.asarray(table["final_start"])
        self._final_rows = np.asarray(table["final_rows"])
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, number: int) -> tuple[Tensor, Tensor]:
        """Token ids [T] int64 and loss mask [T] bool of one sample."""
        rows = self._rows(number)
        file = self._file(number)
        ids = file.get_slice("input_ids")[rows].long()
        return ids, file.get_slice("loss_mask")[rows].bool()

    def states(self, number: int) -> tuple[Tensor, Tensor]:
        """Aux [T, A * H] and final states [M, H] of one sample, decoded."""
        start, count = int(self._final_start[number]), int(self._final_rows[number])
        aux = self._decode(number, "aux", self._rows(number))
        return aux, self._decode(number, "final", slice(start, start + count))

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Pack whole samples into one batch."""
        columns: tuple[list[Tensor], ...] = ([], [], [], [], [])
        taken = 0
        for number in numbers:
            input_ids, loss_mask = self.tokens(number)
            aux, final = self.states(number)
            needed = needed_final(loss_mask)
            index = torch.where(needed, needed.cumsum(0) - 1 + taken, -1)
            taken += final.shape[0]
            for column, part in zip(
                columns, (input_ids, loss_mask, aux, final, index), strict=True
            ):
                column.append(part)
        ids, masks, auxs, finals, indexes = columns
        lengths = torch.tensor([0, *(len(i) for i in ids)])
        return Batch(
            input_ids=torch.cat(ids),
            loss_mask=torch.cat(masks),
            doc_starts=lengths.cumsum(0),
            aux=torch.cat(auxs),
            final=torch.cat(finals),
            final_index=torch.cat(indexes),
        )

    def label_counts(self, numbers: Sequence[int]) -> Tensor:
        """How often each target id is a supervised label in these samples [vocab_size]."""
        counts = torch.zeros(self.manifest.match["target"]["vocab_size"], dtype=torch.int64)
        for number in numbers:
            ids, mask = self.tokens(number)
            counts += torch.bincount(ids[mask], minlength=counts.numel())
        return counts

    def damaged(self, number: int) -> bool:
        """Whether a sample's bytes differ from the checksum in the index."""
        rows = self._rows(number)
        start, count = int(self._final_start[number]), int(self._final_rows[number])
        file = self._file(number)
        found = {
            key: file.get_slice(key)[slice(start, start + count) if key[:6] == "final." else rows]
            for key in file.keys()  # noqa: SIM118
        }
        return digest(found) != self.index[int(number)]["sha256"]

    def _rows(self, number: int) -> slice:
        start = int(self._start[number])
        return slice(start, start + int(self.lengths[number]))

    def _decode(self, number: int, name: str, rows: slice) -> Tensor:
        file = self._file(number)
        prefix = name + "."
        parts = {
            key.removeprefix(prefix): file.get_slice(key)[rows]
            for key in file.keys()  # noqa: SIM118
            if key.startswith(prefix)
        }
        return self.codec.decode(parts)

    def _file(self, number: int) -> Any:
        from safetensors import SafetensorError, safe_open

        shard = int(self._shard[number])
        if shard not in self._open:
            path, _ = shard_paths(self.folder, shard)
            try:
                self._open[shard] = safe_open(path, "pt")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path} is missing or damaged: {error}") from error
        return self._open[shard]


def _index(dataset: Any, path: Path) -> Any:
    """Index file of a shard, memory-mapped."""
    import pyarrow

    try:
        return dataset.from_file(str(path))
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} is damaged: {error}") from error
