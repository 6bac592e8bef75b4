"""The `respond` command with a server that is a stand-in: what it writes, resumes and refuses."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from eagle3.chat import ChatEncoder
from eagle3.config import Config
from eagle3.errors import UserError
from eagle3.lock import exclusive
from eagle3.records import parse
from eagle3.serving.client import Answer, Client, RequestRefused
from eagle3.serving.server import Server
from eagle3.target import Target
from extraction import respond, samples

PROMPTS = [{"id": f"p{n}", "prompt": f"What is {n} + {n}?"} for n in range(5)]


class Fake(Client):
    """Answers every prompt with its length; refuses those longer than `longest`."""

    def __init__(self) -> None:
        super().__init__("http://fake")
        self.longest = 10**6
        self.asked = 0

    def generate(self, input_ids: list[int], *_: Any, **__: Any) -> Answer:
        self.asked += 1
        if len(input_ids) > self.longest:
            raise RequestRefused("HTTP 400: too long")
        return Answer(output_ids=[len(input_ids), 5, 6], finish="stop", latency_s=0.0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    client = Fake()

    @contextmanager
    def servers(*_: Any, **__: Any) -> Iterator[list[Server]]:
        yield [Server(url=client.url, client=client)]

    monkeypatch.setattr(respond, "get_servers", servers)
    return client


def config(target: Target, folder: Path, rows: Sequence[dict[str, Any]] = PROMPTS) -> Config:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = Config(run_name="x", runs_dir=str(folder))
    found.target.path = str(target.folder)
    found.data.prompts = str(prompts)
    return found


def test_what_was_answered_is_on_record_as_tokens(
    target: Target, tmp_path: Path, fake: Fake
) -> None:
    """So that a template that renders today's date makes the same sample tomorrow."""
    output = respond.respond(config(target, tmp_path))
    encoder = ChatEncoder(target.tokenizer)
    rows = [json.loads(line) for line in output.open()]
    assert rows
    for row in rows:
        prompt = encoder.prompt(row["messages"][:-1], row.get("tools"))
        (sample,) = encoder.encode(parse(row, 0))
        assert row["input_ids"] == prompt and sample.input_ids == prompt + row["output_ids"]
        assert sample.loss_mask == [0] * len(prompt) + [1] * len(row["output_ids"])


def test_a_running_server_that_serves_something_else_is_told_of(
    target: Target, tmp_path: Path, fake: Fake, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run = config(target, tmp_path)
    run.server.urls = [fake.url]
    monkeypatch.setattr(fake, "info", lambda: {"model_path": "quite/another"}, raising=False)
    respond.respond(run)
    assert f"{fake.url} serves quite/another: is it the target" in caplog.text


@pytest.mark.parametrize("kept", [0.0, 0.37, 0.8, 1.0])
def test_a_torn_file_is_gone_on_with_after_its_last_whole_line(
    target: Target, tmp_path: Path, fake: Fake, kept: float
) -> None:
    run = config(target, tmp_path)
    output = respond.respond(run)
    whole = output.read_bytes()
    half = whole[: int(len(whole) * kept)]
    output.write_bytes(half)
    fake.asked = 0
    assert respond.respond(run).read_bytes() == whole
    assert fake.asked == len(PROMPTS) - half.count(b"\n")


def test_cutting_a_torn_line_never_takes_whole_ones_off_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill, or a disk that is still full, at that moment must not cost every answer so far."""
    file = tmp_path / "responses.jsonl"
    lines = b"".join(b'{"id": %d}\n' % n for n in range(1000))
    file.write_bytes(lines + b'{"id": 10')
    shrunk = []
    real = os.truncate
    monkeypatch.setattr(os, "truncate", lambda p, n: (shrunk.append(n), real(p, n))[1])
    monkeypatch.setattr(Path, "write_bytes", lambda *_: pytest.fail("written anew"))
    assert respond._whole_lines(file) == 1000
    assert file.read_bytes() == lines and shrunk == [len(lines)]
    assert respond._whole_lines(file) == 1000


def test_two_processes_do_not_answer_into_one_file(
    target: Target, tmp_path: Path, fake: Fake
) -> None:
    run = config(target, tmp_path)
    run.responses_dir.mkdir(parents=True)
    with exclusive(run.responses_dir), pytest.raises(UserError, match="another process"):
        respond.respond(run)
    assert fake.asked == 0


def test_other_prompts_do_not_mix(target: Target, tmp_path: Path, fake: Fake) -> None:
    """As the target sees them: the template's settings and the tools are part of a prompt."""
    run = config(target, tmp_path)
    respond.respond(run)
    run.target.template_kwargs = {"enable_thinking": False}
    with pytest.raises(UserError, match="template_kwargs.enable_thinking: configured False"):
        respond.respond(run)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    run = config(target, tmp_path, [*PROMPTS[:4], {**PROMPTS[4], "tools": tools}])
    with pytest.raises(UserError, match="prompts: configured"):
        respond.respond(run)


def test_nothing_left_to_answer_is_a_users_mistake(
    target: Target, tmp_path: Path, fake: Fake
) -> None:
    run = config(target, tmp_path)
    run.respond.skip = 5
    with pytest.raises(UserError, match=r"respond\.skip=5 leaves none of the 5 prompts"):
        respond.respond(run)


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", -0.1), ("top_p", 0.0), ("top_p", 1.5), ("max_new_tokens", 0),
     ("samples_per_prompt", 0), ("concurrency", 0)],
)  # fmt: skip
def test_settings_that_no_server_takes_are_told_not_every_prompt_refused(
    target: Target, tmp_path: Path, fake: Fake, key: str, value: float
) -> None:
    run = config(target, tmp_path)
    setattr(run.respond, key, value)
    with pytest.raises(UserError, match=rf"respond\.{key}={value} must be"):
        respond.respond(run)
    assert fake.asked == 0 and not run.responses_dir.exists()


def test_a_refused_prompt_trains_nothing_not_even_its_earlier_turns(
    target: Target, tmp_path: Path, fake: Fake
) -> None:
    """Those are somebody else's words, and would count as the target's own."""
    turns = [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "It is 4, as everybody knows."},
        {"role": "user", "content": "And 3 + 3?"},
    ]
    run = config(target, tmp_path, [*PROMPTS, {"id": "long", "messages": turns}])
    fake.longest = 40
    respond.respond(run)
    rows = [json.loads(line) for line in (run.responses_dir / "responses.jsonl").open()]
    assert [r["finish"] for r in rows] == ["stop"] * 5 + ["refused"]
    found, skipped = samples.load(run, target)
    assert [s.id for s in found] == [p["id"] for p in PROMPTS]
    assert skipped.total() == 1


def test_a_prompt_that_the_template_rejects_does_not_end_the_run(
    target: Target, tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = target.tokenizer.chat_template
    picky = "{% if '3 + 3' in messages[0]['content'] %}{{ raise_exception('3') }}{% endif %}"
    monkeypatch.setattr(Target, "tokenizer", deepcopy(target.tokenizer))
    monkeypatch.setattr(Target.tokenizer, "chat_template", picky + template)
    run = config(target, tmp_path)
    output = respond.respond(run)
    finishes = [json.loads(line)["finish"] for line in output.open()]
    assert finishes == ["stop", "stop", "stop", "refused", "stop"]
    found, skipped = samples.load(run, Target.resolve(str(target.folder)))
    assert len(found) == 4
    assert dict(skipped) == {"the chat template rejects the conversation": 1}


def test_unfinished_answers_are_not_extracted(target: Target, tmp_path: Path, fake: Fake) -> None:
    run = config(target, tmp_path)
    fake.generate = lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        respond.respond(run)
    with pytest.raises(UserError, match="are not finished"):
        samples.load(run, target)
