import json
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3 import attention
from eagle3 import walk as walks
from eagle3.config import BenchmarkConfig, Config
from eagle3.errors import UserError
from eagle3.manifest import Manifest
from eagle3.serving.client import Answer
from eagle3.target import Target
from eagle3.walk import generated_spans, marginals, sample_histograms, walk
from eval import benchmarks, held_out, live, offline
from eval.baseline import Bigram
from eval.benchmarks import Prompt
from eval.differences import first_difference
from eval.measure import Run
from eval.stats import acceptance
from tests.chain_drafter import ChainDrafter
from tests.conftest import make_batch, tiny_drafter


def test_figures_of_a_hand_made_histogram() -> None:
    # ten verify steps of three drafts: 4 rejected at once, 3 with one, 2 with two, 1 with all three
    found = acceptance([[4, 3, 2, 1]])
    assert found.marginal == pytest.approx([0.6, 0.3, 0.1])
    assert found.step0 == pytest.approx(0.6)
    assert found.conditional == pytest.approx([0.6, 0.5, 1 / 3])
    assert found.accept_length == pytest.approx(2.0)  # (4*1 + 3*2 + 2*3 + 1*4) / 10 tokens a step
    assert found.verify_steps == 10


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(100):
        rates = rng.beta(6, 4, size=60)  # requests differ: mean 0.6
        table = [np.bincount(rng.random(20) < r, minlength=2).tolist() for r in rates]
        low, high = acceptance(table, seed=trial).step0_ci95
        hits += low <= 0.6 <= high
    assert 85 <= hits <= 100


def test_no_verify_step_gives_zero_not_nan() -> None:
    assert marginals(np.zeros(4, dtype=int)).tolist() == [0, 0, 0]
    assert acceptance([[0, 0]]).accept_length == 1.0


def test_one_request_leaves_everything_open() -> None:
    found = acceptance([[4, 3, 2, 1]])
    assert found.step0_ci95 == [0.0, 1.0] and found.accept_length_ci95 == [1.0, 4.0]


def test_spans() -> None:
    assert generated_spans([0, 1, 1, 0, 1]) == [(1, 3), (4, 5)]
    assert generated_spans([0, 0]) == [] and generated_spans([1]) == [(0, 1)]


def test_walk_of_a_perfect_drafter() -> None:
    tokens = list(range(10))
    found = walk(tokens, (2, 10), lambda last, k: list(range(last + 1, last + 1 + k)), 3)
    # 2 is known; 3 4 5 +6; 7 8 9 and the answer ends
    assert found == [0, 0, 0, 2]


def test_walk_counts_drafts_beyond_the_end_as_rejected() -> None:
    tokens = [0, 1, 2]
    found = walk(tokens, (0, 3), lambda last, k: [last + 1 + i for i in range(k)], 4)
    assert found == [0, 0, 1, 0, 0]


def test_walk_stops_at_the_first_wrong_draft() -> None:
    tokens = [0, 1, 2, 3, 4]
    found = walk(tokens, (0, 5), lambda last, k: [last + 1, -1, last + 3], 3)
    assert found == [0, 2, 0, 0]


def test_bigram_drafts_the_most_frequent_follower() -> None:
    bigram = Bigram([[1, 2, 3], [1, 2, 4], [2, 3, 1]])
    assert bigram.draft(1, 3) == [2, 3, 1]
    assert bigram.draft(9, 2) == [-1, -1]
    assert bigram.histogram([1, 2, 3], 2) == [0, 0, 1]


@pytest.mark.parametrize(
    "shape", [{}, {"num_layers": 2}, {"norm_before_fc": True, "norm_output": True}], ids=str
)
def test_offline_histogram_equals_a_walk_with_a_fresh_cache_every_time(
    shape: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walks, "ROWS", 5)
    monkeypatch.setattr(attention, "MOST_ROWS", 4)
    drafter, _ = tiny_drafter(**shape)
    mask = [0, 0, 0] + [1] * 12 + [0, 0] + [1] * 6 + [0] + [1]
    batch = make_batch([mask], drafter.config)
    tokens = batch.input_ids.tolist()

    def fresh(last: int, steps: int) -> list[int]:
        chain = ChainDrafter(drafter)
        chain.extend(batch.aux[:last], batch.input_ids[1 : last + 1])
        return chain.draft(steps)

    # make chains of 0 to 3 drafts come true
    for last, count in ((3, 2), (6, 3), (10, 1), (17, 3)):
        tokens[last + 1 : last + 1 + count] = fresh(last, count)
        batch.input_ids = torch.tensor(tokens)
    found = sample_histograms(drafter, tokens, mask, batch.aux, 3)
    assert found == [walk(tokens, span, fresh, 3) for span in generated_spans(mask)]
    assert all(sum(spans[k] for spans in found) >= 1 for k in range(4)), found


def test_the_turns_of_a_held_out_conversation_count_as_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty turns that are all alike are no forty independent ones."""
    turns = {0: [[9, 1]] * 40, 1: [[1, 9]] * 40}

    class Reader:
        manifest = Manifest(kind="store", match={})

        def __init__(self, _: Path) -> None: ...

        def tokens(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.tensor([number]), torch.tensor([1])

        def states(self, number: int) -> tuple[torch.Tensor, None]:
            return torch.zeros(1, 3), None

    drafter = Manifest(
        kind="drafter", match={"target": {}}, inputs={"store": Reader.manifest.hash()},
        facts={"validation_samples": [0, 1]},
    )  # fmt: skip
    monkeypatch.setattr(offline.Target, "from_config", lambda _: None)
    monkeypatch.setattr(offline.formats, "load_sglang", lambda *_: (None, [1]))
    monkeypatch.setattr(offline.Manifest, "load", lambda *_: drafter)
    monkeypatch.setattr(offline, "StoreReader", Reader)
    monkeypatch.setattr(offline, "sample_histograms", lambda _, ids, *__: turns[ids[0]])
    config = Config(run_name="x", runs_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"no store in .*eval\.offline=false"):
        offline.offline(config)
    config.store_dir.mkdir(parents=True)
    found = offline.offline(config)
    assert found["step0"] == pytest.approx(0.5) and found["verify_steps"] == 800
    assert found["step0_ci95"] == pytest.approx([0.1, 0.9])


def test_report_is_written_from_results_alone(tmp_path: Path) -> None:
    from eval import report

    figures = {
        "step0_acceptance": {"value": 0.5, "ci95": [0.4, 0.6]}, "acceptance_per_step": [0.5, 0.2],
        "accept_length": 1.7, "tok_s": {"plain": 10.0, "speculative": 15.0}, "speedup": 1.5,
        "identical_outputs": 0.5, "ttft_ms": {"plain": 10.0, "speculative": 12.0},
        "ttft_p95_ms": {"plain": 20.0, "speculative": 22.0},
        "itl_ms": {"plain": 5.0, "speculative": None},
        "retries": {"plain": 2, "speculative": 0},
        "differences": dict(outputs=3, ended=1, margin_median=0.01, margin_max=0.0625),
    }  # fmt: skip
    results = {
        **figures, "offline_step0_acceptance": None, "offline": None,
        "benchmarks": {"gsm": {"1": figures}}, "versions": {}, "machine": {}, "git_commit": "x",
        "settings": {}, "prompts_in_training": {"gsm": 2},
        "server_starts": {
            "plain": {"9:00": ["gsm x1"]}, "speculative": {"9:05": ["gsm x1"], "10:00": ["gsm x8"]}
        },
    }  # fmt: skip
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "results.json").write_text(json.dumps(results))
    text = report.write(tmp_path, tmp_path / "train").read_text()
    assert "| gsm | 1 | 50.0% | 40.0% to 60.0% | 1.70 |  | 10.0 | 15.0 | 1.50x | 50.0% |" in text
    assert "| gsm | 1 | 10.0 | 12.0 | 20.0 | 22.0 | 5.0 |  |" in text
    assert "3 outputs differ; where they part, the target has the two tokens at most 0.062" in text
    assert "2 prompts of gsm are in the drafter's training data" in text
    assert "2 prompts of gsm are in the drafter's training data" in report.summary(results)
    assert "training data" not in report.summary({**results, "prompts_in_training": None})
    told = "gsm x1: 2 requests to the plain server failed and were made again"
    assert told in text and told in report.summary(results) and "to the speculative" not in text
    told = "runs come from 2 starts of the speculative server: gsm x1 at 9:05; gsm x8 at 10:00"
    assert told in text and told in report.summary(results) and "of the plain server" not in text
    predicted = report.summary({**results, "offline_step0_acceptance": 0.25})
    assert "live 50.0% on gsm, offline prediction 25.0%" in predicted
    plots = {"acceptance.png", "speed.png"}
    assert {p.name for p in (tmp_path / "eval").glob("*.png")} == plots
    curve = tmp_path / "sweep" / "3"
    curve.mkdir(parents=True)
    torn = '{"step": 1, "train/acceptance_0": 0.5}\n{"step": 2, "train/acc'
    (curve / "metrics.jsonl").write_text(torn)  # the training was killed
    assert "![learning](learning.png)" in report.write(tmp_path, curve).read_text()
    assert {p.name for p in (tmp_path / "eval").glob("*.png")} == {*plots, "learning.png"}


def test_an_evaluation_made_again_is_logged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wandb goes on with the same run, and ignores steps that it has."""
    logged: list[float] = []

    class Run:
        step = 0

        def log(self, values: dict, step: int | None = None) -> None:
            if step is None or step >= self.step:
                self.step += 1
                logged.append(values["eval/step0"])

        def finish(self) -> None: ...

    run = Run()
    monkeypatch.setattr("wandb.init", lambda **_: run)
    monkeypatch.setattr("wandb.Table", lambda **_: None)
    for value in (0.5, 0.75):
        results = {"benchmarks": {}, "step0_acceptance": {"value": value}}
        live._log_to_wandb(Config(run_name="x", runs_dir=str(tmp_path)), results)
    assert logged == [0.5, 0.75]


def test_where_outputs_part() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == first_difference([1, 2, 3], [1, 2]) == 2


def test_a_benchmark_without_a_usable_prompt_is_a_mistake(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    path.write_text('{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}\n')
    config = Config(run_name="x", benchmark={"mine": BenchmarkConfig(path=str(path))})
    with pytest.raises(UserError, match=r"benchmark\.mine: no usable prompt"):
        benchmarks.load(config, target)


def test_prompts_that_training_saw_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    prompts = {
        "fresh": [Prompt(id="a", input_ids=[1, 2]), Prompt(id="b", input_ids=[1, 2, 3])],
        "known": [Prompt(id="c", input_ids=[4, 5]), Prompt(id="d", input_ids=[4, 5, 6, 7, 8])],
    }
    samples = [
        (torch.tensor(ids), torch.tensor(mask, dtype=torch.bool))
        for ids, mask in (
            ([4, 5, 6, 7, 8, 9], [0, 0, 1, 1, 0, 1]), ([1, 2, 3], [0, 1, 1]), ([1, 2], [0, 0])
        )
    ]  # fmt: skip
    assert held_out.prompts_in(samples, prompts) == {"fresh": 0, "known": 2}
    assert "benchmark known: 2 of 2 prompts are in the drafter's training data" in caplog.text
    assert "fresh" not in caplog.text


def test_the_store_at_hand_must_be_the_drafters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reader:
        manifest = Manifest(kind="store", match={"data": "x"})

        def __init__(self, _: Path) -> None: ...

        def __len__(self) -> int:
            return 2

        def tokens(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.tensor([number, 8, 9]), torch.tensor([False, True, True])

    config = Config(run_name="x", runs_dir=str(tmp_path))
    monkeypatch.setattr(held_out, "StoreReader", Reader)
    assert held_out.trained_on(config) is None
    config.store_dir.mkdir(parents=True)
    drafter = Manifest(
        kind="drafter", match={}, inputs={"store": Reader.manifest.hash()},
        facts={"validation_samples": [0]},
    )  # fmt: skip
    drafter.save(config.drafter_dir)
    samples = held_out.trained_on(config)
    assert samples is not None
    for _ in range(2):
        ((ids, mask),) = samples()
        assert ids.tolist() == [1, 8, 9] and ids[mask].tolist() == [8, 9]
    drafter.inputs["store"] = "another"
    drafter.save(config.drafter_dir)
    assert held_out.trained_on(config) is None


def test_rows_without_a_prompt_are_left_out_and_told(
    target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch
) -> None:
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}hello"
    monkeypatch.setattr(target.tokenizer, "chat_template", strict)
    rows = [
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
        {"input_ids": [1, 2], "loss_mask": [0, 1]},
        {"id": "kept", "prompt": "What is 2 + 2?"},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config(run_name="x", benchmark={"mine": BenchmarkConfig(path=str(path))})
    (prompt,) = benchmarks.load(config, target)["mine"]
    assert prompt.id == "kept"
    assert "chat template rejects the conversation': 1" in caplog.text
    assert "tokens in place of messages': 1" in caplog.text


def test_latencies_of_streamed_answers() -> None:
    def answer(first_s: float | None, first_tokens: int, tokens: int, latency_s: float) -> Answer:
        return Answer(
            output_ids=[7] * tokens, finish="stop", latency_s=latency_s, first_s=first_s,
            first_tokens=first_tokens,
        )  # fmt: skip

    answers = [answer(0.5, 1, 11, 1.5), answer(0.7, 2, 12, 2.7), answer(0.6, 4, 4, 0.6)]
    run = Run(answers=answers, seconds=3.0, concurrency=1)
    found = run.latencies()
    assert found["ttft_ms"] == pytest.approx(600) and found["ttft_p95_ms"] == pytest.approx(690)
    assert found["itl_ms"] == pytest.approx((100 + 200) / 2)  # the third had all tokens at once
    assert run.speed()["tok_s"] == pytest.approx(9) and run.speed()["retries"] == 0
    answers[1].retries = 2
    assert run.speed()["retries"] == 2
    unknown = Run(answers=[answer(None, 0, 4, 1.0)], seconds=1.0, concurrency=1)
    assert set(unknown.latencies().values()) == {None}
