"""Append samples to a store, shard by shard; a shard exists once its index file does."""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3 import provenance
from eagle3.batch import needed_final
from eagle3.errors import UserError
from eagle3.manifest import Manifest
from eagle3.store.codecs import Codec, get

log = logging.getLogger(__name__)
KIND = "store"


@dataclass(kw_only=True, slots=True)
class Sample:
    """One document: token ids and loss mask [T], aux [T, A * H], final (post-norm) [T, H]."""

    id: str
    input_ids: Tensor
    loss_mask: Tensor
    aux: Tensor
    final: Tensor


def shard_paths(folder: Path, number: int) -> tuple[Path, Path]:
    """Data file and index file of a shard."""
    return folder / f"shard-{number:05d}.safetensors", folder / f"shard-{number:05d}.arrow"


def index_files(folder: Path) -> list[Path]:
    """Index files of the committed shards, in order."""
    return sorted(folder.glob("shard-*.arrow"))


class StoreWriter:
    """Writes samples in the order of their numbers; resumes after the last committed shard.

    Args:
        folder: the store, made if need be.
        manifest: what this run would write; resuming requires the same `match`.
        shard_bytes: a shard is committed when its encoded samples reach this size.

    Raises:
        UserError: the folder holds a store of another configuration, or something else.
    """

    def __init__(self, folder: Path, manifest: Manifest, shard_bytes: int) -> None:
        self.folder = folder
        self.manifest = manifest
        self.shard_bytes = shard_bytes
        self.codec: Codec = get(manifest.match["codec"])
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        remedy = "Resume with the same configuration, or choose another folder."
        if not manifest.resumes(folder, f"the store in {folder}", remedy):
            if any(folder.iterdir()):
                raise UserError(f"{folder} is not empty and holds no store; choose another folder")
            manifest.save(folder)
        for stale in folder.glob(".shard-*"):
            stale.unlink()
        self.next_number, self.num_shards, self.num_samples = self._committed()
        self._pending: list[tuple[int, Sample, dict[str, Tensor]]] = []
        self._pending_bytes = 0

    def append(self, number: int, sample: Sample) -> None:
        """Add the sample with this number in the input data; numbers must ascend."""
        assert number >= self.next_number, f"sample {number} after {self.next_number - 1}"
        encoded = self._encode(sample)
        self._pending.append((number, sample, encoded))
        self._pending_bytes += sum(t.numel() * t.element_size() for t in encoded.values())
        self.next_number = number + 1
        self.num_samples += 1
        if self._pending_bytes >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Commit what is pending as one shard: data first, then its index."""
        if not self._pending:
            return
        data_path, index_path = shard_paths(self.folder, self.num_shards)
        keys = self._pending[0][2].keys()
        packed = {k: torch.cat([encoded[k] for _, _, encoded in self._pending]) for k in keys}
        temporary = data_path.with_name("." + data_path.name)
        save_file(packed, temporary)
        _sync(temporary)
        temporary.rename(data_path)
        self._write_index(index_path)
        log.info("committed %s: %d samples", data_path.name, len(self._pending))
        self.num_shards += 1
        self._pending, self._pending_bytes = [], 0

    def finish(self, facts: dict[str, Any]) -> None:
        """Commit the rest and mark the store complete."""
        self.flush()
        self.manifest.facts = {
            **facts,
            "complete": True,
            "shards": self.num_shards,
            "index_sha256": [provenance.hash_file(f) for f in index_files(self.folder)],
        }
        self.manifest.save(self.folder)

    def _encode(self, sample: Sample) -> dict[str, Tensor]:
        final = sample.final[needed_final(sample.loss_mask)]
        encoded = {
            "input_ids": sample.input_ids.to(torch.int32),
            "loss_mask": sample.loss_mask.to(torch.uint8),
        }
        for name, states in (("aux", sample.aux), ("final", final)):
            for part, tensor in self.codec.encode(states).items():
                encoded[f"{name}.{part}"] = tensor.contiguous()
        return encoded

    def _write_index(self, path: Path) -> None:
        from datasets.arrow_writer import ArrowWriter

        temporary = path.with_name("." + path.name)
        start = final_start = 0
        with ArrowWriter(path=str(temporary)) as writer:
            for number, sample, encoded in self._pending:
                rows, final_rows = len(sample.input_ids), int(needed_final(sample.loss_mask).sum())
                writer.write(
                    {
                        "number": number,
                        "id": sample.id,
                        "shard": self.num_shards,
                        "start": start,
                        "rows": rows,
                        "final_start": final_start,
                        "final_rows": final_rows,
                        "sha256": digest(encoded),
                    }
                )
                start, final_start = start + rows, final_start + final_rows
            writer.finalize()
        _sync(temporary)
        temporary.rename(path)
        _sync(self.folder)

    def _committed(self) -> tuple[int, int, int]:
        """Next sample number, shards and samples on disk; a data file without index is dropped."""
        from datasets import Dataset

        files = index_files(self.folder)
        for data in self.folder.glob("shard-*.safetensors"):
            if not data.with_suffix(".arrow").exists():
                data.unlink()
        if not files:
            return 0, 0, 0
        indexes = [Dataset.from_file(str(file)) for file in files]
        return indexes[-1][-1]["number"] + 1, len(files), sum(map(len, indexes))


def digest(encoded: dict[str, Tensor]) -> str:
    """sha256 over the bytes of a sample's encoded tensors, by name."""
    hasher = hashlib.sha256()
    for name in sorted(encoded):
        hasher.update(name.encode())
        hasher.update(encoded[name].contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
