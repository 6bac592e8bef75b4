"""`eval.tune` with servers that are only told about: what is measured, kept, chosen and refused."""

import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3.config import Config, ServerConfig, TuneConfig
from eagle3.errors import UserError
from eagle3.serving import cpu
from eagle3.serving.client import Answer, RequestFailed
from eagle3.serving.watch import ServerFailed
from eval import benchmarks, tune, tune_report
from eval.benchmarks import Prompt
from eval.measure import Run
from eval.speculation import Speculation, combinations
from tests.conftest import TINY
from tests.fake_servers import FakeServers, configured, drafts

SPEEDS = {
    # tok/s of (benchmark a, benchmark b) by concurrency
    "plain": {1: (10.0, 10.0), 8: (50.0, 50.0)},
    "steps1_topk1_tokens2": {1: (15.0, 15.0), 8: (45.0, 45.0)},
    "steps2_topk1_tokens3": {1: (12.0, 30.0), 8: (40.0, 40.0)},
}
PROMPTS = {name: [Prompt(id=name, input_ids=[1, 2])] * 8 for name in ("a", "b")}


class Servers(FakeServers):
    """Of these speeds, and with one answer to all prompts."""

    def __init__(self) -> None:
        super().__init__(self.answered)
        self.speeds = dict(SPEEDS)
        self.says: dict[str, int] = {}
        self.retries = 0

    def answered(self, name: str, prompts: list[Prompt], concurrency: int) -> Run:
        # both benchmarks take as long, so that the total is the mean of their speeds
        tokens = round(self.speeds[name][concurrency]["ab".index(prompts[0].id)] * 10)
        steps = 0 if name == "plain" else int(name[len("steps")])
        answer = Answer(
            output_ids=[self.says.get(name, 7)] * tokens,
            finish="stop",
            latency_s=20.0,
            meta=drafts(steps, 1, *[0] * (steps - 1), 3) if steps else {},
            retries=self.retries,
        )
        return Run(answers=[answer], seconds=10.0, concurrency=concurrency)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    server = ServerConfig(
        args={"mem_fraction_static": 0.5}, backends=["fa3", "triton"], env={"GREETING": "a b"}
    )
    return configured(tmp_path, server=server, tune=TuneConfig(num_steps=[1, 2]))


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    fake = Servers()
    fake.install(monkeypatch, PROMPTS)
    return fake


def test_the_fastest_over_all_benchmarks_is_chosen_at_each_concurrency(
    config: Config, servers: Servers
) -> None:
    results = tune.tune(config)
    assert servers.started == list(SPEEDS)
    assert len(results["rows"]) == 2 * 2 * 3
    best = results["best"]["1"]
    # slower than one step on benchmark a, but (12 + 30) / 2 > 15
    assert best["speculation"] == {"num_steps": 2, "topk": 1, "draft_tokens": 3}
    assert best["tok_s"] == pytest.approx(21) and best["speedup"] == pytest.approx(2.1)
    row = next(r for r in results["rows"] if r["benchmark"] == "b" and r["tok_s"] == 30)
    assert row["speedup"] == pytest.approx(3) and row["tok_s_per_request"] == pytest.approx(15)
    assert row["accept_length"] == pytest.approx(1 + 2 * 0.75)
    assert json.loads((config.eval_dir / "tune.json").read_text()) == results


def test_where_plain_serving_is_fastest_no_command_is_given(
    config: Config, servers: Servers
) -> None:
    results = tune.tune(config)
    best = results["best"]["8"]
    assert best["speculation"] is None and best["command"] is None and best["speedup"] == 1
    text = tune_report.write(config.run_dir).read_text()
    for shown in (text, tune_report.summary(results)):
        assert "concurrency 8: plain serving is fastest (50.0 tok/s); serve no drafter" in shown
        assert shown.count("sglang.launch_server") == 1


def test_of_equally_fast_servers_the_simplest_is_chosen(config: Config, servers: Servers) -> None:
    servers.speeds = dict.fromkeys(SPEEDS, SPEEDS["plain"])
    assert all(best["speculation"] is None for best in tune.tune(config)["best"].values())


def test_the_command_serves_what_was_measured_and_can_be_pasted(
    config: Config, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.run_dir.parent)
    config.runs_dir = "."
    words = shlex.split(tune.tune(config)["best"]["1"]["command"])
    assert words[:5] == [
        "GREETING=a b", "python", "-m", "sglang.launch_server", "--model-path"
    ]  # fmt: skip
    flags = dict(zip(words[4::2], words[5::2], strict=True))
    assert flags == {
        "--model-path": str(TINY),
        "--host": "127.0.0.1",
        "--attention-backend": "triton",  # the one of the two that came up
        "--mem-fraction-static": "0.5",
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": str(config.drafter_dir.resolve()),
        "--speculative-num-steps": "2",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "3",
    }


def test_outputs_are_compared_with_those_of_plain_serving(config: Config, servers: Servers) -> None:
    servers.speeds = dict.fromkeys(SPEEDS, SPEEDS["plain"])  # as fast: the same number of tokens
    servers.says = {"steps2_topk1_tokens3": 8}
    found = {json.dumps(r["speculation"]): r["identical"] for r in tune.tune(config)["rows"]}
    assert list(found.values()) == [1, 1, 0]
    servers.failures = {"plain": ServerFailed("no memory")}
    shutil.rmtree(config.eval_dir / "tune" / "plain")
    assert all(row["identical"] is None for row in tune.tune(config)["rows"])


def test_the_table_shows_every_row(config: Config, servers: Servers) -> None:
    results = tune.tune(config)
    text = tune_report.write(config.run_dir).read_text()
    assert "| a | 1 | plain |  |  |  | 10.0 | 5.0 | 1.00x | 100.0% |" in text
    assert "| b | 1 | 2 | 1 | 3 | 2.50 | 30.0 | 15.0 | 3.00x | 0.0% |" in text
    assert "| (all) | 1 | 2 | 1 | 3 |  | 21.0 |  | 2.10x |  |" in text
    assert len(tune_report.table(results)) == 2 * 2 * 3 + 2 * 3


@pytest.mark.parametrize("failure", [ServerFailed("no memory\nlog"), RequestFailed("no memory")])
def test_a_failed_combination_is_told_left_out_and_tried_again(
    config: Config, servers: Servers, failure: Exception
) -> None:
    servers.failures = {"steps2_topk1_tokens3": failure}
    results = tune.tune(config)
    assert results["best"]["1"]["speculation"]["num_steps"] == 1
    assert results["failed"] == [
        {
            "speculation": {"num_steps": 2, "topk": 1, "draft_tokens": 3},
            "failed": str(failure),
        }
    ]
    told = "steps 2, topk 1, draft tokens 3 could not be measured: no memory\n"
    assert told in tune_report.summary(results)
    assert told in tune_report.write(config.run_dir).read_text()
    servers.failures, servers.started = {}, []
    assert tune.tune(config)["best"]["1"]["speculation"]["num_steps"] == 2
    assert servers.started == ["steps2_topk1_tokens3"]


def test_requests_that_were_made_again_are_told(config: Config, servers: Servers) -> None:
    servers.retries = 3
    results = tune.tune(config)
    told = "steps 1, topk 1, draft tokens 2, b x8: 3 requests failed and were made again"
    assert told in tune_report.summary(results)
    assert told in tune_report.write(config.run_dir).read_text()


def test_without_plain_speeds_nothing_is_said_against_them(
    config: Config, servers: Servers
) -> None:
    servers.failures = {"plain": ServerFailed("no memory")}
    results = tune.tune(config)
    assert results["best"]["1"]["speedup"] is None
    text = tune_report.summary(results)
    assert "plain serving could not be measured: no memory" in text
    assert "(21.0 tok/s, plain serving could not be measured)" in text


def test_if_every_combination_fails_so_does_the_command(config: Config, servers: Servers) -> None:
    servers.failures = {name: ServerFailed(f"{name} died") for name in SPEEDS if name != "plain"}
    with pytest.raises(RuntimeError, match=r"(?s)steps1_topk1_tokens2 died.*tokens3 died"):
        tune.tune(config)
    assert not (config.eval_dir / "tune.json").exists()


def test_a_users_mistake_is_not_a_failed_combination(config: Config, servers: Servers) -> None:
    servers.failures = {"steps1_topk1_tokens2": UserError("the server changed its settings")}
    with pytest.raises(UserError, match="changed its settings"):
        tune.tune(config)


def test_after_an_interruption_only_what_is_missing_is_measured(
    config: Config, servers: Servers
) -> None:
    servers.failures = {"steps2_topk1_tokens3": KeyboardInterrupt}
    with pytest.raises(KeyboardInterrupt):
        tune.tune(config)
    assert servers.started == list(SPEEDS)
    servers.failures, servers.started = {}, []
    resumed = tune.tune(config)
    assert servers.started == ["steps2_topk1_tokens3"]
    # more settings are measured beside those that are there; the figures are those of one go
    config.tune.num_steps = [1, 2, 3]
    servers.speeds["steps3_topk1_tokens4"] = SPEEDS["plain"]
    assert len(tune.tune(config)["rows"]) == len(resumed["rows"]) + 4
    assert servers.started == ["steps2_topk1_tokens3", "steps3_topk1_tokens4"]
    config.tune.num_steps = [1, 2]
    shutil.rmtree(config.eval_dir / "tune")
    assert tune.tune(config)["rows"] == resumed["rows"]


def test_a_server_that_was_ended_goes_on(config: Config, servers: Servers) -> None:
    def end(_: str) -> None:
        if len(servers.measured) == 7:
            raise KeyboardInterrupt

    servers.event = end
    with pytest.raises(KeyboardInterrupt):
        tune.tune(config)
    assert servers.measured[-1] == "steps1_topk1_tokens2 b x1"
    servers.event, servers.measured = lambda _: None, []
    results = tune.tune(config)
    assert servers.measured[:3] == [
        "steps1_topk1_tokens2 b x1", "steps1_topk1_tokens2 b x8", "steps2_topk1_tokens3 a x1"
    ]  # fmt: skip
    (told,) = tune_report.remarks(results)
    assert told == (
        "runs come from 2 starts of steps 1, topk 1, draft tokens 2: a x1, a x8 at time 2; "
        "b x1, b x8 at time 3"
    )
    assert told in tune_report.write(config.run_dir).read_text()


def test_another_concurrency_is_measured_beside_those_that_are_there(
    config: Config, servers: Servers
) -> None:
    config.eval.concurrency = [8]
    tune.tune(config)
    servers.measured = []
    config.eval.concurrency = [1, 8]
    assert [row["concurrency"] for row in tune.tune(config)["totals"]] == [1] * 3 + [8] * 3
    assert len(servers.measured) == 6 and all(run.endswith(" x1") for run in servers.measured)


def test_figures_of_another_drafter_or_setting_are_refused(
    config: Config, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune.tune(config)
    servers.started = []

    def refused(key: str) -> None:
        with pytest.raises(UserError, match=rf"(?s)does not match:\n  {key}\b.*: .*Remove .*tune"):
            tune.tune(config)

    weights = config.drafter_dir / "model.safetensors"
    weights.write_text("trained again")
    refused("drafter")
    weights.write_text("model.safetensors")
    for holder, name, value, key in (
        (config.eval, "max_new_tokens", 9, "max_new_tokens"),
        (config.eval, "warmup", 1, "warmup"),
        (config.eval, "plain_url", "http://127.0.0.1:1", "plain_url"),
        (config.server, "args", {"tp_size": 2}, "server"),
    ):
        before = getattr(holder, name)
        setattr(holder, name, value)
        refused(key)
        setattr(holder, name, before)
    other = {name: [Prompt(id=name, input_ids=[1, 3])] * 8 for name in ("a", "b")}
    monkeypatch.setattr(benchmarks, "load", lambda *_: other)
    refused("prompts")
    assert servers.started == []


def test_settings_may_change_while_nothing_is_measured(config: Config, servers: Servers) -> None:
    servers.failures = {"plain": KeyboardInterrupt}
    with pytest.raises(KeyboardInterrupt):
        tune.tune(config)
    servers.failures = {}
    config.eval.max_new_tokens = 9
    assert tune.tune(config)["settings"]["eval"]["max_new_tokens"] == 9


@pytest.mark.parametrize(
    ("holder", "name", "value"),
    [
        ("eval", "speculative_url", "http://127.0.0.1:1"),
        ("server", "urls", ["http://127.0.0.1:1"]),
        ("tune", "num_steps", []),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_server_starts(
    config: Config, servers: Servers, holder: str, name: str, value: object
) -> None:
    setattr(getattr(config, holder), name, value)
    with pytest.raises(UserError, match=name):
        tune.tune(config)
    assert servers.started == [] and not config.eval_dir.exists()


def test_chains_and_trees_are_combined(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    found = combinations(TuneConfig(num_steps=[1, 3], topk=[1, 2], draft_tokens=[3, 8]))
    assert [(s.num_steps, s.topk, s.draft_tokens) for s in found] == [
        (1, 1, 2), (1, 2, 3), (3, 1, 4), (3, 2, 3), (3, 2, 8),
    ]  # fmt: skip
    assert "steps1_topk2_tokens8 is left out: its tree has 3 tokens" in caplog.text


@pytest.mark.parametrize(
    ("lists", "told"),
    [
        ({"num_steps": [2, 2]}, r"num_steps=\[2, 2\] names a value twice"),
        ({"num_steps": [0, 2]}, r"num_steps holds \[0\]"),
        ({"topk": [0]}, r"topk holds \[0\]"),
        ({"topk": []}, "must each name a value"),
        ({"topk": [1, 4]}, r"topk=\[4\] drafts trees: set tune\.draft_tokens"),
        ({"topk": [4], "draft_tokens": [1, 8]}, r"draft_tokens holds \[1\]"),
        ({"draft_tokens": [4]}, r"draft_tokens=\[4\] is for tune\.topk > 1"),
        ({"num_steps": [1, 2], "topk": [2], "draft_tokens": [4, 8]}, r"num_steps: \[1\] fits no"),
        ({"num_steps": [2], "topk": [1, 2], "draft_tokens": [4, 8]}, r"draft_tokens: \[8\] fits"),
    ],
)
def test_lists_that_cannot_be_meant_are_refused(lists: dict, told: str) -> None:
    with pytest.raises(UserError, match=told):
        combinations(TuneConfig(**lists))


GROW = """
import sys, torch
from sglang.srt.speculative.spec_utils import select_top_k_tokens
for shape in sys.argv[1:]:
    num_steps, topk = map(int, shape.split("x"))
    scores, tokens = None, []
    for step in range(num_steps):
        drafted = torch.rand(topk if step else 1, topk)
        states = torch.zeros(len(drafted), 4)
        _, _, scores, (_, found, _) = select_top_k_tokens(
            step, drafted, torch.zeros_like(drafted, dtype=torch.long), states, scores, topk
        )
        tokens.append(found)
    print("size", 1 + torch.cat(tokens, dim=1).shape[1])  # and the root
"""


def test_tree_size_is_what_sglang_chooses_from() -> None:
    shapes = [(1, 1), (4, 1), (1, 4), (2, 3), (3, 2)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", GROW, *(f"{n}x{k}" for n, k in shapes)],
        env={**os.environ, **cpu.environment()}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    sizes = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("size")]
    ours = [Speculation(num_steps=n, topk=k, draft_tokens=2).tree_size for n, k in shapes]
    assert sizes == ours
    assert Speculation.chain(4).draft_tokens == Speculation.chain(4).tree_size == 5
