"""The `extract` command with a stand-in for the servers: resuming, and what a finished store is."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.config import Config
from eagle3.errors import UserError
from eagle3.store.reader import StoreReader
from eagle3.store.sample import Encoded, Sample
from eagle3.target import Target
from extraction import extract, verify
from extraction.check import Rejection
from extraction.extract import Extraction
from extraction.samples import TokenSample


class Fake:
    """Captures made-up states; rejects the samples of these ids."""

    workers = 2

    def __init__(self, run: Extraction) -> None:
        self.servers = [{"dtype": "bfloat16", "quantization": None, "version": "1"}]
        self.run = run
        self.rejects: set[str] = set()
        self.captured: list[str] = []
        self._lock = threading.Lock()

    def capture(self, number: int, sample: TokenSample) -> Encoded | Rejection:
        with self._lock:
            self.captured.append(sample.id)
        if sample.id in self.rejects:
            return Rejection("row count")
        rows, width = len(sample.input_ids), self.run.target.hidden_size
        made = Sample(
            id=sample.id,
            input_ids=torch.from_numpy(sample.input_ids),
            loss_mask=torch.from_numpy(sample.loss_mask),
            aux=torch.ones(rows, 3 * width),
            final=torch.ones(rows, width),
        )
        return made.encode(self.run.codec)


@pytest.fixture
def run(target: Target, tmp_path: Path) -> Extraction:
    rows = [{"input_ids": [n, 2, 3], "loss_mask": [0, 1, 1], "id": f"s{n}"} for n in range(6)]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config(run_name="x", runs_dir=str(tmp_path))
    config.target.path = str(target.folder)
    config.target.aux_layers = [1, 3, 5]
    config.data.conversations = [str(file)]
    config.extract.shard_bytes = 10_000  # four samples
    config.extract.max_rejected = 1.0
    return Extraction(config)


@pytest.fixture
def fake(run: Extraction, monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake(run)

    @contextmanager
    def extractor(*_: Any) -> Iterator[Fake]:
        made.captured.clear()
        yield made

    monkeypatch.setattr(extract, "extractor", extractor)
    return made


def test_a_finished_store_is_left_alone_even_if_its_last_samples_were_rejected(
    run: Extraction, fake: Fake
) -> None:
    fake.rejects = {"s1", "s4", "s5"}
    run.run()
    before = {p.name: p.read_bytes() for p in run.folder.iterdir()}
    fake.captured.clear()
    run.run()
    assert fake.captured == []
    assert {p.name: p.read_bytes() for p in run.folder.iterdir()} == before
    assert StoreReader(run.folder).ids == ["s0", "s2", "s3"]


def test_a_finished_store_that_lost_its_last_shard_is_filled_again(
    run: Extraction, fake: Fake
) -> None:
    run.run()
    last = sorted(run.folder.glob("shard-*"))[-2:]
    before = last[1].read_bytes()
    for path in last:
        path.unlink()
    run.run()
    assert 0 < len(fake.captured) < 6 and last[1].read_bytes() == before
    assert StoreReader(run.folder).ids == [f"s{n}" for n in range(6)]


def test_a_run_that_fails_lets_go_of_the_folder_with_nothing_being_written(
    run: Extraction, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []
    real = extract.StoreWriter.close
    monkeypatch.setattr(
        extract.StoreWriter, "close", lambda self: (real(self), closed.append(self))
    )
    monkeypatch.setattr(Fake, "capture", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.run()
    assert len(closed) == 1


def test_a_store_is_verified_against_its_own_target(
    run: Extraction, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another one's lm_head would not fit, or find text of another model in every sample."""
    with pytest.raises(UserError, match=r"no manifest\.json"):
        verify.run(run.config)
    run.run()
    run.config.verify.min_agreement = 0
    assert {p.what for p in verify.run(run.config).problems} == {
        "aux states are constant in a row", "final states are constant in a row",
    }  # fmt: skip
    assert "6 samples" in capsys.readouterr().out
    file = run.folder / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["match"]["target"]["weights"] = "of another model"
    file.write_text(json.dumps(manifest))
    with pytest.raises(
        UserError, match=r"(?s)target.weights: configured .*Verify it with the target"
    ):
        verify.run(run.config)
    file.write_text(file.read_text()[:-5])
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        verify.run(run.config)


def test_states_of_servers_that_compute_in_another_precision_are_not_mixed(
    run: Extraction, fake: Fake
) -> None:
    """Neither side by side nor by going on with another one; their versions may differ."""
    one, fp8 = fake.servers[0], {"dtype": "bfloat16", "quantization": "fp8", "version": "2"}
    fake.servers = [one, fp8]
    with pytest.raises(UserError, match=r"(?s)quantization: .*'fp8'"):
        run.run()
    fake.servers = [one, {**one, "version": "2"}]
    run.config.extract.max_rejected = 0.0
    fake.rejects = {"s5"}
    with pytest.raises(RuntimeError, match="rejected"):
        run.run()
    assert list(run.folder.glob("*.arrow"))
    fake.rejects, fake.servers = set(), [fp8]
    with pytest.raises(UserError, match=r"(?s)quantization.*'fp8'.*found.*None"):
        run.run()
    fake.servers = [one]
    run.run()
    run.run()
    reader = StoreReader(run.folder)
    assert len(reader) == 6
    assert reader.manifest.match["server"] == {"dtype": "bfloat16", "quantization": None}


def test_a_store_from_before_that_was_recorded_can_be_finished(run: Extraction, fake: Fake) -> None:
    run.config.extract.max_rejected = 0.0
    fake.rejects = {"s5"}
    with pytest.raises(RuntimeError, match="rejected"):
        run.run()
    file = run.folder / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["match"]["server"]
    file.write_text(json.dumps(manifest))
    fake.rejects = set()
    run.run()
    assert StoreReader(run.folder).manifest.match["server"]["dtype"] == "bfloat16"


def test_a_codec_that_does_not_fit_the_target_is_told_before_a_server_starts(
    run: Extraction, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.config.codec.name = "int4"
    Extraction(run.config)
    monkeypatch.setattr(Target, "hidden_size", 100)
    with pytest.raises(UserError, match="multiple of 32.*take codec=fp8"):
        Extraction(run.config)
