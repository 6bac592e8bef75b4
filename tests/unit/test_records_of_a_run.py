"""Manifests, metrics and usage: what a run leaves behind for people and for later stages."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from eagle3 import usage
from eagle3.command import end_by_signals, recorded
from eagle3.config import Config
from eagle3.errors import UserError
from eagle3.manifest import Manifest, require_match
from eagle3.metrics import JsonLines, Metrics, Wandb


def test_manifest_round_trip_and_kind(tmp_path: Path) -> None:
    manifest = Manifest(kind="store", match={"a": 1}, facts={"complete": True})
    manifest.save(tmp_path)
    found = Manifest.load(tmp_path, "store")
    assert found == manifest and found.hash() == manifest.hash()
    with pytest.raises(UserError, match="holds 'store', expected 'drafter'"):
        Manifest.load(tmp_path, "drafter")
    with pytest.raises(UserError, match="no manifest.json"):
        Manifest.load(tmp_path / "else", "store")


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"kind": "store"}', '{"format": 1, "x": 2}'])
def test_a_manifest_that_is_none_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match="manifest.json is damaged"):
        Manifest.load(tmp_path, "store")


@pytest.mark.parametrize("part", ["match", "facts"])
def test_a_manifest_that_was_edited_is_told(tmp_path: Path, part: str) -> None:
    Manifest(kind="store", match={"a": 1}, facts={"a": 1}).save(tmp_path)
    found = Manifest.load(tmp_path, "store")
    with pytest.raises(UserError, match=r"manifest.json is damaged: it does not say 'b'"):
        getattr(found, part)["b"]
    found.save(tmp_path)
    assert Manifest.load(tmp_path, "store") == found
    data = json.loads((tmp_path / "manifest.json").read_text())
    for wrong in (None, 3, ["x"]):
        (tmp_path / "manifest.json").write_text(json.dumps(data | {part: wrong}))
        with pytest.raises(UserError, match=r"manifest.json is damaged"):
            Manifest.load(tmp_path, "store")


def test_mismatches_are_named_with_both_values() -> None:
    with pytest.raises(UserError, match=r"layers: configured \[1\], found \[2\]") as error:
        require_match(
            {"layers": [1], "same": 0}, {"layers": [2], "same": 0}, "the store", "Mend it."
        )
    assert "same" not in str(error.value) and "Mend it." in str(error.value)
    require_match({"a": 1}, {"b": 2}, "", "")


def test_metrics_are_cut_back_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    for step in (10, 20, 30):
        lines.log(step, {"loss": step})
    with path.open("a") as file:
        file.write('{"step": 40, "lo')  # killed while writing
    JsonLines(path, resume_step=20).log(30, {"loss": -1})
    assert [(r["step"], r["loss"]) for r in map(json.loads, path.read_text().splitlines())] == [
        (10, 10), (20, 20), (30, -1),
    ]  # fmt: skip


def test_wandb_keeps_one_run_across_resumes_offline(tmp_path: Path) -> None:
    for step in (1, 2):
        run = Wandb(
            tmp_path,
            project="p",
            group="g",
            name="n",
            mode="offline",
            config={"lr": 1},
            job_type="train",
        )
        Metrics([run]).log(step, {"loss": 1.0})
        assert run.run.id == (tmp_path / "wandb-train-id").read_text() and run.run.group == "g"
        run.close()
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 2


def wandb_run(folder: Path, mode: str | None = "offline", resume: bool = True) -> Wandb:
    return Wandb(
        folder, project="p", group="g", name=folder.name, mode=mode, config={}, resume=resume
    )


def test_a_run_that_starts_anew_is_another(tmp_path: Path) -> None:
    ids = []
    for resume in (False, True, False):
        run = wandb_run(tmp_path, resume=resume)
        ids.append(run.run.id)
        run.close()
    assert ids[0] == ids[1] != ids[2]


def test_a_run_left_open_does_not_take_the_next_ones_metrics(tmp_path: Path) -> None:
    """As after a job of a sweep that failed."""
    first, second = wandb_run(tmp_path / "0"), wandb_run(tmp_path / "1")
    assert first.run.id != second.run.id and second.run.name == "1"
    second.close()
    first.close()


def test_wandbs_own_switch_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a key would make it go online."""
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    run = wandb_run(tmp_path, mode=None)
    assert run.run.settings.mode == "disabled"
    Metrics([run]).log(1, {"loss": 1.0})
    run.close()


def test_a_wandb_that_cannot_be_is_a_users_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="logger.mode=off is not one of"):
        wandb_run(tmp_path, mode="off")
    import wandb

    def refuse(**_: object) -> None:
        raise wandb.errors.CommError("no network")

    with monkeypatch.context() as inside:
        inside.setattr(wandb, "init", refuse)
        with pytest.raises(UserError, match="no network. Set logger.mode=offline"):
            wandb_run(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="not installed: .*logger=jsonl"):
        wandb_run(tmp_path)


def test_usage_is_recorded_per_command(tmp_path: Path) -> None:
    path = tmp_path / "usage.json"
    for name in ("extract", "train"):
        with usage.recorded(name, path):
            time.sleep(0.1)
    found = json.loads(path.read_text())
    assert set(found) == {"extract", "train"} and found["train"]["peak_memory_gb"] > 0.01
    with usage.recorded("train", path):  # goes on where it was, or does nothing
        pass
    again = json.loads(path.read_text())
    assert again["extract"] == found["extract"]
    assert all(again["train"][key] >= found["train"][key] for key in found["train"])
    with pytest.raises(ZeroDivisionError), usage.recorded("eval", path):
        1 / 0  # noqa: B018
    assert "eval" not in json.loads(path.read_text())
    path.write_text("{")
    with pytest.raises(UserError, match=r"usage.json is damaged.*remove it"):
        usage.recorded("verify", path).__enter__()


def test_capturing_evals_answers_is_a_stage_of_its_own(tmp_path: Path) -> None:
    config = Config(run_name="x", runs_dir=str(tmp_path))
    for config.extract.of_eval in (False, True):
        with recorded("extract", config):
            pass
    assert set(json.loads((tmp_path / "x" / "usage.json").read_text())) == {
        "extract", "extract eval's answers",
    }  # fmt: skip


def test_a_lost_terminal_ends_a_command_as_a_request_to_end_does() -> None:
    """With what it started and made in memory; under nohup it goes on."""
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for kind, status in ((signal.SIGTERM, 143), (signal.SIGHUP, 129)):
            signal.signal(kind, signal.SIG_DFL)
            end_by_signals()
            with pytest.raises(SystemExit) as end:
                signal.raise_signal(kind)
            assert end.value.code == status
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        end_by_signals()
        signal.raise_signal(signal.SIGHUP)
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
