"""Checkpoints of a plain engine: AdamW on the parameters themselves, as in float32 with ZeRO 0."""

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eagle3.config import Config, OptimizerConfig
from eagle3.errors import UserError
from eagle3.loss import Teacher
from eagle3.ttt import TTTModel
from tests.conftest import tiny_drafter
from training import checkpoint, optimizer
from training.engine import EngineModel
from training.train import Trainer
from training.world import World

WORLD = World(rank=0, size=1, device=torch.device("cpu"))


def engine(steps: int) -> SimpleNamespace:
    drafter, lm_head = tiny_drafter(torch.float32)
    built = optimizer.build(drafter, OptimizerConfig(name="muon", lr=1e-2), 0.9)
    for _ in range(steps):
        for parameter in drafter.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn_like(parameter)
        built.step()
    return SimpleNamespace(
        module=EngineModel(TTTModel(drafter, Teacher(lm_head, drafter.vocab), [1.0])),
        optimizer=built,
    )


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Writes beyond this size fail in this process, as they do on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def save(source: SimpleNamespace, root: Path, step: int, keep: int = 2, **state: float) -> None:
    checkpoint.save(source, root, {"step": step, **state}, keep, WORLD)


def test_everything_comes_back_bit_for_bit(tmp_path: Path) -> None:
    source, other = engine(3), engine(0)
    save(source, tmp_path, 3)
    folder = checkpoint.choose(tmp_path, "last")
    checkpoint.load_weights(other.module.model.drafter, folder)
    checkpoint.load_optimizer(other, folder)
    pairs = zip(
        source.module.model.drafter.parameters(),
        other.module.model.drafter.parameters(),
        strict=True,
    )
    for a, b in pairs:
        assert torch.equal(a, b)
        if a.requires_grad:
            first, second = source.optimizer.state[a], other.optimizer.state[b]
            assert first.keys() == second.keys() and len(first) >= 2
            assert all(torch.equal(first[k], second[k]) for k in first)


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    source = engine(1)
    for step, length in ((1, 1.2), (2, 1.9), (3, 1.9), (4, 1.5), (5, None), (6, 1.3)):
        save(source, tmp_path, step, **({} if length is None else {"accept_length": length}))
    assert [f.name[-1] for f in checkpoint.folders(tmp_path)] == ["3", "5", "6"]
    assert checkpoint.choose(tmp_path, "best").name == "step-00000003"
    save(source, tmp_path, 7, accept_length=2.5)  # two go at once
    assert [f.name[-1] for f in checkpoint.folders(tmp_path)] == ["6", "7"]


def test_best_needs_a_validated_checkpoint(tmp_path: Path) -> None:
    save(engine(1), tmp_path, 1)
    with pytest.raises(UserError, match="validate_every"):
        checkpoint.choose(tmp_path, "best")


@pytest.mark.parametrize("which", ["latest", "2", "-1", "step-00000001", "1.0"])
def test_a_checkpoint_that_is_not_there_is_a_users_mistake(tmp_path: Path, which: str) -> None:
    save(engine(1), tmp_path, 1)
    assert checkpoint.choose(tmp_path, "1").name == "step-00000001"
    with pytest.raises(UserError, match=f"export.checkpoint={which} .*step-00000001"):
        checkpoint.choose(tmp_path, which)


@pytest.mark.parametrize("kind", ["drafter", "ema", "momentum_buffer"])
def test_a_damaged_file_is_told(tmp_path: Path, kind: str) -> None:
    source = engine(1)
    save(source, tmp_path, 1)
    folder = checkpoint.choose(tmp_path, "last")
    (folder / f"{kind}.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match=f"{kind}.safetensors is gone or damaged"):
        checkpoint.load_weights(source.module.model.drafter, folder)
        checkpoint.load_optimizer(source, folder)


@pytest.mark.parametrize("text", ["", "{", "3"])
def test_a_damaged_state_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(UserError, match="state.json is damaged"):
        checkpoint.load_state(tmp_path)


def test_weights_pruned_while_they_are_read_are_told(tmp_path: Path) -> None:
    save(engine(1), tmp_path, 1)
    folder = checkpoint.choose(tmp_path, "last")
    (folder / "drafter.safetensors").unlink()
    with pytest.raises(UserError, match="is gone"):
        checkpoint.weights(folder)


def test_other_folders_beside_checkpoints_are_their_owners(tmp_path: Path) -> None:
    save(engine(1), tmp_path, 1)
    for name in ("step-00000001.bak", "step-mine"):
        shutil.copytree(tmp_path / "step-00000001", tmp_path / name)
    assert checkpoint.choose(tmp_path, "last").name == "step-00000001"
    for step in (2, 3, 4):
        save(engine(1), tmp_path, step)
    assert {"step-00000001.bak", "step-mine"} < {f.name for f in tmp_path.iterdir()}


def test_checkpoints_of_nobody_are_not_gone_on_with(tmp_path: Path) -> None:
    """Copied without the manifest that says what they were trained from and how."""
    save(engine(1), tmp_path, 900)
    trainer = object.__new__(Trainer)
    trainer.root, trainer.config = tmp_path, Config(run_name="x")
    with pytest.raises(UserError, match="no manifest that says of what"):
        trainer._resume_point()


@pytest.mark.parametrize("kind", ["momentum_buffer", "ema", "exp_avg"])
def test_a_part_that_is_missing_is_told(tmp_path: Path, kind: str) -> None:
    source = engine(1)
    save(source, tmp_path, 1)
    folder = checkpoint.choose(tmp_path, "last")
    (folder / f"{kind}.safetensors").unlink()
    assert checkpoint.has_average(folder)
    with pytest.raises(UserError, match=f"{kind}.safetensors is gone or damaged"):
        checkpoint.load_optimizer(source, folder)


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    source = engine(1)
    save(source, tmp_path, 1)
    before = {f.name: f.read_bytes() for f in (tmp_path / "step-00000001").iterdir()}
    needed = sum(
        (tmp_path / "step-00000001" / name).stat().st_size
        for name in before
        if name.endswith("safetensors")
    )
    with largest_file(20_000), pytest.raises(UserError, match="resumes from the last") as caught:
        save(source, tmp_path, 2)
    assert str(tmp_path / "step-00000002") in str(caught.value)
    told = int(str(caught.value).split("needs ")[1].split(" bytes")[0].replace(",", ""))
    assert 0.9 * needed < told <= needed
    assert [f.name for f in tmp_path.iterdir()] == ["step-00000001"]
    assert before == {f.name: f.read_bytes() for f in (tmp_path / "step-00000001").iterdir()}
    save(source, tmp_path, 2)
    assert len(checkpoint.folders(tmp_path)) == 2


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".step-00000007.tmp").mkdir()
    (tmp_path / ".step-00000007.tmp" / "drafter.safetensors").write_text("half")
    assert checkpoint.folders(tmp_path) == []
    save(engine(1), tmp_path, 1)
    assert [f.name for f in tmp_path.iterdir()] == ["step-00000001"]


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    source = engine(1)
    with torch.no_grad():
        source.module.model.drafter.fc.weight[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match=r"fc\.weight"):
        save(source, tmp_path, 1)
    assert checkpoint.folders(tmp_path) == []
