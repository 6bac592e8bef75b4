"""Real DeepSpeed engines on real ranks (gloo), through the command, on a small real store."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.config import Config
from eagle3.errors import UserError
from eagle3.lock import exclusive
from eagle3.manifest import Manifest
from eagle3.store.reader import StoreReader
from eagle3.store.sample import Encoded, Sample
from eagle3.store.writer import StoreWriter, shard_paths
from eagle3.target import Target
from eagle3.ttt import supervised_rows
from training.data import BatchPlan, Split
from training.meter import TIMED
from training.train import KIND, Trainer
from training.world import World

ROOT = Path(__file__).resolve().parents[2]
AUX = [1, 3, 4]
FIXED = [
    "experiment=ci", "logger=jsonl", "train.epochs=null", "train.tokens_per_batch=320",
    "train.log_every=1", "train.validate_every=100", "train.ttt_steps=3", "draft.vocab_size=256",
    "train.keep_checkpoints=20", "optimizer=adamw", "optimizer.lr=2e-3",
    "draft.norm_before_fc=false", "draft.norm_output=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def store_run(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """runs_dir with a store of 30 ragged samples of three weights, some with nothing supervised."""
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
                weight=(1.0, 0.3, 2.5)[number % 3],
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


def train_all(runs: Path, jobs: dict[str, list[str]], ranks: int, **limits: int) -> None:
    """Several trainings, folder -> overrides, in one start of these ranks.

    limits: folder -> largest file its training may write.
    """
    listed = [
        {
            "overrides": [
                *FIXED, f"runs_dir={runs}", f"train_dir={runs}/{folder}", *overrides
            ],
            "largest_file": limits.get(folder),
        }
        for folder, overrides in jobs.items()
    ]  # fmt: skip
    script = ["tests/integration/several_runs.py", json.dumps(listed)]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [sys.executable, *(launcher if ranks > 1 else []), *script],
        cwd=ROOT, env=ENV, capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]


def errors(folder: Path) -> list[str]:
    """What the ranks told the user."""
    return [f.read_text() for f in sorted(folder.glob("error-*.txt"))]


STAGES = ["zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"]
FLOAT32 = [
    "deepspeed.bf16.enabled=false", "train.max_steps=4", "train.ema=0.9",
    "train.tokens_per_batch=200",
]  # fmt: skip
HALF = ["train.max_steps=6", "train.save_every=3", "train.ema=0.5"]


FULL = ["train.max_steps=3", "train.save_every=1", "deepspeed.bf16.enabled=false"]


def damaged_sample(reader: StoreReader) -> int:
    """The first sample that rank 1 trains on in the third step."""
    split = Split.of(reader, 0.05, seed=0)
    plan = BatchPlan(lengths=reader.lengths, numbers=split.train, tokens_per_batch=320, seed=0)
    return plan.micro_batch(5)[0]


def damaged_run(runs: Path) -> None:
    """A run "nan" whose store is a copy with one value of one sample that is not a number."""
    shutil.copytree(runs / "ci" / "store", runs / "nan" / "store")
    reader = StoreReader(runs / "nan" / "store")
    number = damaged_sample(reader)
    path = shard_paths(reader.folder, int(reader.index[number]["shard"]))[0]
    tensors = load_file(path)
    (name,) = (key for key in tensors if key.startswith("aux."))
    start, rows = reader.index[number]["start"], reader.index[number]["rows"]
    # its last row: no other row of the sample sees it, and it is not supervised itself
    tensors[name][start + rows - 1, 5] = float("nan")
    save_file(tensors, path)


def weighted_run(runs: Path, name: str, factor: float | None) -> None:
    """A run whose store has the same samples with `factor` times their weight; None: all 1."""
    reader = StoreReader(runs / "ci" / "store")
    writer = StoreWriter(runs / name / "store", reader.manifest, 1 << 20)
    for number, id in enumerate(reader.ids):
        weight = factor * float(reader.weights[number]) if factor else 1.0
        writer.append(number, Encoded(id=id, tensors=reader.encoded(number), weight=weight))
    writer.finish({})


@pytest.fixture(scope="module")
def stages(store_run: Path) -> Path:
    """The same trainings on two ranks at every stage, in float32 and in bf16, and on one rank."""
    two = {f"two-{s}": [f"deepspeed={s}", *FLOAT32] for s in STAGES}
    two |= {f"half-{s}": [f"deepspeed={s}", *HALF] for s in STAGES}
    muon = ["optimizer=muon", "deepspeed=zero0"]
    two |= {"two-muon": [*muon, *FLOAT32], "half-muon": [*muon, *HALF]}
    # what must end training on both ranks at once, in the middle of the others
    damaged_run(store_run)
    stop = ["deepspeed=zero2", "train.max_steps=9", "train.save_every=1", "run_name=nan"]
    two = {"damaged": stop, "full": ["deepspeed=zero3", *FULL], **two}
    train_all(store_run, two, ranks=2, full=100_000)
    # the checkpoint of the third step alone, to go on from with one rank and ZeRO 0
    assert not any(errors(store_run / name) for name in two if name not in ("damaged", "full"))
    shutil.copytree(store_run / "full", store_run / "one-full")
    one = {"one": ["deepspeed=zero0", *FLOAT32, "train.accumulation=2"]}
    for name, factor in (("fours", 4.0), ("ones", None)):
        weighted_run(store_run, name, factor)
        one[name + "-trained"] = [*one["one"], f"run_name={name}"]
    one["one-muon"] = [*muon, *FLOAT32, "train.accumulation=2"]
    one["one-full"] = ["deepspeed=zero0", *FULL, "train.accumulation=2"]
    wide = ["+deepspeed.data_types.grad_accum_dtype=fp32", "train.accumulation=2"]
    one["half-wide"] = ["deepspeed=zero1", *HALF, *wide]
    for stage in ("zero0", "zero3", "zero2_offload", "muon"):
        part = store_run / f"half-{stage}-part"
        part.mkdir()
        for name in ("manifest.json", "metrics.jsonl", "step-00000003"):
            subprocess.run(["cp", "-r", store_run / f"half-{stage}" / name, part], check=True)
        group = muon if stage == "muon" else ["deepspeed=zero0"]
        one[part.name] = [*group, *HALF, "train.accumulation=2"]
    train_all(store_run, one, ranks=1)
    return store_run


def test_a_sample_that_is_not_finite_ends_training_on_every_rank(stages: Path) -> None:
    """Both ranks name the sample; no checkpoint came after a step with it, none holds a NaN."""
    folder = stages / "damaged"
    told = errors(folder)
    assert len(told) == 2 and told[0] == told[1]
    number = damaged_sample(StoreReader(stages / "nan" / "store"))
    assert f"{number} (number {number})" in told[0] and "extraction.verify" in told[0]
    saved = sorted(f.name for f in folder.glob("step-*"))
    assert saved == ["step-00000001", "step-00000002"]
    for tensor in final_state(folder, 2).values():
        assert torch.isfinite(tensor).all()


def test_a_full_disk_ends_training_on_every_rank_and_it_resumes(stages: Path) -> None:
    told = errors(stages / "full")
    assert len(told) == 2 and "could not be written" in told[0] and "bytes" in told[0]
    assert not list((stages / "full").glob(".step-*"))
    assert sorted(f.name for f in (stages / "one-full").glob("step-*"))[-1] == "step-00000003"


def test_each_rank_has_a_batch_with_nothing_supervised(store_run: Path) -> None:
    """What the next test relies on; batches also differ in size."""
    reader = StoreReader(store_run / "ci" / "store")
    split = Split.of(reader, 0.05, seed=0)
    plan = BatchPlan(lengths=reader.lengths, numbers=split.train, tokens_per_batch=200, seed=0)
    counts = [int(supervised_rows(reader.batch(plan.micro_batch(i)), 1)) for i in range(8)]
    assert 0 in counts[0::2] and 0 in counts[1::2] and len(set(counts)) > 4


@pytest.mark.parametrize("stage", [*STAGES, "muon"])
def test_two_ranks_take_the_steps_of_one(stages: Path, stage: str) -> None:
    """The same tokens a step, split over ranks or accumulation: the same weights after 4 steps.

    Equal validation says besides that embeddings and teacher are what they were.
    """
    one, two = stages / ("one-muon" if stage == "muon" else "one"), stages / f"two-{stage}"
    kinds = ["drafter", "exp_avg", "exp_avg_sq", "ema"] + ["momentum_buffer"] * (stage == "muon")
    for kind in kinds:
        first, second = final_state(one, 4, kind), final_state(two, 4, kind)
        assert first.keys() == second.keys()
        for name, tensor in first.items():
            scale = tensor.abs().max()
            assert (tensor - second[name]).abs().max() < 2e-4 * scale, (kind, name)
    for a, b in zip(metrics(one), metrics(two), strict=True):
        compared = a.keys() & {
            "train/loss", "train/acceptance_0", "train/grad_norm", "validation/loss",
            "validation/accept_length", "validation/simulated_accept_length",
        }  # fmt: skip
        assert len(compared) >= 2
        for key in compared:
            assert a[key] == pytest.approx(b[key], rel=1e-3), key


def test_only_ratios_of_weights_count(stages: Path) -> None:
    """Four times as much, a power of two: every bit stays, of moments and metrics as well.

    Where each sample weighs 1, the same samples train another drafter.
    """
    kinds = ["drafter", "exp_avg", "exp_avg_sq", "ema"]
    one, fours, ones = (
        [final_state(stages / folder, 4, kind) for kind in kinds]
        for folder in ("one", "fours-trained", "ones-trained")
    )
    for a, b, c in zip(one, fours, ones, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)
        assert not all(torch.allclose(a[name], c[name], rtol=1e-2) for name in a)
    kept = [
        [{k: v for k, v in x.items() if k not in TIMED} for x in metrics(stages / folder)]
        for folder in ("one", "fours-trained", "ones-trained")
    ]
    assert kept[0] == kept[1]
    # the first step's loss and acceptance count rows, whatever they weigh
    first, plain = kept[0][0], kept[2][0]
    assert all(first[k] == plain[k] for k in ("train/loss", "train/acceptance_0"))


@pytest.mark.parametrize("stage", [*STAGES, "muon"])
def test_bf16_learns_at_every_stage(stages: Path, stage: str) -> None:
    found = stages / f"half-{stage}"
    losses = [x["train/loss"] for x in metrics(found) if "train/loss" in x]
    assert losses[-1] < losses[0]
    master = final_state(found, 6)
    assert all(t.dtype == torch.float32 for t in master.values())
    # masters are not the bf16 weights: small steps add up in them
    assert any((t != t.bfloat16().float()).any() for t in master.values())
    if stage != "muon":
        for name, tensor in final_state(stages / "half-zero1", 6).items():
            assert (tensor - master[name]).norm() < 0.02 * tensor.norm() + 1e-6, name


def test_gradients_accumulate_in_float32_if_asked(stages: Path) -> None:
    """Two micro-batches on one rank, added up in float32: the steps of two ranks."""
    found = metrics(stages / "half-wide")[0]["train/grad_norm"]
    assert found == pytest.approx(metrics(stages / "half-zero1")[0]["train/grad_norm"], rel=0.02)
    for name, tensor in final_state(stages / "half-zero1", 6).items():
        difference = tensor - final_state(stages / "half-wide", 6)[name]
        assert difference.norm() < 0.02 * tensor.norm() + 1e-6, name


@pytest.mark.parametrize("stage", ["zero0", "zero3", "zero2_offload", "muon"])
def test_any_stage_resumes_on_one_rank_with_zero0(stages: Path, stage: str) -> None:
    """From the middle, with the same tokens a step."""
    for kind in ("drafter", "ema"):
        for name, tensor in final_state(stages / f"half-{stage}", 6, kind).items():
            found = final_state(stages / f"half-{stage}-part", 6, kind)[name]
            assert (tensor - found).norm() < 0.02 * tensor.norm() + 1e-6, (kind, name)


def test_killed_at_any_moment_it_ends_with_the_same_weights(store_run: Path) -> None:
    """SIGKILL at random moments, on one CPU rank: bitwise the same weights, states and losses."""
    settings = [
        "train.max_steps=12", "train.save_every=2", "train.ema=0.9", "optimizer=muon",
        "optimizer.lr=1e-3", "optimizer.schedule=wsd", "optimizer.decay_ratio=0.5",
    ]  # fmt: skip
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
    for kind in ("drafter", "exp_avg", "exp_avg_sq", "momentum_buffer", "ema"):
        expected, found = final_state(whole, 12, kind), final_state(again, 12, kind)
        for name, tensor in expected.items():
            assert torch.equal(tensor, found[name]), (kind, name)
    kept = [
        [{k: v for k, v in x.items() if k not in TIMED} for x in metrics(f)] for f in (whole, again)
    ]
    assert kept[0] == kept[1]


def test_the_average_is_exported(stages: Path) -> None:
    from tests.unit.test_config import load
    from training.export import export

    config = load(
        *FIXED, "deepspeed=zero0", *FLOAT32, f"runs_dir={stages}", f"train_dir={stages}/one",
        "export.speculators=false",
    )  # fmt: skip
    folder = export(config)
    exported = load_file(folder / "model.safetensors")
    average = final_state(stages / "one", 4, "ema")
    assert torch.equal(exported["fc.weight"], average["fc.weight"])
    assert not torch.equal(average["fc.weight"], final_state(stages / "one", 4)["fc.weight"])
    assert Manifest.load(folder, "drafter").facts["weights"] == "moving average"


def test_frozen_embeddings_and_a_complete_run_are_left_alone(store_run: Path) -> None:
    folder = train(store_run, "done", "train.max_steps=2")
    stamp = (folder / "step-00000002" / "drafter.safetensors").stat().st_mtime_ns
    assert "embed_tokens.weight" not in final_state(folder, 2)
    train(store_run, "done", "train.max_steps=2")
    assert (folder / "step-00000002" / "drafter.safetensors").stat().st_mtime_ns == stamp


def test_a_folder_is_trained_into_by_one_command(store_run: Path) -> None:
    folder = store_run / "held"
    folder.mkdir()
    with exclusive(folder):
        done = subprocess.run(
            command(store_run, "held", "train.max_steps=1"),
            cwd=ROOT, env=ENV, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 2 and "another process is at work" in done.stderr
    assert list(folder.iterdir()) == []


def test_no_earlier_export_stays_beside_a_new_one(two_steps: Path) -> None:
    from training.export import export

    config = of(two_steps.parent, two_steps.name)
    earlier = config.drafter_dir / "speculators"
    earlier.mkdir(parents=True, exist_ok=True)
    (earlier / "model.safetensors").write_bytes(b"of other weights")
    export(config)
    assert not earlier.exists()


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


@pytest.fixture(scope="module")
def two_steps(store_run: Path) -> Path:
    return train(store_run, "two-steps", "train.max_steps=2", "train.validation_ratio=0.1")


ALONE = World(rank=0, size=1, device=torch.device("cpu"))
"""Enough for what ends before there is an engine."""


def of(runs: Path, folder: str, *changes: str) -> Config:
    from tests.unit.test_config import load

    places = [f"runs_dir={runs}", f"train_dir={runs}/{folder}", "export.speculators=false"]
    kept = ["train.max_steps=2", "train.validation_ratio=0.1"]
    return load(*FIXED, *places, *kept, *changes)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("train.validation_ratio=0.2", "validation_ratio: configured 0.2, found 0.1"),
        ("deepspeed.gradient_clipping=0.5", "gradient_clipping: configured 0.5, found 1.0"),
        ("deepspeed.bf16.enabled=true", "bf16: configured True, found False"),
        ("train.max_steps=3", "num_steps: configured 3, found 2"),
        ("optimizer.lr=1e-3", "optimizer.lr: configured"),
    ],
)
def test_what_would_change_the_result_is_refused(two_steps: Path, change: str, named: str) -> None:
    """Held-out samples must not come to be trained on, among others."""
    with pytest.raises(UserError, match=named):
        Trainer(of(two_steps.parent, two_steps.name, change), ALONE)


def test_a_mistake_before_the_first_checkpoint_binds_nobody(store_run: Path) -> None:
    """Not even to what else was configured then."""
    for lr in (1e-3, 2e-3):
        wrong = ["draft.norm_before_fc=true", "draft.fc_norm=true", f"optimizer.lr={lr}"]
        with pytest.raises(UserError, match="exclude each other"):
            Trainer(of(store_run, "mistaken", *wrong), ALONE)
    assert Manifest.load(store_run / "mistaken", KIND).match["optimizer"]["lr"] == 2e-3
    with pytest.raises(UserError, match="holds 'store', expected 'checkpoints'"):
        Trainer(of(store_run, "ci/store"), ALONE)


def test_too_short_a_run_is_refused(store_run: Path) -> None:
    short = ["train.max_steps=null", "train.epochs=0.001"]
    with pytest.raises(UserError, match=r"train\.epochs=0\.001 is less than one batch"):
        Trainer(of(store_run, "short", *short), ALONE)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("draft.norm_output=true", "draft.norm_output: configured"),  # nothing in the weights tells
        ("draft.vocab_size=128", "draft.vocab_size: configured"),
        ("draft.intermediate_size=64", "draft.intermediate_size: configured"),
        ("target.aux_layers=[0,3,4]", "aux_layers: configured"),
    ],
)
def test_export_needs_the_drafter_that_was_trained(
    two_steps: Path, change: str, named: str
) -> None:
    from training.export import export

    with pytest.raises(UserError, match=named):
        export(of(two_steps.parent, two_steps.name, change))
    exported = export(of(two_steps.parent, two_steps.name))
    assert torch.equal(
        load_file(exported / "model.safetensors")["fc.weight"].float(),
        final_state(two_steps, 2)["fc.weight"],
    )
