"""First differences looked up on a real server, against Hugging Face's probabilities."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle3.serving.client import Answer
from eagle3.target import Target
from eval.benchmarks import Prompt
from eval.differences import differences
from eval.measure import Run
from tests.integration.conftest import CaptureServer

pytestmark = pytest.mark.server


def run(outputs: list[list[int]]) -> Run:
    answers = [Answer(output_ids=ids, finish="stop", latency_s=1.0) for ids in outputs]
    return Run(answers=answers, seconds=1.0, concurrency=1)


def test_margins_are_the_targets(capture_server: CaptureServer, target: Target) -> None:
    prompts = [Prompt(id=str(n), input_ids=[5, 6, 7 + n]) for n in range(4)]
    plain = run([[10, 11, 12], [10, 11], [20, 21, 22, 23], [30]])
    other = run([[10, 40, 12], [10, 11], [20, 21, 22, 50], [30, 31]])
    found = differences(capture_server.server.client, prompts, plain, other)
    model = AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.float32).eval()
    expected = []
    for prefix, a, b in (([5, 6, 7, 10], 11, 40), ([5, 6, 9, 20, 21, 22], 23, 50)):
        with torch.no_grad():
            logits = model(torch.tensor([prefix])).logits[0, -1]
        expected.append(abs(float(logits[a] - logits[b])))
    assert (found.outputs, found.ended) == (3, 1)
    assert found.margin_max == pytest.approx(max(expected), abs=1e-3)
    assert found.margin_median == pytest.approx(sum(expected) / 2, abs=1e-3)


def test_nothing_is_asked_where_outputs_are_the_same(capture_server: CaptureServer) -> None:
    same = run([[1, 2, 3]])
    found = differences(
        capture_server.server.client, [Prompt(id="0", input_ids=[5])], same, run([[1, 2, 3]])
    )
    assert found.as_dict() == dict(outputs=0, ended=0, margin_median=None, margin_max=None)
