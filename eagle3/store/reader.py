"""Random access to a store's samples, and packed batches of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3.batch import Batch, needed_final, supervised_by
from eagle3.errors import UserError
from eagle3.manifest import Manifest
from eagle3.store.codecs import Codec, get
from eagle3.store.sample import digest
from eagle3.store.writer import KIND, index_files, open_index, shard_paths

LEAST_OPENING = 8
"""Tokens before an answer that tell one prompt from another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A batch on the CPU whose states are still encoded: fewer bytes to move to a device, and a GPU
    is faster at decoding.

    tokens: everything of the batch but its states.
    """

    tokens: Batch
    states: dict[str, Tensor]
    codec: Codec

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Batch:
        """The batch on a device, its states in `dtype` (None: as the codec decodes them)."""
        moved = {key: x.to(device, non_blocking=True) for key, x in self.states.items()}
        aux, final = (self.codec.decode(kind, moved) for kind in ("aux", "final"))
        return replace(
            self.tokens.to(device),
            aux=aux.to(dtype or aux.dtype),
            final=final.to(dtype or final.dtype),
        )


class StoreReader:
    """A finished store, memory-mapped.

    Args:
        folder: the store.
        allow_incomplete: read what is committed of a store whose extraction has not finished.

    Raises:
        UserError: no store, an unfinished one, or missing shards.
    """

    def __init__(self, folder: Path, allow_incomplete: bool = False) -> None:
        from datasets import concatenate_datasets

        self.folder = folder
        self.manifest = Manifest.load(folder, KIND)
        self.codec = get(self.manifest.match["codec"])
        files = index_files(folder)
        complete = self.manifest.facts.get("complete", False)
        if not complete and not allow_incomplete:
            raise UserError(f"the store in {folder} is not finished; run the extract command again")
        if not files or (complete and len(files) != self.manifest.facts["shards"]):
            raise UserError(f"the store in {folder} lacks shards: {len(files)} found")
        self.index = concatenate_datasets([_index(f) for f in files])
        table = self.index.with_format("arrow")[:]  # a column of a Dataset is read row by row
        self.ids: list[str] = table.column("id").to_pylist()
        self.lengths: np.ndarray = table.column("rows").to_numpy()
        self.weights: np.ndarray = table.column("weight").to_numpy()
        self.conversations: np.ndarray = table.column("conversation").to_numpy()
        self._shard, self._start, self._final_start, self._final_rows = (
            table.column(name).to_numpy()
            for name in ("shard", "start", "final_start", "final_rows")
        )
        self._open: dict[int, dict[str, Tensor]] = {}  # mapped, not read

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, number: int) -> tuple[Tensor, Tensor]:
        """Token ids [T] int64 and loss mask [T] bool of one sample."""
        shard, rows = self._mapped(number), self._rows(number)
        return shard["input_ids"][rows].long(), shard["loss_mask"][rows].bool()

    def encoded(self, number: int) -> dict[str, Tensor]:
        """All tensors of one sample as they lie in the shard, which is mapped into memory."""
        rows, start = self._rows(number), int(self._final_start[number])
        final = slice(start, start + int(self._final_rows[number]))
        return {
            key: tensor[final if key.startswith("final.") else rows]
            for key, tensor in self._mapped(number).items()
        }

    def states(self, number: int) -> tuple[Tensor, Tensor]:
        """Aux [T, A * H] and final states [M, H] of one sample, decoded."""
        encoded = self.encoded(number)
        return self.codec.decode("aux", encoded), self.codec.decode("final", encoded)

    def pack(self, numbers: Sequence[int], mask: str = "serving", pinned: bool = False) -> Packed:
        """Lay whole samples end to end, supervised by a rule of `batch.MASKS`.

        Args:
            pinned: into memory that a GPU reads without the CPU. PyTorch keeps it for the next
                batch, so that it need not be made anew and no second copy comes after joining.
        """
        samples = [self.encoded(number) for number in numbers]
        joined = {key: _joined([sample[key] for sample in samples], pinned) for key in samples[0]}
        ends = torch.from_numpy(self.lengths[list(numbers)]).long().cumsum(0)
        tokens = Batch(
            input_ids=joined.pop("input_ids").long(),
            loss_mask=joined.pop("loss_mask").bool(),
            doc_starts=torch.nn.functional.pad(ends, (1, 0)),
            aux=torch.empty(0),
            final=torch.empty(0),
            final_index=torch.empty(0),
            row_weights=self._row_weights(numbers),
        )
        needed = needed_final(tokens.loss_mask, tokens.doc_starts)
        tokens.final_index = torch.where(needed, needed.cumsum(0) - 1, -1)
        return Packed(tokens=supervised_by(mask, tokens), states=joined, codec=self.codec)

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Whole samples as one batch on the CPU, the states as the codec decodes them."""
        return self.pack(numbers).to("cpu")

    def generated_counts(self, numbers: Sequence[int]) -> Tensor:
        """How often the target generated each token id in these samples [vocab_size], int64.

        A sample counts as often as it is named. Reads each shard's tokens once, and holds those of
        one shard at a time.
        """
        counts = np.zeros(self.manifest.match["target"]["vocab_size"], dtype=np.int64)
        times = np.zeros(len(self), dtype=np.int64)
        np.add.at(times, np.asarray(numbers, dtype=np.int64), 1)
        for shard in np.unique(self._shard[times > 0]):
            first, end = np.searchsorted(self._shard, [shard, shard + 1])  # in the data's order
            mine = first + np.flatnonzero(times[first:end])
            mapped = self._mapped(mine[0])
            ids, mask = (mapped[name].numpy() for name in ("input_ids", "loss_mask"))
            # how much more often each row counts than the one before it
            change = np.zeros(len(ids) + 1, dtype=np.int64)
            np.add.at(change, self._start[mine], times[mine])
            np.subtract.at(change, self._start[mine] + self.lengths[mine], times[mine])
            weights = change.cumsum()[:-1] * mask.astype(bool)
            # numpy adds weights in float64, exact up to 2^53
            counts += np.bincount(ids, weights, minlength=len(counts)).astype(np.int64)
        return torch.from_numpy(counts)

    def openings(self) -> np.ndarray:
        """Hash of each sample's tokens before the first generated one [S], uint64.

        Answers to one prompt have the same. Of less than LEAST_OPENING tokens, which may be no more
        than what every text begins with, the whole sample is hashed.
        """
        found = np.zeros(len(self), dtype=np.uint64)
        for shard in np.unique(self._shard):
            first, end = np.searchsorted(self._shard, [shard, shard + 1])  # in the data's order
            mapped = self._mapped(first)
            ids, mask = (mapped[name].numpy() for name in ("input_ids", "loss_mask"))
            for number in range(first, end):
                rows = self._rows(number)
                opening = int(mask[rows].argmax())
                end_of_it = rows.start + opening if opening >= LEAST_OPENING else rows.stop
                text = ids[rows.start : end_of_it].tobytes()
                found[number] = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
        return found

    def damaged(self, number: int) -> bool:
        """Whether a sample's bytes differ from the checksum in the index."""
        return digest(self.encoded(number)) != self.index[int(number)]["sha256"]

    def _row_weights(self, numbers: Sequence[int]) -> Tensor | None:
        """Of the rows of these samples end to end [N], float32; None if all are 1."""
        weights = self.weights[list(numbers)]
        if (weights == 1).all():
            return None
        return torch.from_numpy(weights.repeat(self.lengths[list(numbers)]))

    def _rows(self, number: int) -> slice:
        start = int(self._start[number])
        return slice(start, start + int(self.lengths[number]))

    def _mapped(self, number: int) -> dict[str, Tensor]:
        """All tensors of the sample's shard."""
        shard = int(self._shard[number])
        if shard not in self._open:
            from safetensors import SafetensorError, safe_open

            path, _ = shard_paths(self.folder, shard)
            try:
                with safe_open(path, "pt") as file:
                    # a slice by safetensors costs ten times as much as one of a mapped tensor
                    self._open[shard] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path} is missing or damaged: {error}") from error
        return self._open[shard]


def _joined(parts: list[Tensor], pinned: bool) -> Tensor:
    """Rows of all parts, end to end."""
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    return torch.cat(parts, out=torch.empty(shape, dtype=parts[0].dtype, pin_memory=pinned))


def _index(path: Path) -> Any:
    """Index file of a shard, with what the earliest stores had not."""
    index = open_index(path)
    if "weight" not in index.column_names:  # written before samples had weights
        index = index.add_column("weight", np.ones(len(index), dtype=np.float32))
    if "conversation" not in index.column_names:  # written before turns were kept together
        index = index.add_column("conversation", np.asarray(index["number"], dtype=np.int64))
    return index
