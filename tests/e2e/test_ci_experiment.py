"""What the ci experiment must achieve: floors that a random or misaligned drafter fails."""

from __future__ import annotations

import json

import pytest
import torch

from eagle3 import export
from eagle3.config import Config
from eagle3.target import Target
from eagle3.walk import sample_histograms
from extraction.capture import default_spools
from tests.e2e.conftest import Run, make

pytestmark = pytest.mark.server


def results(run: Run) -> dict:
    return json.loads((run.folder / "eval" / "results.json").read_text())


def test_every_stage_leaves_a_manifest_with_its_inputs(ci_run: Run) -> None:
    for folder, kind in (
        ("responses", "responses"), ("store", "store"), ("train", "checkpoints"),
        ("drafter", "drafter"), ("eval", "eval"),
    ):  # fmt: skip
        manifest = json.loads((ci_run.folder / folder / "manifest.json").read_text())
        assert manifest["kind"] == kind and manifest["config"]["run_name"] == "ci"
        assert manifest["versions"]["sglang"] != "not installed"


def test_live_acceptance_is_far_above_chance_and_a_bigram(ci_run: Run) -> None:
    found = results(ci_run)
    assert found["step0_acceptance"]["value"] > 0.45
    assert found["step0_acceptance"]["value"] > found["bigram"]["step0_acceptance"] + 0.05
    assert found["accept_length"] > found["bigram"]["accept_length"] + 0.2
    marginal = found["acceptance_per_step"]
    assert marginal == sorted(marginal, reverse=True) and len(marginal) == 3


def test_greedy_outputs_are_identical_with_and_without_the_drafter(ci_run: Run) -> None:
    assert results(ci_run)["identical_outputs"] == 1.0


def test_latencies_were_measured_on_both_servers(ci_run: Run) -> None:
    found = results(ci_run)
    for side in ("plain", "speculative"):
        first, late, between = (found[k][side] for k in ("ttft_ms", "ttft_p95_ms", "itl_ms"))
        assert 0 < first <= late and between > 0
        # one request at a time: its tokens take what lies between them
        assert 500 < found["tok_s_per_request"][side] * between < 1100


def test_offline_prediction_is_near_the_live_figure(ci_run: Run) -> None:
    found = results(ci_run)
    live, predicted = found["step0_acceptance"], found["offline"]
    slack = (
        live["ci95"][1] - live["ci95"][0] + predicted["step0_ci95"][1] - predicted["step0_ci95"][0]
    ) / 2
    assert abs(live["value"] - found["offline_step0_acceptance"]) < slack
    assert "offline prediction" in ci_run.output["eval"]


@torch.no_grad()
def test_live_histograms_are_those_of_our_own_drafter(ci_run: Run, target: Target) -> None:
    """Replays every answer with Hugging Face states: the same drafts accepted at the same steps."""
    from transformers import AutoModelForCausalLM

    drafter, aux_layers = export.load_sglang(ci_run.folder / "drafter", target)
    model = AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.float32).eval()
    lines = (ci_run.folder / "eval" / "outputs.jsonl").read_text().splitlines()
    ended = 0
    for row in map(json.loads, lines):
        ids = row["input_ids"] + row["output_ids"]
        mask = [0] * len(row["input_ids"]) + [1] * len(row["output_ids"])
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        aux = torch.cat([states[k][0] for k in aux_layers], dim=-1)
        (ours,) = sample_histograms(drafter, ids, mask, aux, len(row["histogram"]) - 1)
        if row["output_ids"][-1] in target.eos_ids:
            assert ours == row["histogram"], row["id"]
            ended += 1
        else:  # cut off by length: the server's last step may accept drafts beyond the cut
            moved = sum(abs(a - b) for a, b in zip(ours, row["histogram"], strict=True))
            assert moved <= 2, (row["id"], ours, row["histogram"])
    assert ended >= len(lines) // 2


def test_parity_on_the_real_server(ci_run: Run) -> None:
    """The states that the server captured of its own answers give the histograms it reported."""
    done = make("parity", f"runs_dir={ci_run.folder.parent}")
    assert "the server drafts what was trained" in done.stdout
    found = json.loads((ci_run.folder / "eval" / "parity.json").read_text())
    assert found["agrees"] and found["not_captured"] == 0
    assert found["distance"] < 0.03  # the last steps of answers cut off by length
    assert found["identical_histograms"] > 0.5
    # a server that does not know norm_output would have had other histograms
    config = ci_run.folder / "drafter" / "config.json"
    before = config.read_text()
    config.write_text(before.replace('"norm_output": true', '"norm_output": false'))
    try:
        changed = make("parity", f"runs_dir={ci_run.folder.parent}", check=False)
    finally:
        config.write_text(before)
    assert changed.returncode != 0
    assert "it drafts as with this fault: norm_output the other way round" in changed.stdout


def test_training_simulated_what_the_offline_evaluation_finds(ci_run: Run) -> None:
    """The last validation and `eval` replay the same drafter on the same samples."""
    text = (ci_run.folder / "train" / "metrics.jsonl").read_text()
    last = [x for x in map(json.loads, text.splitlines()) if "validation/loss" in x][-1]
    offline = results(ci_run)["offline"]
    assert last["validation/simulated_accept_length"] == pytest.approx(offline["accept_length"])
    assert [last[f"validation/simulated_acceptance_{k}"] for k in range(3)] == pytest.approx(
        offline["marginal"]
    )


def test_training_learned_and_logged(ci_run: Run) -> None:
    lines = [
        json.loads(x) for x in (ci_run.folder / "train" / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [x["train/loss"] for x in lines if "train/loss" in x]
    assert losses[-1] < 0.7 * losses[0]
    steps = [x["step"] for x in lines if "train/loss" in x]
    assert steps == sorted(set(steps))
    last = [x for x in lines if "validation/accept_length" in x][-1]
    assert last["validation/acceptance_0"] <= 1 and last["validation/accept_length"] > 1.5
    assert any("train/tokens_per_s" in x for x in lines)
    assert list((ci_run.folder / "train" / "wandb").glob("offline-run-*"))


def test_the_report_shows_the_figures_and_plots(ci_run: Run) -> None:
    text = (ci_run.folder / "eval" / "report.md").read_text()
    assert f"{results(ci_run)['step0_acceptance']['value']:.1%}" in text
    for plot in ("acceptance", "speed", "learning"):
        assert (ci_run.folder / "eval" / f"{plot}.png").stat().st_size > 5000
    assert "peak memory" in text


def test_tune_measures_each_setting_and_gives_a_command(ci_run: Run) -> None:
    """Two chains and a tree; a tree of one step has three tokens and is left out."""
    arguments = f"runs_dir={ci_run.folder.parent} tune.num_steps=[1,2]"
    arguments += " tune.topk=[1,2] tune.draft_tokens=[5]"
    done = make("tune", arguments)
    found = json.loads((ci_run.folder / "eval" / "tune.json").read_text())
    plain, *others = found["rows"]
    assert plain["benchmark"] == "gsm" and plain["speculation"] is plain["accept_length"] is None
    assert [list(row["speculation"].values()) for row in others] == [
        [1, 1, 2],
        [2, 1, 3],
        [2, 2, 5],
    ]
    one, two, tree = (row["accept_length"] for row in others)
    assert 1.45 < one < 2 and one < two < tree < 3  # of at most two drafts, and the target's token
    assert {row["identical"] for row in found["rows"]} == {1.0}  # the answers are the target's own
    for server in found["servers"][1:]:
        assert " -m sglang.launch_server " in server["command"]
        assert f"--speculative-draft-model-path {ci_run.folder / 'drafter'} " in server["command"]
    text = (ci_run.folder / "eval" / "tune.md").read_text()
    choice = found["best"]["1"]["command"] or "plain serving is fastest"
    assert choice in text and choice in done.stdout and "against plain" in done.stdout
    again = make("tune", arguments)
    assert again.stderr.count("is measured already") == 4 and "starting" not in again.stderr
    other = make("tune", f"{arguments} eval.max_new_tokens=64", check=False)
    assert other.returncode == 2 and "max_new_tokens" in other.stderr


def test_the_spool_is_gone_and_stages_are_no_ops_when_done(ci_run: Run) -> None:
    config = Config(run_name="ci", runs_dir=str(ci_run.folder.parent))
    assert not any(spool.exists() for spool in default_spools(config))
    before = (ci_run.folder / "store" / "shard-00000.safetensors").stat().st_mtime_ns
    runs = ci_run.folder.parent
    again = make("extract", f"runs_dir={runs}")
    assert "is complete" in again.stderr
    assert (ci_run.folder / "store" / "shard-00000.safetensors").stat().st_mtime_ns == before


def test_other_settings_do_not_mix_into_a_finished_run(ci_run: Run) -> None:
    runs = ci_run.folder.parent
    for stage, override, key in (
        ("extract", "codec=bf16", "codec"),
        ("train", "draft.vocab_size=512", "draft"),
        ("respond", "respond.temperature=0.5", "sampling"),
        ("train", "target.aux_layers=[1,2,3]", "aux_layers"),
    ):
        done = make(stage, f"runs_dir={runs} {override}", check=False)
        assert done.returncode == 2 and key in done.stderr, done.stderr[-2000:]


def test_sweep_gives_each_job_its_own_folder_in_one_wandb_group(ci_run: Run) -> None:
    runs = ci_run.folder.parent
    make("sweep", f"runs_dir={runs} optimizer.lr=1e-3,3e-3 train.epochs=null train.max_steps=3")
    folders = sorted((ci_run.folder / "sweep").iterdir())
    assert [f.name for f in folders] == ["0", "1"]
    rates = []
    for folder in folders:
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["facts"]["steps"] == 3
        rates.append(manifest["config"]["optimizer"]["lr"])
        assert list((folder / "wandb").glob("offline-run-*"))
        assert manifest["config"]["logger"]["group"] is None  # the group is the run's name
    assert rates == [1e-3, 3e-3]
