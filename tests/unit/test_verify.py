"""Damage a store in every way we can think of: it must be found, and located."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from datasets.arrow_writer import ArrowWriter
from safetensors.torch import load_file, save_file

from eagle3.manifest import Manifest
from eagle3.store.verify import verify
from eagle3.store.writer import StoreWriter
from tests.unit.test_store import MASKS, manifest, samples, write


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write(tmp_path / "s", shard_bytes=400)
    assert len(list((tmp_path / "s").glob("*.arrow"))) >= 2
    return tmp_path / "s"


def whats(folder: Path) -> set[str]:
    return {f"{p.where}: {p.what}" for p in verify(folder).problems}


def test_a_sound_store_has_no_problem(store: Path) -> None:
    findings = verify(store)
    assert findings.problems == [] and findings.samples == len(MASKS)
    assert findings.rows == sum(map(len, MASKS))


def test_every_single_flipped_byte_of_the_data_is_found(store: Path) -> None:
    path = store / "shard-00000.safetensors"
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for place in range(header, len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
        assert any("checksum differs" in w for w in whats(store)), place
    path.write_bytes(data)
    assert not whats(store)


def test_every_flipped_byte_of_an_index_is_found(store: Path) -> None:
    path = store / "shard-00000.arrow"
    data = path.read_bytes()
    for place in range(0, len(data), 97):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x04]) + data[place + 1 :])
        assert whats(store), place


@pytest.mark.parametrize("name", ["shard-00000.safetensors", "shard-00001.arrow"])
@pytest.mark.parametrize("keep", [0, 7, 0.5, 0.99])
def test_truncated_files_are_found(store: Path, name: str, keep: float) -> None:
    data = (store / name).read_bytes()
    (store / name).write_bytes(data[: int(keep * len(data)) if keep < 1 else int(keep)])
    assert whats(store)


def test_swapped_rows_are_found(store: Path) -> None:
    path = store / "shard-00000.safetensors"
    tensors = load_file(path)
    aux = tensors["aux.values"].clone()
    aux[[0, 1]] = aux[[1, 0]]
    save_file({**tensors, "aux.values": aux}, path)
    assert whats(store) == {"sample 0 (s0): checksum differs"}


@pytest.mark.parametrize("suffixes", [[".safetensors"], [".arrow"], [".safetensors", ".arrow"]])
def test_a_deleted_shard_is_found(store: Path, suffixes: list[str]) -> None:
    for suffix in suffixes:
        (store / f"shard-00001{suffix}").unlink()
    assert whats(store)


def test_shards_of_another_store_are_found(store: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    writer = StoreWriter(other, manifest(seed=1), 400)
    for number, sample in enumerate(samples(seed=1)):
        writer.append(number, sample.encode(writer.codec))
    writer.finish({})
    for suffix in (".safetensors", ".arrow"):
        shutil.copy(other / f"shard-00000{suffix}", store / f"shard-00000{suffix}")
    assert any("not the index file" in w for w in whats(store))
    shutil.copy(other / "shard-00001.safetensors", store / "shard-00001.safetensors")
    assert whats(store)


def test_a_shard_copied_to_another_place_is_found(store: Path) -> None:
    for suffix in (".safetensors", ".arrow"):
        shutil.copy(store / f"shard-00000{suffix}", store / f"shard-00001{suffix}")
    assert any("not the index file" in w for w in whats(store))


def test_samples_that_lie_elsewhere_than_the_index_says_are_named(store: Path) -> None:
    """Each by its place in the store, whatever its number in the data; others are not."""
    path = store / "shard-00001.arrow"
    table = Dataset.from_file(str(path)).with_format("arrow")[:].to_pylist()
    table[1]["start"] += 1
    with ArrowWriter(path=str(path)) as writer:
        for row in table:
            writer.write({**row, "weight": np.float32(row["weight"])})
        writer.finalize()
    facts = json.loads((store / "manifest.json").read_text())
    del facts["facts"]["index_sha256"]
    (store / "manifest.json").write_text(json.dumps(facts))
    before = len(Dataset.from_file(str(store / "shard-00000.arrow")))
    named = f"sample {before + 1} (s{before + 1}): is not where it should be"
    assert named in whats(store) and sum("where it should" in w for w in whats(store)) == 1


def test_bad_values_are_found_even_with_a_right_checksum(tmp_path: Path) -> None:
    for value, what in ((torch.nan, "not finite"), (0.0, "constant")):
        folder = tmp_path / what
        writer = StoreWriter(folder, Manifest(kind="store", match=manifest().match), 1 << 20)
        broken = samples()[0]
        broken.aux[2] = value
        writer.append(0, broken.encode(writer.codec))
        writer.finish({})
        assert any(what in w for w in whats(folder))


def test_agreement_with_the_targets_lm_head(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "s", manifest(), 1 << 20)
    lm_head = torch.eye(50)
    for number, sample in enumerate(samples()):
        following = torch.cat([sample.input_ids[1:], sample.input_ids[:1]]).long()
        sample.final = lm_head[following]
        if number == 4:
            sample.final = lm_head[(following + 1) % 50]
        writer.append(number, sample.encode(writer.codec))
    writer.finish({})
    asked = sum(sum(m[1:]) for m in MASKS)
    assert verify(tmp_path / "s", lm_head).agreement == pytest.approx(1 - 8 / asked)
