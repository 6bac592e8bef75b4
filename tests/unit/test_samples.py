"""From rows to the samples that are captured, and how much each of them weighs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle3.chat import ChatEncoder, Encoded
from eagle3.config import Config
from eagle3.errors import UserError
from eagle3.manifest import Manifest
from eagle3.records import parse
from eagle3.serving.client import Answer, Client
from eagle3.target import Target
from extraction import respond
from extraction.samples import TokenSample, data_hash, load

TALK = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."}]


def write(file: Path, *weights: float | None) -> str:
    """A file of conversations with these weights; None says nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"messages": TALK} | ({"weight": w} if w is not None else {}) for w in weights]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def answered(folder: Path, target: Target, *weights: float | None, **identity: str) -> str:
    """The same as responses of a target with this identity."""
    match = {"target": {**target.identity(), **identity}}
    Manifest(kind="responses", match=match, facts={"complete": True}).save(folder)
    return write(folder / "responses.jsonl", *weights)


def config(target: Target, runs: Path, *conversations: str, **data: Any) -> Config:
    found = Config(run_name="x", runs_dir=str(runs))
    found.target.path = str(target.folder)
    found.data = replace(found.data, conversations=list(conversations), **data)
    return found


def test_what_this_target_is_not_known_to_have_said_is_weighted(
    target: Target, tmp_path: Path
) -> None:
    answered(tmp_path / "x" / "responses", target, None, 0.5)  # this run's own
    same = answered(tmp_path / "same", target, 2)
    other = answered(tmp_path / "other", target, 2, weights="of another model")
    unknown = write(tmp_path / "logs.jsonl", None, 3)
    for factor in (1.0, 0.25):
        run = config(target, tmp_path, same, other, unknown, off_policy_weight=factor)
        found = [sample.weight for sample in load(run, target)[0]]
        assert found == [1, 0.5, 2, 2 * factor, factor, 3 * factor]


@pytest.mark.parametrize("text", ['{"files": []}', "[1]", "not JSON"])
def test_another_tools_manifest_says_nothing_about_the_answers(
    target: Target, tmp_path: Path, text: str
) -> None:
    logs = write(tmp_path / "logs" / "logs.jsonl", None)
    (tmp_path / "logs" / "manifest.json").write_text(text)
    (sample,) = load(config(target, tmp_path, logs, off_policy_weight=0.5), target)[0]
    assert sample.weight == 0.5


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_a_factor_that_is_none_is_refused(target: Target, tmp_path: Path, factor: float) -> None:
    run = config(target, tmp_path, write(tmp_path / "a.jsonl", None), off_policy_weight=factor)
    with pytest.raises(UserError, match=r"data.off_policy_weight: .* not a number from 1e-06"):
        load(run, target)


def test_responses_of_another_tokenizer_are_refused(target: Target, tmp_path: Path) -> None:
    other = answered(tmp_path / "other", target, 1, tokenizer="another")
    with pytest.raises(UserError, match="tokenizer: configured"):
        load(config(target, tmp_path, other), target)


def test_another_weight_is_other_data(target: Target, tmp_path: Path) -> None:
    """And one that is 1 is the data it was before there were weights."""

    def identity(*weights: float | None) -> str:
        file = write(tmp_path / "a.jsonl", *weights)
        return data_hash(load(config(target, tmp_path, file), target)[0])

    assert identity(None, None) == identity(1, 1.0)
    assert len({identity(None, None), identity(None, 2), identity(2, None), identity(2, 3)}) == 4
    before = TokenSample.of("a", [1, 2, 3], [0, 1, 1])
    assert data_hash([before]) == "edb43c91efea170b00eb8a82d4de6c3790f52421b89c84853836dff11f9a6b3c"


def test_a_prompt_that_cannot_be_rendered_has_no_answer(target: Target) -> None:
    record = parse({"id": "a", "input_ids": [1, 2], "loss_mask": [0, 1]}, 0)
    row = respond.answer(Client("http://127.0.0.1:9"), ChatEncoder(target.tokenizer), record, {})
    assert row == {"id": "a", "messages": [], "output_ids": [], "finish": "refused"}


def test_a_tokenizer_without_a_template_is_told(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target.tokenizer, "chat_template", None)
    with pytest.raises(UserError, match="has no chat template"):
        ChatEncoder(target.tokenizer).prompt(TALK[:1])


def test_a_prompt_hands_its_weight_to_its_answer(target: Target) -> None:
    class Fake:
        def generate(self, *_: Any) -> Answer:
            return Answer(output_ids=[5, 6, 7], finish="stop", latency_s=0.0)

    def row(**extra: float) -> dict[str, Any]:
        record = parse({"id": "a", "messages": TALK[:1], **extra}, 0)
        return respond.answer(Fake(), ChatEncoder(target.tokenizer), record, {})  # type: ignore[arg-type]

    assert parse(row(weight=0.5), 0).weight == 0.5
    assert "weight" not in row() and row(weight=1) == row()
    plain, one, half = (parse({"prompt": "q", "weight": w}, 0) for w in (None, 1, 0.5))
    assert respond.identity(plain) == respond.identity(one) == ["row-0", plain.prompt]
    assert respond.identity(half) != respond.identity(one)


def test_turns_of_a_conversation_name_its_first_sample(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the template rewrites earlier turns, a conversation becomes a sample a turn; what
    cannot be used is in between, and ids may look like those of turns."""
    part = Encoded(input_ids=[1, 2, 3], loss_mask=[0, 1, 1])
    unfit = Encoded(input_ids=[1, 2, 3], loss_mask=[0, 0, 1])
    found = {"a": [unfit, part, part], "b#0": [part], "b#1": [part], "c": [part, unfit, part]}
    monkeypatch.setattr(ChatEncoder, "encode", lambda self, record: found[record.id])
    file = tmp_path / "talk.jsonl"
    file.write_text("".join(json.dumps({"id": id, "messages": TALK}) + "\n" for id in found))
    loaded, _ = load(config(target, tmp_path, str(file)), target)
    assert [(s.id, s.conversation) for s in loaded] == [
        ("a#1", 0), ("a#2", 0), ("b#0", 2), ("b#1", 3), ("c#0", 4), ("c#2", 4),
    ]  # fmt: skip


def test_token_ids_the_target_does_not_have_are_skipped_and_counted(
    target: Target, tmp_path: Path
) -> None:
    """A server asked to embed them fails; the run would end at that sample each time."""
    size = target.vocab_size
    file = tmp_path / "ids.jsonl"
    rows = [[1, 2, size - 1], [1, 2, size], [-1, 2, 3], [2**40, 1, 1], [3, 4, 5]]
    file.write_text(
        "".join(json.dumps({"input_ids": r, "loss_mask": [0, 1, 1]}) + "\n" for r in rows)
    )
    found, skipped = load(config(target, tmp_path, str(file)), target)
    assert [s.input_ids.tolist() for s in found] == [rows[0], rows[4]]
    assert dict(skipped) == {"token ids that are not in the target's vocabulary": 3}
