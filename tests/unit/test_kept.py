"""An evaluation that is ended at any instant goes on with what it had measured, and no more."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from eagle3.config import Config, ServerConfig
from eagle3.errors import UserError
from eagle3.lock import exclusive
from eagle3.serving.client import Answer
from eval import benchmarks, kept, live, report, served
from eval.benchmarks import Prompt
from eval.kept import Kept
from eval.measure import Run
from tests.fake_servers import FakeServers, configured, drafts

PROMPTS = {name: [Prompt(id=name, input_ids=[n, 1]) for n in range(4)] for name in ("a/b", "gsm")}
RUNS = [
    f"{side} {name} x{concurrency}"
    for side in ("speculative", "plain") for name in PROMPTS for concurrency in (1, 8)
]  # fmt: skip


class Killed(BaseException):
    """As the process is: nothing handles it."""


def given(name: str, prompts: list[Prompt], concurrency: int) -> Run:
    """One output differs, at its third token; times are those of the server and concurrency."""
    plain = name == "plain"
    answers = [
        Answer(
            output_ids=[prompt.input_ids[0], 5, 6 + (number == 1 and not plain), 7],
            finish="stop",
            latency_s=0.1 + 0.7 / concurrency + plain,
            first_s=0.1,
            first_tokens=1,
            meta={} if plain else drafts(3, number, 1, 0, 1),
        )
        for number, prompt in enumerate(prompts)
    ]
    return Run(answers=answers, seconds=1 / 3 + plain + 1 / concurrency, concurrency=concurrency)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = configured(tmp_path, server=ServerConfig(args={"mem_fraction_static": 0.5}))
    config.eval.offline = config.logger.wandb = False
    return config


@pytest.fixture
def servers(config: Config, monkeypatch: pytest.MonkeyPatch) -> FakeServers:
    """Whose report is only told about, too, and lies where the real one would."""
    fake = FakeServers(given)
    fake.install(monkeypatch, PROMPTS)
    write, rename = kept.write_text, Path.rename

    def told(path: Path, target: Path) -> Path:
        fake.event("rename")
        return rename(path, target)

    def reported(run_dir: Path, _: Path) -> None:
        fake.event("report")
        text = report.summary(json.loads((run_dir / "eval" / "results.json").read_text()))
        write(run_dir / "eval" / "report.md", text)

    monkeypatch.setattr(Path, "rename", told)
    monkeypatch.setattr(live.report, "write", reported)
    return fake


def kill_at(servers: FakeServers, number: int) -> None:
    """At this event from now, as counted from 0."""
    count = -1

    def event(_: str) -> None:
        nonlocal count
        count += 1
        if count == number:
            raise Killed

    servers.event = event


def left(config: Config) -> dict[str, Any]:
    """What an evaluation leaves behind, but for when servers were there."""
    folder = config.eval_dir
    found: dict[str, Any] = {
        path.name: path.read_text() for path in folder.iterdir() if path.is_file()
    }
    results = json.loads(found.pop("results.json"))
    assert set(results.pop("server_starts")) == {"plain", "speculative"}
    report_lines = found.pop("report.md").splitlines()
    found["report.md"] = [line for line in report_lines if not line.startswith("runs come from")]
    return found | {"results.json": results, "folders": [p for p in folder.iterdir() if p.is_dir()]}


def test_killed_at_any_instant_it_goes_on_to_the_same_results(
    config: Config, servers: FakeServers
) -> None:
    """At every start, run, look-up, before every file takes its name, and before the report."""
    events: list[str] = []
    servers.event = events.append
    live.evaluate(config)
    whole = left(config)
    assert whole["folders"] == [] and servers.measured == RUNS
    assert events.count("measure") == 8 and events.count("look up") == 4
    assert events.count("rename") == 1 + 8 + 4 + 3 + 1 and events.count("report") == 1
    assert whole["results.json"]["differences"]["margin_max"] == pytest.approx(0.25)
    for number, event in enumerate(events):
        shutil.rmtree(config.eval_dir)
        servers.measured, servers.started = [], []
        kill_at(servers, number)
        with pytest.raises(Killed):
            live.evaluate(config)
        before, started = list(servers.measured), list(servers.started)
        kept_runs = {
            f"{path.parent.name} {path.stem}"
            for path in config.eval_dir.glob("kept/*/*.json") if "differences" not in path.stem
        }  # fmt: skip
        servers.event = lambda _: None
        live.evaluate(config)
        assert left(config) == whole, (number, event)
        # only what was under way or not yet written is measured twice
        again = servers.measured[len(before) :]
        assert len(kept_runs) >= len(before) - 1 and again == RUNS[len(kept_runs) :]
        needed = ["speculative"] if len(kept_runs) < 4 else []
        if "report" not in events[:number] and events[:number].count("rename") < 1 + 8 + 4:
            needed.append("plain")
        assert servers.started[len(started) :] == needed, (number, event)


def test_killed_again_and_again_it_ends_all_the_same(config: Config, servers: FakeServers) -> None:
    live.evaluate(config)
    whole = left(config)
    shutil.rmtree(config.eval_dir)
    servers.measured, servers.started = [], []
    for number in range(13):  # a start, a run or look-up and its file, and the next thing
        kill_at(servers, 3 if number else 4)  # the manifest is before the first
        with pytest.raises(Killed):
            live.evaluate(config)
    servers.event = lambda _: None
    results = live.evaluate(config)
    assert left(config) == whole
    starts = results["server_starts"]
    assert list(starts["speculative"]) == ["time 1", "time 2", "time 3", "time 4"]
    assert list(starts["plain"].values()) == [["a/b x1"], ["a/b x8"], ["gsm x1"], ["gsm x8"]]
    told = "runs come from 4 starts of the plain server: a/b x1 at time 6; a/b x8 at time 7; "
    assert told in (config.eval_dir / "report.md").read_text()


def kill_after(servers: FakeServers, config: Config, runs: int) -> None:
    """Evaluate, and end when so many runs are kept."""

    def event(_: str) -> None:
        if len(servers.measured) > runs:
            raise Killed

    servers.measured, servers.event = [], event
    with pytest.raises(Killed):
        live.evaluate(config)
    servers.measured, servers.event = [], lambda _: None


def test_times_are_those_of_the_first_measurement(config: Config, servers: FakeServers) -> None:
    first = live.evaluate(config)["benchmarks"]
    kill_after(servers, config, 6)

    def slower(*args: Any) -> Run:
        run = given(*args)
        run.seconds *= 2
        return run

    servers.run = slower
    again = live.evaluate(config)["benchmarks"]
    for name, concurrency, factor in (("a/b", "1", 1), ("a/b", "8", 1), ("gsm", "1", 2)):
        one, other = (table[name][concurrency]["tok_s"] for table in (first, again))
        assert other["speculative"] == one["speculative"]
        assert other["plain"] == pytest.approx(one["plain"] / factor)


def test_an_evaluation_that_ended_is_made_anew(config: Config, servers: FakeServers) -> None:
    for _ in range(2):
        servers.measured = []
        live.evaluate(config)
        assert servers.measured == RUNS and not (config.eval_dir / "kept").exists()


CHANGES: dict[str, Callable[[Config, pytest.MonkeyPatch], Any]] = {
    "drafter.config.json": lambda c, _: (c.drafter_dir / "config.json").write_text("edited"),
    "drafter.model.safetensors": (
        lambda c, _: (c.drafter_dir / "model.safetensors").write_text("trained again")
    ),
    "num_steps": lambda c, _: setattr(c.eval, "num_steps", 4),
    "max_new_tokens": lambda c, _: setattr(c.eval, "max_new_tokens", 9),
    "warmup": lambda c, _: setattr(c.eval, "warmup", 1),
    "plain_url": lambda c, _: setattr(c.eval, "plain_url", "http://127.0.0.1:1"),
    "speculative_url": lambda c, _: setattr(c.eval, "speculative_url", "http://127.0.0.1:1"),
    "server.args.tp_size": lambda c, _: c.server.args.update(tp_size=2),
    "server.env.MODE": lambda c, _: c.server.env.update(MODE="1"),
    "server.backends": lambda c, _: c.server.backends.append("fa3"),
    "prompts": lambda _, m: m.setattr(
        benchmarks, "load",
        lambda *_: {n: [Prompt(id=n, input_ids=[9, 9])] * 4 for n in PROMPTS},
    ),
    "target.weights": lambda _, m: m.setattr(
        served.Target, "identity", lambda _: {"weights": "others"}
    ),
    "versions.sglang": lambda _, m: m.setattr(
        served.provenance, "versions", lambda: {"sglang": "0.0.1", "torch": "0.0.1"}
    ),
    "machine.cpu": lambda _, m: m.setattr(served.provenance, "machine", lambda: {"cpu": "another"}),
}  # fmt: skip


@pytest.mark.parametrize("key", CHANGES)
def test_with_other_inputs_everything_is_measured_again_and_told_why(
    key: str,
    config: Config,
    servers: FakeServers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kill_after(servers, config, 6)
    CHANGES[key](config, monkeypatch)
    live.evaluate(config)
    assert servers.measured == RUNS
    assert "does not match:" in caplog.text and f"\n  {key}: configured " in caplog.text
    assert "It is measured anew." in caplog.text


def test_another_concurrency_leaves_the_others(config: Config, servers: FakeServers) -> None:
    kill_after(servers, config, 6)
    config.eval.concurrency = [8, 2]
    assert live.evaluate(config)["concurrency"] == 8
    assert servers.measured == [
        "speculative a/b x2", "speculative gsm x2", "plain a/b x2", "plain gsm x8", "plain gsm x2"
    ]  # fmt: skip


@pytest.mark.parametrize("setting", ["version", "attention_backend", "speculative_token_map"])
def test_a_server_that_runs_otherwise_than_before_measures_everything_of_its_own(
    setting: str, config: Config, servers: FakeServers, caplog: pytest.LogCaptureFixture
) -> None:
    """The other server's runs are none of its business."""
    kill_after(servers, config, 6)
    servers.settings[setting] = "another"
    live.evaluate(config)
    assert servers.started[-1] == "plain" and servers.measured == RUNS[4:]
    assert f"\n  settings.{setting}: configured 'another', found " in caplog.text


def test_runs_of_two_settings_are_never_mixed(config: Config, servers: FakeServers) -> None:
    kill_after(servers, config, 6)
    servers.settings["version"] = "another"
    kill_after(servers, config, 1)
    results = live.evaluate(config)
    assert servers.measured == RUNS[5:] and results["settings"]["plain"]["version"] == "another"
    assert results["settings"]["speculative"]["version"] == "0.5.23"
    assert list(results["server_starts"]["plain"].values()) == [["a/b x1"], [
        "a/b x8", "gsm x1", "gsm x8"
    ]]  # fmt: skip


def test_a_running_server_is_asked_whether_it_is_the_same(
    config: Config, servers: FakeServers
) -> None:
    config.eval.speculative_url = "http://127.0.0.1:1"
    kill_after(servers, config, 6)
    servers.started = []
    kill_after(servers, config, 0)  # nothing is missing of the one, two runs of the other
    assert servers.started == ["speculative", "plain"]
    servers.settings["version"] = "0.5.22"
    live.evaluate(config)
    assert servers.measured == RUNS


def flip(text: str) -> str:
    return text.replace('"latency_s": 0.', '"latency_s": 9.', 1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: "",
        lambda t: t[:-40],
        flip,
        lambda t: "[]",
        lambda t: "{}",
        lambda t: "\0" * len(t),
    ],
    ids=["empty", "torn", "one digit", "a list", "no hash", "zeros"],
)
def test_a_damaged_run_is_told_and_measured_again(
    damage: Callable[[str], str],
    config: Config,
    servers: FakeServers,
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = live.evaluate(config)["benchmarks"]
    kill_after(servers, config, 6)
    path = config.eval_dir / "kept" / "speculative" / "gsm-x1.json"
    before = path.read_text()
    path.write_text(damage(before))
    assert path.read_text() != before
    assert live.evaluate(config)["benchmarks"] == whole
    assert f"{path} is damaged: what it held is measured again" in caplog.text
    assert servers.measured == ["speculative gsm x1", *RUNS[6:]]


def test_differences_are_looked_up_again_of_other_outputs(
    config: Config, servers: FakeServers
) -> None:
    def kill(what: str) -> None:
        if what == "report":
            raise Killed

    servers.event = kill
    with pytest.raises(Killed):
        live.evaluate(config)
    (config.eval_dir / "kept" / "speculative" / "gsm-x1.json").unlink()

    def as_plain(*args: Any) -> Run:
        run = given(*args)
        run.answers[1].output_ids[2] = 6
        return run

    servers.run, servers.started = as_plain, []
    servers.event = lambda _: None
    found = live.evaluate(config)["benchmarks"]
    assert servers.started == ["speculative", "plain"] and servers.measured[8:] == [RUNS[2]]
    outputs = {(n, c): r["differences"]["outputs"] for n in found for c, r in found[n].items()}
    assert outputs == {("a/b", "1"): 1, ("a/b", "8"): 1, ("gsm", "1"): 0, ("gsm", "8"): 1}


def test_two_evaluations_do_not_share_a_folder(config: Config, servers: FakeServers) -> None:
    folder = config.eval_dir / "kept"
    folder.mkdir(parents=True)
    with exclusive(folder), pytest.raises(UserError, match="another process is at work"):
        live.evaluate(config)
    assert servers.started == []


def test_what_is_half_removed_is_not_gone_on_with(
    config: Config,
    servers: FakeServers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def kill(*_: Any) -> None:
        raise Killed

    def folders_first(folder: Path) -> list[Path]:
        return sorted((Path(entry) for entry in os.scandir(folder)), key=Path.is_file)

    with monkeypatch.context() as inside, pytest.raises(Killed):
        inside.setattr(Path, "iterdir", folders_first)
        inside.setattr(kept.shutil, "rmtree", kill)
        live.evaluate(config)
    assert len(list(config.eval_dir.glob("kept/*/*.json"))) == 12
    live.evaluate(config)
    assert servers.measured == RUNS * 2
    assert f"what is kept in {config.eval_dir / 'kept'} is removed" in caplog.text


def test_a_damaged_manifest_is_told(
    config: Config, servers: FakeServers, caplog: pytest.LogCaptureFixture
) -> None:
    kill_after(servers, config, 6)
    (config.eval_dir / "kept" / "manifest.json").write_text('{"format": 1, "ki')
    live.evaluate(config)
    assert servers.measured == RUNS and "manifest.json is damaged" in caplog.text


def test_a_run_is_read_as_it_was_measured(tmp_path: Path) -> None:
    run = given("speculative", PROMPTS["gsm"], 8)
    run.histograms = [[1, 0, 2, 0]] * 4
    run.answers[0].first_s, run.seconds = None, 0.1 + 0.2
    pieces = Kept(tmp_path / "server")
    pieces.begin({"dtype": "bfloat16", "version": None})
    pieces.add("x", asdict(run))
    found = Kept(tmp_path / "server")
    assert Run.from_dict(found["x"]) == run and "y" not in found
    assert found.settings == {"dtype": "bfloat16", "version": None}
    assert found.start("x") == pieces.start("x")
