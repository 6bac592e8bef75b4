"""Real DeepSpeed engines on real ranks (gloo), through the command, on a small real store."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3.manifest import Manifest
from eagle3.store.sample import Sample
from eagle3.store.writer import StoreWriter
from eagle3.target import Target

ROOT = Path(__file__).resolve().parents[2]
AUX = [1, 3, 4]
FIXED = [
    "experiment=ci", "logger=jsonl", "train.epochs=null", "train.tokens_per_batch=320",
    "train.log_every=1", "train.validate_every=100", "train.ttt_steps=3", "draft.vocab_size=256",
    "train.keep_checkpoints=20",
]  # fmt: skip


@pytest.fixture(scope="module")
def store_run(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """runs_dir with a store of 30 ragged samples, some with nothing supervised."""
    from transformers import AutoModelForCausalLM

    runs = tmp_path_factory.mktemp("runs")
    model = AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.float32).eval()
    match = {
        "codec": "fp32", "target": target.identity(), "aux_layers": AUX, "final": "post-norm",
    }  # fmt: skip
    writer = StoreWriter(runs / "ci" / "store", Manifest(kind="store", match=match), 1 << 20)
    rng = random.Random(0)
    for number in range(30):
        length = rng.choice([2, 3, 17, 60, 127, 128, 129, 200])
        ids = torch.tensor([rng.randrange(3, 400) for _ in range(length)])
        prompt = length if number % 7 == 0 else rng.randrange(1, length)
        with torch.no_grad():
            states = model(ids[None], output_hidden_states=True).hidden_states
        writer.append(
            number,
            Sample(
                id=str(number),
                input_ids=ids,
                loss_mask=torch.arange(length) >= prompt,
                aux=torch.cat([states[k][0] for k in AUX], dim=-1),
                final=states[-1][0],
            ).encode(writer.codec),
        )
    writer.finish({})
    return runs


def command(runs: Path, folder: str, *overrides: str, ranks: int = 1) -> list[str]:
    launcher = [sys.executable, "-m"]
    if ranks > 1:
        launcher += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    places = [f"runs_dir={runs}", f"train_dir={runs}/{folder}"]
    return [*launcher, "training.train", *FIXED, *places, *overrides]


ENV = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def train(runs: Path, folder: str, *overrides: str, ranks: int = 1) -> Path:
    done = subprocess.run(
        command(runs, folder, *overrides, ranks=ranks),
        cwd=ROOT, env=ENV, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return runs / folder


def final_state(folder: Path, step: int, kind: str = "drafter") -> dict[str, torch.Tensor]:
    return load_file(folder / f"step-{step:08d}" / f"{kind}.safetensors")


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("stage", ["zero0", "zero1", "zero2"])
def test_two_ranks_take_the_steps_of_one(store_run: Path, stage: str) -> None:
    """The same tokens a step, split over ranks or accumulation: the same weights after 4 steps."""
    exact = ["deepspeed=" + stage, "deepspeed.bf16.enabled=false", "train.max_steps=4"]
    one = train(store_run, f"{stage}-one", *exact, "train.accumulation=2")
    two = train(store_run, f"{stage}-two", *exact, ranks=2)
    for kind in ("drafter", "exp_avg"):
        first, second = final_state(one, 4, kind), final_state(two, 4, kind)
        assert first.keys() == second.keys()
        for name, tensor in first.items():
            scale = tensor.abs().max()
            assert (tensor - second[name]).abs().max() < 2e-4 * scale, (kind, name)
    for a, b in zip(metrics(one), metrics(two), strict=True):
        for key in ("train/loss", "train/acceptance_0"):
            if key in a:
                assert a[key] == pytest.approx(b[key], rel=1e-3), key
                assert a["train/acceptance_0"] <= 1


@pytest.mark.parametrize("stage", ["zero1", "zero2"])
def test_bf16_ranks_train_and_resume(store_run: Path, stage: str) -> None:
    settings = [f"deepspeed={stage}", "train.max_steps=6", "train.save_every=3"]
    whole = train(store_run, f"bf16-{stage}", *settings, ranks=2)
    losses = [x["train/loss"] for x in metrics(whole) if "train/loss" in x]
    assert losses[-1] < losses[0]
    # on one rank, from the middle: the same tokens a step
    part = store_run / f"bf16-{stage}-part"
    part.mkdir()
    for name in ("manifest.json", "metrics.jsonl", "step-00000003"):
        subprocess.run(["cp", "-r", whole / name, part], check=True)
    train(store_run, part.name, *settings, "train.accumulation=2")
    for name, tensor in final_state(whole, 6).items():
        found = final_state(part, 6)[name]
        assert (tensor - found).norm() < 0.02 * tensor.norm() + 1e-6, name


def test_killed_at_any_moment_it_ends_with_the_same_weights(store_run: Path) -> None:
    """SIGKILL at random moments, on one CPU rank: bitwise the same weights, moments and losses."""
    settings = ["train.max_steps=12", "train.save_every=2"]
    whole = train(store_run, "whole", *settings)
    rng = random.Random(5)
    killed = 0
    for _ in range(3):
        process = subprocess.Popen(
            command(store_run, "chaos", *settings), cwd=ROOT, env=ENV, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 120
        before = len(list((store_run / "chaos").glob("step-*")))
        while process.poll() is None and time.monotonic() < deadline:
            if len(list((store_run / "chaos").glob("step-*"))) > before:
                break
            time.sleep(0.01)
        time.sleep(rng.random() * 0.5)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            killed += 1
        process.wait()
    again = train(store_run, "chaos", *settings)
    assert killed >= 1
    for kind in ("drafter", "exp_avg", "exp_avg_sq"):
        expected, found = final_state(whole, 12, kind), final_state(again, 12, kind)
        for name, tensor in expected.items():
            assert torch.equal(tensor, found[name]), (kind, name)
    timings = ("train/tokens_per_s", "train/data_wait", "train/memory_gb")
    kept = [
        [{k: v for k, v in x.items() if k not in timings} for x in metrics(f)]
        for f in (whole, again)
    ]
    assert kept[0] == kept[1]


def test_frozen_embeddings_and_a_complete_run_are_left_alone(store_run: Path) -> None:
    folder = train(store_run, "done", "train.max_steps=2")
    stamp = (folder / "step-00000002" / "drafter.safetensors").stat().st_mtime_ns
    assert "embed_tokens.weight" not in final_state(folder, 2)
    train(store_run, "done", "train.max_steps=2")
    assert (folder / "step-00000002" / "drafter.safetensors").stat().st_mtime_ns == stamp


def test_training_goes_on_from_an_exported_drafter(store_run: Path, target: Target) -> None:
    """Its vocabulary stays, although this store would give another; one small step moves little."""
    from eagle3 import export
    from tests.unit.test_export import target_drafter

    folder = store_run / "theirs"
    drafter = target_drafter(target)
    export.save_sglang(
        drafter, folder, target, AUX, torch.float32, Manifest(kind="drafter", match={})
    )
    settings = [f"train.init_from={folder}", "train.max_steps=1", "optimizer.lr=1e-6"]
    trained = final_state(train(store_run, "tuned", *settings), 1)
    for name, tensor in trained.items():
        assert (tensor - drafter.state_dict()[name]).abs().max() < 1e-5, name
