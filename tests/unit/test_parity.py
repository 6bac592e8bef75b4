"""Parity and its diagnosis, with live histograms made by a drafter that has a known fault."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from eagle3.drafter import Drafter
from eagle3.walk import sample_histograms, teacher_forced
from eval import parity
from eval.causes import NONE, known_causes
from eval.parity import Answer, by_prompt, diagnose, distance, matched, replay, summary
from eval.stats import acceptance
from tests.conftest import tiny_drafter

TOKENS, PROMPT = 60, 8


@dataclass
class Reader:
    """What parity takes from a store: texts that the drafter mostly gets right."""

    samples: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

    def __len__(self) -> int:
        return len(self.samples)

    def tokens(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.samples[number][:2]

    def states(self, number: int) -> tuple[torch.Tensor, None]:
        return self.samples[number][2], None


def made(options: dict[str, Any], count: int = 6) -> tuple[Drafter, torch.Tensor, Reader]:
    """A drafter, its target's lm_head, and texts with chains of its own drafts."""
    drafter, lm_head = tiny_drafter(torch.float32, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # as training does
        noise = torch.randn(drafter.lm_head.weight.shape, generator=generator)
        drafter.lm_head.weight += 0.1 * noise
    mask = torch.arange(TOKENS) >= PROMPT
    samples = []
    for number in range(count):
        ids = torch.randint(0, drafter.config.vocab_size, (TOKENS,), generator=generator)
        aux = torch.randn(TOKENS, 3 * drafter.config.hidden_size, generator=generator)
        for last in range(PROMPT + number % 4, TOKENS - 4, 4):
            for k in range(3):
                found = teacher_forced(drafter, ids.tolist(), mask.int().tolist(), aux, 3)
                ids[last + 1 + k] = found[k, last - 1]
        samples.append((ids, mask, aux))
    return drafter, lm_head, Reader(samples)


def ours(drafter: Drafter, reader: Reader) -> list[list[int]]:
    answers = [Answer(prompt=n, number=n, histogram=[0] * 4) for n in range(len(reader))]
    return replay(reader, answers, lambda *x: sample_histograms(drafter, *x))  # type: ignore[arg-type]


OPTIONS = {"norm_before_fc": True, "norm_output": True, "rope_theta": 500.0}
NAMES = [c.name for c in known_causes(*tiny_drafter(torch.float32, **OPTIONS))]


@pytest.mark.parametrize("name", NAMES)
def test_each_fault_is_recognised_and_leaves_the_drafter_as_it_was(name: str) -> None:
    drafter, lm_head, reader = made(OPTIONS)
    before = copy.deepcopy(drafter.state_dict())
    plain = ours(drafter, reader)
    assert acceptance(plain).step0 > 0.5
    causes = known_causes(drafter, lm_head)
    (cause,) = (c for c in causes if c.name == name)
    live = []
    for ids, mask, aux in reader.samples:
        live += cause.histograms(drafter, ids.tolist(), mask.int().tolist(), aux, 3)
    assert distance(live, plain) > 0, "this fault changes nothing here: the test proves nothing"
    answers = [Answer(prompt=n, number=n, histogram=h) for n, h in enumerate(live)]
    rows = diagnose(reader, answers, drafter, causes)  # type: ignore[arg-type]
    assert rows[0]["distance"] == 0 and name in [r["cause"] for r in rows if r["distance"] == 0]
    assert ours(drafter, reader) == plain and drafter.config.rope_theta == 500.0
    assert all(torch.equal(x, before[k]) for k, x in drafter.state_dict().items())


def test_causes_are_tried_on_answers_from_all_over(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(parity, "replay", lambda _, some, __: tried.extend(a.number for a in some))
    monkeypatch.setattr(parity, "distance", lambda *_: 0.0)
    monkeypatch.setattr(parity, "acceptance", lambda _: acceptance([[1, 1]]))
    for count, expected in ((3, [0, 1, 2]), (64, list(range(64))), (200, list(range(0, 200, 4)))):
        tried.clear()
        answers = [Answer(prompt=n, number=n, histogram=[1, 1]) for n in range(count)]
        rows = diagnose(None, answers, None, [])  # type: ignore[arg-type]
        assert tried == expected and [row["cause"] for row in rows] == ["no fault"]


def test_fc_norm_left_out_is_recognised() -> None:
    drafter, lm_head, reader = made({"fc_norm": True})
    (cause,) = (c for c in known_causes(drafter, lm_head) if c.name == "fc_norm left out")
    ids, mask, aux = reader.samples[0]
    found = cause.histograms(drafter, ids.tolist(), mask.int().tolist(), aux, 3)
    assert found != ours(drafter, reader)[:1] and drafter.fc_norm is not None


def test_without_a_fault_histograms_are_ours() -> None:
    drafter, _, reader = made({})
    ids, mask, aux = reader.samples[0]
    found = NONE.histograms(drafter, ids.tolist(), mask.int().tolist(), aux, 3)
    assert found == ours(drafter, reader)[:1]


def test_answers_are_matched_by_their_tokens() -> None:
    _, _, reader = made({}, count=2)
    ids = reader.samples[1][0].tolist()
    row = {"input_ids": ids[:PROMPT], "output_ids": ids[PROMPT:], "histogram": [1, 2]}
    other = {**row, "output_ids": ids[PROMPT:-1]}
    longer_prompt = {**row, "input_ids": ids[: PROMPT + 1], "output_ids": ids[PROMPT + 1 :]}
    lines = [json.dumps(x) for x in (row, row, other, longer_prompt)]
    found, missing = matched(lines, reader)  # type: ignore[arg-type]
    assert found == [Answer(prompt=0, number=1, histogram=[1, 2])] * 2 and missing == 2


def test_answers_to_one_prompt_are_no_independent_requests() -> None:
    """The same answers at four concurrencies: the figures and intervals of one."""
    rng = np.random.default_rng(0)
    once = [Answer(prompt=n, number=n, histogram=rng.integers(0, 9, 4).tolist()) for n in range(9)]
    expected = acceptance([answer.histogram for answer in once])
    four = once * 4
    found = acceptance(by_prompt(four, [answer.histogram for answer in four]))
    assert found.step0 == expected.step0 and found.verify_steps == 4 * expected.verify_steps
    assert found.step0_ci95 == pytest.approx(expected.step0_ci95)
    assert found.accept_length_ci95 == pytest.approx(expected.accept_length_ci95)


def test_distance_is_a_share_of_the_verify_steps() -> None:
    assert distance([[3, 1]], [[3, 1]]) == 0
    assert distance([[4, 0]], [[0, 4]]) == 1
    assert distance([[4, 0], [4, 0]], [[4, 0], [2, 2]]) == 0.25
    # one step of each answer is spared: two moved of the second, none of the first
    assert distance([[4, 0], [4, 0]], [[4, 0], [2, 2]], spared=1) == 0.125
    # answers of two steps whose last one accepted a draft beyond the end
    assert distance([[1, 1]] * 9, [[2, 0]] * 9, spared=1) == 0


def test_few_prompts_do_not_hide_a_fault() -> None:
    live = [[30, 5, 5, 60], [70, 10, 5, 15], [50, 10, 10, 30]]
    assert parity.agrees(acceptance(live), acceptance(live), 0.0)
    # the intervals reach over half the range, but one step in six was counted differently
    ours = [[35, 10, 10, 45], [60, 10, 5, 25], [60, 20, 10, 10]]
    there, here = acceptance(live), acceptance(ours)
    assert there.step0_ci95[0] < here.step0 < there.step0_ci95[1]
    assert there.accept_length_ci95[0] < here.accept_length < there.accept_length_ci95[1]
    assert not parity.agrees(there, here, distance(live, ours, spared=1))
    assert not parity.agrees(there, acceptance([[0, 0, 0, 9]]), 0.0)


def test_the_summary_names_the_cause_only_if_it_explains_much() -> None:
    figures = {
        "step0": 0.5, "step0_ci95": [0.45, 0.55], "accept_length": 1.8,
        "accept_length_ci95": [1.7, 1.9],
    }  # fmt: skip
    result: dict[str, Any] = {
        "answers": 9, "live": figures, "offline": {"step0": 0.8, "accept_length": 2.5},
        "identical_histograms": 0.1, "distance": 0.4, "not_captured": 1, "agrees": False,
        "causes": [
            {"cause": "norm left out", "remedy": "use a newer one", "distance": 0.05},
            {"cause": "no fault", "remedy": "", "distance": 0.4},
        ],
    }  # fmt: skip
    assert "as with this fault: norm left out. use a newer one." in summary(result)
    assert "1 answers were not captured" in summary(result)
    result["causes"][0]["distance"] = 0.3
    assert "no known cause explains it" in summary(result)
    # on the answers where it was tried the two hardly differ anyway
    result["causes"][0]["distance"], result["causes"][1]["distance"] = 0.15, 0.16
    assert "no known cause explains it" in summary(result)
    result["causes"].reverse()
    result["causes"][0]["distance"] = 0.1
    assert "no known cause explains it" in summary(result)
    assert "drafts what was trained" in summary({**result, "agrees": True})
    assert parity.DIAGNOSED > 0
