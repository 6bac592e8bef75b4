import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from datasets.arrow_writer import ArrowWriter
from safetensors.torch import load_file

from eagle3.batch import needed_final
from eagle3.errors import UserError
from eagle3.manifest import Manifest
from eagle3.store import budget, codecs, safetensors_file
from eagle3.store.budget import Workload
from eagle3.store.reader import StoreReader
from eagle3.store.sample import Sample
from eagle3.store.writer import StoreWriter

WEIGHTS = [1.0, 0.3, 2.5, 1.0, 1.0, 7.0]
MASKS = [[0, 0, 1, 1, 1], [1], [0, 1, 1, 0, 1, 1], [0] * 4, [1] * 9, [0, 1]]


def manifest(codec: str = "fp32", **match: object) -> Manifest:
    return Manifest(kind="store", match={"codec": codec, "target": {"vocab_size": 50}, **match})


def samples(seed: int = 0) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Sample(
            id=f"s{i}",
            input_ids=torch.randint(0, 50, (len(m),), generator=generator, dtype=torch.int32),
            loss_mask=torch.tensor(m, dtype=torch.uint8),
            aux=torch.randn(len(m), 6, generator=generator),
            final=torch.randn(len(m), 2, generator=generator),
            weight=WEIGHTS[i],
        )
        for i, m in enumerate(MASKS)
    ]


def write(folder: Path, shard_bytes: int = 200, codec: str = "fp32") -> None:
    writer = StoreWriter(folder, manifest(codec), shard_bytes)
    for number, sample in enumerate(samples()):
        writer.append(number, sample.encode(writer.codec))
    writer.finish({})


@pytest.mark.parametrize("shard_bytes", [1, 200, 1 << 20])
@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_round_trip_and_packed_batches(tmp_path: Path, shard_bytes: int, codec: str) -> None:
    write(tmp_path / "s", shard_bytes, codec)
    reader = StoreReader(tmp_path / "s")
    dtype = torch.float32 if codec == "fp32" else torch.bfloat16
    for number, sample in enumerate(samples()):
        ids, mask = reader.tokens(number)
        aux, final = reader.states(number)
        assert torch.equal(ids, sample.input_ids.long()) and torch.equal(
            mask, sample.loss_mask.bool()
        )
        assert torch.equal(aux, sample.aux.to(dtype))
        assert torch.equal(final, sample.final[needed_final(mask)].to(dtype))
    order = [4, 0, 2]
    batch = reader.batch(order)
    assert batch.doc_starts.tolist() == [0, 9, 14, 20]
    for start, number in zip(batch.doc_starts.tolist(), order, strict=False):
        sample = samples()[number]
        for row in needed_final(sample.loss_mask).nonzero().flatten().tolist():
            found = batch.final[batch.final_index[start + row]]
            assert torch.equal(found, sample.final[row].to(dtype))


@pytest.mark.parametrize("pinned", [False, pytest.param(True, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("codec", ["fp32", "bf16", "fp8"])
def test_a_batch_holds_the_bytes_of_its_samples(tmp_path: Path, codec: str, pinned: bool) -> None:
    write(tmp_path / "s", codec=codec)
    reader = StoreReader(tmp_path / "s")
    packed = reader.pack([4, 0, 2], pinned=pinned)
    assert packed.states
    for key, joined in packed.states.items():
        assert joined.is_pinned() == pinned
        own = torch.cat([reader.encoded(number)[key] for number in (4, 0, 2)])
        assert joined.dtype == own.dtype
        assert torch.equal(joined.view(torch.uint8), own.view(torch.uint8))


def test_samples_are_hashed_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other to begin: one lock for both would let neither end."""
    both = threading.Barrier(2, timeout=10)
    monkeypatch.setattr("eagle3.store.sample.digest", lambda _: f"hashed by {both.wait()}")
    encoded = [sample.encode(codecs.get("fp32")) for sample in samples()[:2]]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda one: one.sha256, encoded))
    assert sorted(found) == ["hashed by 0", "hashed by 1"]
    assert [one.sha256 for one in encoded] == found  # once each


def test_weights_come_back_by_row_in_float32(tmp_path: Path) -> None:
    write(tmp_path / "s")
    reader = StoreReader(tmp_path / "s")
    assert torch.equal(torch.from_numpy(reader.weights), torch.tensor(WEIGHTS))
    order = [2, 0, 1]
    expected = torch.tensor([2.5] * 6 + [1.0] * 5 + [0.3])
    moved = reader.pack(order).to("cpu", torch.bfloat16)
    assert moved.aux.dtype == torch.bfloat16 and torch.equal(moved.row_weights, expected)
    assert torch.equal(moved.to("cpu", torch.float64).row_weights, expected)
    assert torch.equal(reader.pack(order, "token").tokens.row_weights, expected)
    assert reader.batch([0, 3, 4]).row_weights is None


@pytest.mark.parametrize("old", [1, 2, None])
def test_an_index_without_weights_reads_as_ones(tmp_path: Path, old: int | None) -> None:
    """Of a whole store, or of the first shards of one that a newer version went on with."""
    write(tmp_path / "s")
    expected = list(WEIGHTS)
    for path in sorted((tmp_path / "s").glob("*.arrow"))[:old]:
        rows = list(Dataset.from_file(str(path)))
        with ArrowWriter(path=str(path)) as writer:
            for row in rows:
                del row["weight"]
                writer.write(row)
                expected[row["number"]] = 1.0
            writer.finalize()
    assert expected != WEIGHTS and (old is None) == (expected == [1.0] * 6)
    reader = StoreReader(tmp_path / "s")
    assert torch.equal(torch.from_numpy(reader.weights), torch.tensor(expected))
    assert not reader.damaged(2)


def test_an_interrupted_store_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    write(tmp_path / "whole")
    for stop in range(len(MASKS)):
        folder = tmp_path / f"cut{stop}"
        writer = StoreWriter(folder, manifest(), 200)
        for number in range(stop):
            writer.append(number, samples()[number].encode(writer.codec))
        writer._finish_commit()
        # killed here: pending samples are lost, half-written files stay behind
        (folder / ".shard-00009.safetensors").write_bytes(b"half")
        (folder / f"shard-{writer.num_shards:05d}.safetensors").write_bytes(b"data without index")
        again = StoreWriter(folder, manifest(), 200)
        assert again.next_number <= stop
        for number in range(again.next_number, len(MASKS)):
            again.append(number, samples()[number].encode(again.codec))
        again.finish({})
        whole = sorted(p.name for p in (tmp_path / "whole").iterdir())
        assert sorted(p.name for p in folder.iterdir()) == whole
        for name in whole:
            if name.endswith(".safetensors"):
                assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_resume_with_another_configuration_names_the_keys(tmp_path: Path) -> None:
    write(tmp_path / "s")
    with pytest.raises(UserError, match="codec: configured 'bf16', found 'fp32'"):
        StoreWriter(tmp_path / "s", manifest("bf16"), 200)


def test_nothing_binds_to_a_store_without_a_shard(tmp_path: Path) -> None:
    """What a first command got wrong can be corrected under the same name."""
    StoreWriter(tmp_path / "s", manifest("bf16"), 200)
    write(tmp_path / "s")
    assert StoreReader(tmp_path / "s").codec.name == "fp32"


def test_a_foreign_folder_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        StoreWriter(tmp_path, manifest(), 200)


def test_unfinished_or_incomplete_stores_are_refused(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "s", manifest(), 1)
    writer.append(0, samples()[0].encode(writer.codec))
    with pytest.raises(UserError, match="not finished"):
        StoreReader(tmp_path / "s")
    writer.flush()
    assert len(StoreReader(tmp_path / "s", allow_incomplete=True)) == 1
    writer.append(1, samples()[1].encode(writer.codec))
    writer.finish({})
    (tmp_path / "s" / "shard-00001.arrow").unlink()
    with pytest.raises(UserError, match="lacks shards"):
        StoreReader(tmp_path / "s")


def test_a_flipped_bit_is_found_and_located(tmp_path: Path) -> None:
    write(tmp_path / "s", shard_bytes=1 << 20)
    path = tmp_path / "s" / "shard-00000.safetensors"
    data = bytearray(path.read_bytes())
    reader = StoreReader(tmp_path / "s")
    assert not any(reader.damaged(n) for n in range(len(reader)))
    data[-3] ^= 1
    path.write_bytes(data)
    reader = StoreReader(tmp_path / "s")
    assert sum(reader.damaged(n) for n in range(len(reader))) == 1


def test_generated_counts_are_those_of_generated_tokens(tmp_path: Path) -> None:
    write(tmp_path / "s")
    counts = StoreReader(tmp_path / "s").generated_counts(range(len(MASKS)))
    expected = np.zeros(50, dtype=int)
    for sample in samples():
        for token in sample.input_ids[sample.loss_mask.bool()].tolist():
            expected[token] += 1
    assert counts.tolist() == expected.tolist()


@pytest.mark.parametrize("shard_bytes", [1, 200, 1 << 20])
@pytest.mark.parametrize("numbers", [[3], [5, 0, 2], [4, 1, 4, 0, 4, 5, 1], [2, 2], []])
def test_labels_of_some_samples_are_counted_as_one_by_one(
    tmp_path: Path, shard_bytes: int, numbers: list[int]
) -> None:
    write(tmp_path / "s", shard_bytes)
    reader = StoreReader(tmp_path / "s")
    expected = torch.zeros(50, dtype=torch.int64)
    for number in numbers:
        ids, mask = reader.tokens(number)
        expected += torch.bincount(ids[mask], minlength=50)
    found = reader.generated_counts(numbers)
    assert found.dtype == torch.int64 and torch.equal(found, expected)
    assert torch.equal(reader.generated_counts(np.array(numbers, dtype=np.int32)), expected)


def test_labels_of_a_sample_that_is_not_there_are_not_counted(tmp_path: Path) -> None:
    write(tmp_path / "s")
    with pytest.raises(IndexError):
        StoreReader(tmp_path / "s").generated_counts([0, len(MASKS)])


def test_budget_predicts_the_size_on_disk(tmp_path: Path) -> None:
    write(tmp_path / "s", 1 << 20)
    work = Workload(
        num_samples=len(MASKS),
        num_tokens=sum(map(len, MASKS)),
        num_final=sum(sum(m[1:]) for m in MASKS),
    )
    folder = tmp_path / "new" / "store"
    planned = budget.plan(
        folder, codecs.get("fp32"), work, num_aux=3, hidden_size=2, tokens_per_s=1.0
    )
    reader = StoreReader(tmp_path / "s")
    encoded = [reader.encoded(n) for n in range(len(MASKS))]
    size = sum(t.nbytes for tensors in encoded for t in tensors.values())
    assert planned.store_bytes == size + len(MASKS) * budget.INDEX_BYTES_PER_SAMPLE
    assert planned.hours == work.num_tokens / 3600
    budget.require(planned, folder, max_bytes=planned.store_bytes, max_hours=1)
    with pytest.raises(UserError, match=f"{planned.store_bytes:,} bytes, over extract.max_bytes"):
        budget.require(planned, folder, max_bytes=10)
    with pytest.raises(UserError, match="over extract.max_hours"):
        budget.require(planned, folder, max_hours=1e-6)
    with pytest.raises(UserError, match="take fewer samples, a smaller codec, or another disk"):
        budget.require(replace(planned, free_bytes=planned.store_bytes - 1), folder)


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_a_full_disk_loses_nothing_and_the_run_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    write(tmp_path / "whole")
    folder, writes = tmp_path / "s", iter(range(99))

    def save(path: Path, columns: dict) -> None:
        if next(writes) == fails_at:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, columns)

    real = safetensors_file.write
    monkeypatch.setattr("eagle3.store.safetensors_file.write", save)
    with pytest.raises(UserError, match="bytes needed, .* free some space and run the same"):
        write(folder)
    assert not list(folder.glob(".shard*"))
    assert len(list(folder.glob("*.arrow"))) == fails_at
    again = StoreWriter(folder, manifest(), 200)
    for number in range(again.next_number, len(MASKS)):
        again.append(number, samples()[number].encode(again.codec))
    again.finish({})
    for path in (tmp_path / "whole").glob("shard-*"):
        assert (folder / path.name).read_bytes() == path.read_bytes()


def test_an_error_that_is_not_about_space_is_not_blamed_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("eagle3.store.safetensors_file.write", save)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path / "s")


def test_rejected_samples_stay_on_record_over_a_restart(tmp_path: Path) -> None:
    def fill(writer: StoreWriter, stop: int) -> None:
        for number in range(writer.next_number, stop):
            if number in (1, 5):
                writer.reject(number, f"s{number}", "token ids")
            else:
                writer.append(number, samples()[number].encode(writer.codec))

    first = StoreWriter(tmp_path / "s", manifest(), 1)
    fill(first, 4)
    first.flush()
    again = StoreWriter(tmp_path / "s", manifest(), 1)
    assert again.next_number == 4 and [r["number"] for r in again.rejected] == [1]
    fill(again, len(MASKS))
    again.finish({})
    facts = StoreReader(tmp_path / "s").manifest.facts
    assert facts["samples"] == 4 and facts["rejected"] == 2
    assert facts["reasons"] == {"token ids": 2}


def test_files_are_safetensors_of_the_joined_pieces(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = {
        "ids": torch.arange(7, dtype=torch.int32),
        "mask": torch.ones(7, dtype=torch.uint8),
        "a": torch.randn(7, 3).bfloat16(),
        "b": torch.randn(7, 5).to(torch.float8_e4m3fn),
        "c": torch.randn(7, 2, 2),
        "none": torch.empty(0, 4),
    }
    pieces = {k: list(t.split([1, 4, 2])) if len(t) else [t, t] for k, t in whole.items()}
    safetensors_file.write(tmp_path / "f", pieces)
    found = load_file(tmp_path / "f")
    assert found.keys() == whole.keys()
    for key, tensor in whole.items():
        assert found[key].dtype == tensor.dtype and found[key].shape == tensor.shape
        assert torch.equal(found[key].float(), tensor.float())


def test_unknown_codec() -> None:
    with pytest.raises(UserError, match="codec.name=zip"):
        codecs.get("zip")


def test_a_kill_before_the_first_manifest_is_not_in_the_way(tmp_path: Path) -> None:
    """It leaves nothing but a temporary file of ours; so does a disk that is full at the start."""
    folder = tmp_path / "s"
    folder.mkdir()
    (folder / ".manifest.json.4711.tmp").write_text('{"half')
    write(folder)
    assert len(StoreReader(folder)) == len(MASKS)
    assert not list(folder.glob(".*"))


def test_only_our_own_leftovers_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    write(folder)
    (folder / ".snapshot").mkdir()
    (folder / ".note").write_text("mine")
    (folder / ".shard-00007.arrow").write_bytes(b"half")
    StoreWriter(folder, manifest(), 200)
    assert {p.name for p in folder.glob(".*")} == {".snapshot", ".note"}


@pytest.mark.parametrize("lost", [0, 1])
def test_resuming_does_not_overwrite_a_shard_when_an_earlier_one_is_lost(
    tmp_path: Path, lost: int
) -> None:
    folder = tmp_path / "s"
    writer = StoreWriter(folder, manifest(), 1)
    for number in range(3):
        writer.append(number, samples()[number].encode(writer.codec))
    writer.flush()
    for path in folder.glob(f"shard-0000{lost}.*"):
        path.unlink()
    with pytest.raises(UserError, match=rf"lacks shard-0000{lost}\.arrow"):
        StoreWriter(folder, manifest(), 1)
    assert len(list(folder.glob("shard-*"))) == 4


def test_a_damaged_index_is_named_when_resuming(tmp_path: Path) -> None:
    write(tmp_path / "s", 1)
    (tmp_path / "s" / "shard-00001.arrow").write_bytes(b"")
    with pytest.raises(UserError, match=r"shard-00001\.arrow is damaged"):
        StoreWriter(tmp_path / "s", manifest(), 1)


def test_a_disk_that_is_full_at_the_end_is_told_like_one_that_is_full_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = tmp_path / "s"
    with monkeypatch.context() as patch, pytest.raises(UserError, match="free some space and run"):
        writer = StoreWriter(folder, manifest(), 1 << 20)
        patch.setattr("eagle3.manifest.os.fsync", full)
        for number, sample in enumerate(samples()):
            writer.append(number, sample.encode(writer.codec))
        writer.finish({})
    write(folder)
    assert len(StoreReader(folder)) == len(MASKS)


def test_closing_waits_for_the_shard_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever gets the folder's lock next must not meet a half-written file of ours."""
    go, real = threading.Event(), safetensors_file.write

    def slow(path: Path, columns: dict) -> None:
        assert go.wait(30)
        real(path, columns)

    monkeypatch.setattr("eagle3.store.safetensors_file.write", slow)
    writer = StoreWriter(tmp_path / "s", manifest(), 1)
    writer.append(0, samples()[0].encode(writer.codec))
    threading.Timer(0.2, go.set).start()
    writer.close()
    assert (tmp_path / "s" / "shard-00000.arrow").exists()


@pytest.mark.parametrize("old", [False, True])
def test_turns_of_a_conversation_come_back(tmp_path: Path, old: bool) -> None:
    """Numbers of rejected samples are missing; an older store says nothing of conversations."""
    folder = tmp_path / "s"
    writer = StoreWriter(folder, manifest("fp32"), 200)
    for number, sample, first in zip((0, 2, 3, 5), samples(), (None, 2, 2, 4), strict=False):
        writer.append(number, replace(sample, conversation=first).encode(writer.codec))
    writer.finish({})
    for path in folder.glob("*.arrow") if old else ():
        rows = list(Dataset.from_file(str(path)))
        with ArrowWriter(path=str(path)) as index:
            for row in rows:
                del row["conversation"]
                index.write(row)
            index.finalize()
    assert StoreReader(folder).conversations.tolist() == ([0, 2, 3, 5] if old else [0, 2, 2, 4])


@pytest.mark.parametrize("shard_bytes", [1, 700, 1 << 20])
def test_answers_to_one_prompt_open_alike(tmp_path: Path, shard_bytes: int) -> None:
    """Up to the first generated token; an opening of few tokens tells no prompt from another."""
    prompt, other = list(range(10)), [*range(9), 49]
    texts = [
        (prompt, [20, 21]), (other, [20, 21]), (prompt, [30]), (prompt[:3], [5, 6]),
        (prompt[:3], [5, 7]), (prompt[:3], [5, 6]), ([], [4, 4]), ([], [4, 4, 4]),
    ]  # fmt: skip
    writer = StoreWriter(tmp_path / "s", manifest("fp32"), shard_bytes)
    for number, (before, answer) in enumerate(texts):
        made = Sample(
            id=f"s{number}",
            input_ids=torch.tensor([*before, *answer], dtype=torch.int32),
            loss_mask=torch.tensor([0] * len(before) + [1] * len(answer), dtype=torch.uint8),
            aux=torch.randn(len(before) + len(answer), 6),
            final=torch.randn(len(before) + len(answer), 2),
        )
        writer.append(number, made.encode(writer.codec))
    writer.finish({})
    found = StoreReader(tmp_path / "s").openings().tolist()
    alike = {(a, b) for a in range(8) for b in range(a) if found[a] == found[b]}
    assert alike == {(2, 0), (5, 3)}
