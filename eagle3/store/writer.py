"""Append samples to a store, shard by shard; a shard exists once its index file does."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from eagle3 import provenance
from eagle3.errors import UserError
from eagle3.manifest import NAME, Manifest, require_match, write_json
from eagle3.store import safetensors_file
from eagle3.store.codecs import Codec, get
from eagle3.store.sample import Encoded

log = logging.getLogger(__name__)
KIND = "store"
REJECTED = "rejected.json"


def shard_paths(folder: Path, number: int) -> tuple[Path, Path]:
    """Data file and index file of a shard."""
    return folder / f"shard-{number:05d}.safetensors", folder / f"shard-{number:05d}.arrow"


def index_files(folder: Path) -> list[Path]:
    """Index files of the committed shards, in order."""
    return sorted(folder.glob("shard-*.arrow"))


class StoreWriter:
    """Writes samples in the order of their numbers; resumes after the last committed shard.

    A shard is written on a thread while the next one fills up, one at a time.

    Args:
        folder: the store, made if need be.
        manifest: what this run would write; resuming requires the same `match`.
        shard_bytes: a shard is committed when its encoded samples reach this size.

    Raises:
        UserError: the folder holds a store of another configuration, one that lacks shards, or
            something else.
    """

    def __init__(self, folder: Path, manifest: Manifest, shard_bytes: int) -> None:
        self.folder = folder
        self.manifest = manifest
        self.shard_bytes = shard_bytes
        self.codec: Codec = get(manifest.match["codec"])
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for pattern in (f".{NAME}.*", f".{REJECTED}.*", ".shard-*"):
            for stale in folder.glob(pattern):
                stale.unlink()
        remedy = (
            "Resume with the same configuration, choose another run_name, or delete the folder if "
            "nothing needs it any more."
        )
        begun = bool(index_files(folder))
        if manifest.resumes(folder, f"the store in {folder}", remedy, begun):
            found = Manifest.load(folder, KIND)
            facts = found.facts
            manifest.match = {**found.match, **manifest.match}
        elif any(folder.iterdir()) and not (folder / NAME).exists():
            raise UserError(f"{folder} is not empty and holds no store; choose another folder")
        else:
            manifest.save(folder)
            facts = {}
        self.next_number, self.num_shards, self.num_samples = self._committed()
        self.complete = facts.get("complete", False) and facts["shards"] == self.num_shards
        self.rejected: list[dict[str, Any]] = self._rejected()
        self._pending: list[tuple[int, Encoded]] = []
        self._pending_bytes = 0
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._writing: Future[None] | None = None

    def settle(self, key: str, value: Any) -> None:
        """Add to the manifest's `match` what is known only once the servers are up.

        Raises:
            UserError: it was something else when the store was begun.
        """
        remedy = "Go on with servers like those it was begun with, or choose another run_name."
        require_match({key: value}, self.manifest.match, f"the store in {self.folder}", remedy)
        self.manifest.match[key] = value
        self.manifest.save(self.folder)

    def append(self, number: int, sample: Encoded) -> None:
        """Add the sample with this number in the input data; numbers must ascend.

        Raises:
            UserError: the disk is full; what was committed stays, and the run can be resumed.
        """
        assert number >= self.next_number, f"sample {number} after {self.next_number - 1}"
        self._pending.append((number, sample))
        self._pending_bytes += sample.nbytes
        self.next_number = number + 1
        self.num_samples += 1
        if self._pending_bytes >= self.shard_bytes:
            self._start_commit()

    def reject(self, number: int, id: str, reason: str) -> None:
        """Keep on record that a sample is left out, and why."""
        self.rejected.append({"number": number, "id": id, "reason": reason})

    def flush(self) -> None:
        """Commit what is pending, and wait until it is."""
        self._start_commit()
        self._finish_commit()

    def close(self) -> None:
        """Wait for the shard that is being written; what is pending is dropped."""
        self._thread.shutdown()

    def _start_commit(self) -> None:
        self._finish_commit()
        if self._pending:
            job = (self.num_shards, self._pending, list(self.rejected))
            self._writing = self._thread.submit(self._write_shard, *job)
            self.num_shards += 1
            self._pending, self._pending_bytes = [], 0

    def _finish_commit(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def finish(self, facts: dict[str, Any]) -> None:
        """Commit the rest and mark the store complete."""
        self.flush()
        reasons = Counter(row["reason"] for row in self.rejected)
        self.manifest.facts = {
            **facts,
            "complete": True,
            "samples": self.num_samples,
            "rejected": len(self.rejected),
            "reasons": dict(reasons),
            "shards": self.num_shards,
            "index_sha256": [provenance.hash_file(f) for f in index_files(self.folder)],
        }
        try:
            write_json(self.folder / REJECTED, self.rejected)
            self.manifest.save(self.folder)
        except OSError as error:
            self._explain(error, 0)
            raise

    def _write_shard(
        self, shard: int, samples: list[tuple[int, Encoded]], rejected: list[dict[str, Any]]
    ) -> None:
        """Data first, then its index, whose rename commits the shard."""
        data_path, index_path = shard_paths(self.folder, shard)
        temporary = data_path.with_name("." + data_path.name)
        try:
            write_json(self.folder / REJECTED, rejected)
            columns = [sample.tensors for _, sample in samples]
            safetensors_file.write(temporary, {k: [c[k] for c in columns] for k in columns[0]})
            _sync(temporary)
            temporary.rename(data_path)
            self._write_index(index_path, shard, samples)
        except OSError as error:
            self._explain(error, sum(sample.nbytes for _, sample in samples))
            raise
        log.info("committed shard %d: %d samples", shard, len(samples))

    def _explain(self, error: OSError, needed: int) -> None:
        """Raise what a user can act on if something was not written for lack of space."""
        for half in self.folder.glob(".shard-*"):
            half.unlink()
        free = shutil.disk_usage(self.folder).free
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or free < needed:
            raise UserError(
                f"no space to go on in {self.folder}: {needed:,} bytes needed, {free:,} "
                f"free ({error}). The shards so far are committed; free some space and run the "
                "same command again to go on"
            ) from error

    def _write_index(self, path: Path, shard: int, samples: list[tuple[int, Encoded]]) -> None:
        from datasets.arrow_writer import ArrowWriter

        temporary = path.with_name("." + path.name)
        start = final_start = 0
        with ArrowWriter(path=str(temporary)) as writer:
            for number, sample in samples:
                writer.write(
                    {
                        "number": number,
                        "id": sample.id,
                        "shard": shard,
                        "start": start,
                        "rows": sample.rows,
                        "final_start": final_start,
                        "final_rows": sample.final_rows,
                        "sha256": sample.sha256,
                        "weight": np.float32(sample.weight),
                        "conversation": number
                        if sample.conversation is None
                        else sample.conversation,
                    }
                )
                start, final_start = start + sample.rows, final_start + sample.final_rows
            writer.finalize()
        _sync(temporary)
        temporary.rename(path)
        _sync(self.folder)

    def _rejected(self) -> list[dict[str, Any]]:
        """Samples left out before the last committed one; later ones are tried again."""
        path = self.folder / REJECTED
        known = json.loads(path.read_text()) if path.exists() else []
        return [row for row in known if row["number"] < self.next_number]

    def _committed(self) -> tuple[int, int, int]:
        """Next sample number, shards and samples on disk; a data file without index is dropped."""
        files = index_files(self.folder)
        for number, file in enumerate(files):
            _, expected = shard_paths(self.folder, number)
            if file != expected:  # the next shard's name would be one that is taken
                raise UserError(
                    f"the store in {self.folder} lacks {expected.name}, but not later ones: put it "
                    "back with its data file, or choose another folder"
                )
        for data in self.folder.glob("shard-*.safetensors"):
            if not data.with_suffix(".arrow").exists():
                data.unlink()
        if not files:
            return 0, 0, 0
        indexes = [open_index(file) for file in files]
        return indexes[-1][-1]["number"] + 1, len(files), sum(map(len, indexes))


def open_index(path: Path) -> Any:
    """Index file of a shard, memory-mapped.

    Raises:
        UserError: it is damaged.
    """
    import pyarrow
    from datasets import Dataset

    try:
        return Dataset.from_file(str(path))
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} is damaged: {error}") from error


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
