"""Measuring with a client that only stands in for a server: what counts, and what is refused."""

from __future__ import annotations

import subprocess
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from eagle3.config import Config, EvalConfig, TargetConfig
from eagle3.errors import UserError
from eagle3.serving.client import Answer, Client, RequestFailed, RequestRefused
from eagle3.serving.from_config import tell_other_target
from eagle3.serving.server import Server
from eagle3.target import Target
from eval import served
from eval.benchmarks import Prompt
from eval.kept import Kept
from eval.measure import HISTOGRAM, Run, histograms, measure
from eval.requirements import require_measurable, require_room, require_settings
from eval.speculation import Speculation
from eval.stats import acceptance

PROMPTS = [Prompt(id=f"p{n}", input_ids=[n] * (n + 1)) for n in range(10)]


def answered(tokens: int, **meta: Any) -> Answer:
    return Answer(output_ids=[7] * tokens, finish="stop", latency_s=1.0, meta=meta)


class SlowFirst:
    """Answers the first prompt only when all others have been."""

    def __init__(self) -> None:
        self.left = len(PROMPTS) - 1
        self.others_done = threading.Event()
        self.lock = threading.Lock()

    def generate(self, input_ids: list[int], sampling: dict, stream: bool = False) -> Answer:
        if input_ids == PROMPTS[0].input_ids:
            assert self.others_done.wait(5), "requests wait for one slow answer"
        with self.lock:
            self.left -= 1
            if self.left == 0:
                self.others_done.set()
        return answered(len(input_ids))


def test_no_request_waits_for_a_slow_answer() -> None:
    run = measure(SlowFirst(), PROMPTS, 16, concurrency=2, warmup=0)  # type: ignore[arg-type]
    assert [len(a.output_ids) for a in run.answers] == list(range(1, 11))


def test_the_warm_up_has_as_many_requests_under_way_as_the_measurement() -> None:
    class Together:
        """Answers warm-up requests only two at a time."""

        def __init__(self) -> None:
            self.pair = threading.Barrier(2, timeout=5)
            self.warm = 0

        def generate(self, input_ids: list[int], sampling: dict, stream: bool = False) -> Answer:
            if not stream:
                assert sampling["max_new_tokens"] == 8
                self.pair.wait()
                self.warm += 1
            return answered(3)

    client = Together()
    run = measure(client, PROMPTS, 16, concurrency=2, warmup=2)  # type: ignore[arg-type]
    assert client.warm == 4 and len(run.answers) == len(PROMPTS)


def test_a_prompt_that_the_server_refuses_is_named() -> None:
    class Refuses:
        def generate(self, input_ids: list[int], *_: Any, **__: Any) -> Answer:
            if len(input_ids) > 5:
                raise RequestRefused("too long")
            return answered(3)

    with pytest.raises(UserError, match="prompt p5 was refused: too long"):
        measure(Refuses(), PROMPTS, 16, concurrency=1, warmup=1)  # type: ignore[arg-type]


def test_an_answer_of_one_token_has_no_verify_step() -> None:
    # SGLang reports nothing of requests without one
    speculated = answered(9, spec_verify_ct=3, **{HISTOGRAM: [0, 2, 1]})
    run = Run(answers=[answered(1), speculated], seconds=1.0, concurrency=1)
    found = histograms(run, 3)
    assert found == [[0, 0, 0, 0], [0, 2, 1, 0]]
    assert acceptance(found).accept_length == pytest.approx(1 + 4 / 3)
    for wrong in (answered(2), answered(9, spec_verify_ct=4, **{HISTOGRAM: [0, 2, 1]})):
        with pytest.raises(RuntimeError, match="histogram"):
            histograms(Run(answers=[wrong], seconds=1.0, concurrency=1), 3)


def test_a_server_that_dies_is_told_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Target
) -> None:
    with subprocess.Popen(["false"]) as process:
        process.wait()
    (tmp_path / "log").write_text("out of memory")
    client = Client("http://127.0.0.1:1")
    client.retry_waits_s = ()
    client.info = lambda: {"model_path": str(target.folder)}  # type: ignore[method-assign]
    dead = Server(url=client.url, client=client, process=process, log=tmp_path / "log")
    monkeypatch.setattr(served, "get_server", lambda *_: nullcontext(dead))
    config = Config(run_name="x", target=TargetConfig(path=str(target.folder)))
    with pytest.raises(RequestFailed, match=r"(?s)Connection.* ended with status 1.*out of memory"):
        served.run_server(
            config, target, {"gsm": PROMPTS}, "eval-plain", None, Kept(tmp_path / "kept")
        )


def test_too_few_prompts_for_a_concurrency_are_told(caplog: pytest.LogCaptureFixture) -> None:
    require_measurable(EvalConfig(concurrency=[1, 10]), {"gsm": PROMPTS})
    assert caplog.text == ""
    require_measurable(EvalConfig(concurrency=[1, 11]), {"gsm": PROMPTS})
    assert "benchmark.gsm has 10 prompts: no more requests" in caplog.text


@pytest.mark.parametrize("wanted", [[], [0, 1], [2, 2]])
def test_concurrencies_that_cannot_be_measured_are_refused(wanted: list[int]) -> None:
    with pytest.raises(UserError, match=r"eval\.concurrency="):
        require_measurable(EvalConfig(concurrency=wanted), {"gsm": PROMPTS})


def test_a_running_server_must_be_the_one_that_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = {**Speculation.chain(3).server_args(Path("drafter")), "disable_radix_cache": True}
    found = {**asked, "speculative_draft_model_path": str(tmp_path / "drafter"), "model_path": "m"}
    require_settings(found, asked)  # the same folder, by its absolute path
    for key, value in (
        ("speculative_draft_model_path", str(tmp_path / "other")), ("disable_radix_cache", False),
        ("speculative_num_steps", 2), ("speculative_draft_model_path", None),
    ):  # fmt: skip
        with pytest.raises(UserError, match=key):
            require_settings({**found, key: value}, asked)
    require_settings({"speculative_algorithm": None}, {"speculative_algorithm": None})


def test_another_name_of_the_target_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    tell_other_target({"model_path": "org/name"}, {"org/name", "/cache/x"}, "http://x")
    tell_other_target({"model_path": str(tmp_path / "m")}, {"m"}, "http://x")
    assert caplog.text == ""
    tell_other_target({"model_path": "org/other"}, {"org/name"}, "http://x")
    assert "http://x serves org/other: is it the target, org/name?" in caplog.text


def test_the_server_must_have_room_for_the_longest_prompt_and_its_answer() -> None:
    # SGLang: context 64 -> max_req_len 63 -> max_req_input_len 58; a prompt of 10 may get 52 more
    info, prompts = {"max_req_input_len": 58}, {"gsm": PROMPTS}
    require_room(info, prompts, 52, None)
    with pytest.raises(UserError, match=r"benchmark\.gsm: prompt p9 has 10 tokens"):
        require_room(info, prompts, 53, None)
    require_room(info, prompts, 48, Speculation.chain(3))  # drafts take 4
    with pytest.raises(UserError, match="more than the 58"):
        require_room(info, prompts, 49, Speculation.chain(3))
    require_room({}, prompts, 10**6, None)
