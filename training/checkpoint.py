"""Checkpoints that do not depend on the number of ranks.

A drafter is small, so a checkpoint holds it whole: float32 master weights and optimizer state,
gathered from however DeepSpeed has split them (training/weights.py). A folder is written under a
temporary name and renamed.

    step-00000200/drafter.safetensors          trainable weights, float32
    step-00000200/exp_avg.safetensors          AdamW's first moment, by weight name
    step-00000200/exp_avg_sq.safetensors       its second moment
    step-00000200/momentum_buffer.safetensors  Muon's momentum, of the weights that Muon steps
    step-00000200/ema.safetensors              moving average of the weights, if train.ema is set
    step-00000200/state.json                   step, which of these parts it has; validation
                                               results if it was validated
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from eagle3.errors import UserError
from eagle3.manifest import read_json, write_json
from training.optimizer import EMA
from training.weights import restore, state_kinds, trainable, whole
from training.world import World

log = logging.getLogger(__name__)
NAME = re.compile(r"step-\d{8,}")
"""Of a checkpoint's folder; others beside them are their owner's."""
STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer", EMA)


def folders(root: Path) -> list[Path]:
    """Checkpoints under `root`, oldest first."""
    own = (p for p in root.glob("step-*") if NAME.fullmatch(p.name))
    return sorted(p for p in own if (p / "state.json").exists())


def choose(root: Path, which: str) -> Path:
    """The "last" or "best" checkpoint, or that of a step number.

    Raises:
        UserError: there is none.
    """
    found = folders(root)
    if not found:
        raise UserError(f"no checkpoint in {root}: run `train` first")
    if which == "last":
        return found[-1]
    if which == "best":
        if (chosen := best(found)) is None:
            raise UserError(
                f"export.checkpoint=best: no checkpoint in {root} was validated; let "
                "train.save_every be a multiple of train.validate_every, and "
                "train.validation_ratio above 0"
            )
        return chosen
    named = [f for f in found if which.isdecimal() and f.name == f"step-{int(which):08d}"]
    if not named:
        raise UserError(
            f"export.checkpoint={which} is neither last, best nor the step of a checkpoint: {root} "
            f"has {[f.name for f in found]}"
        )
    return named[0]


def best(found: list[Path]) -> Path | None:
    """The checkpoint with the best validation accept length, the later one of equals."""
    scores = [(load_state(f).get("accept_length"), f.name, f) for f in found]
    return max((s for s in scores if s[0] is not None), default=(None, "", None))[2]


def load_state(folder: Path) -> dict[str, Any]:
    """Step and validation results of a checkpoint.

    Raises:
        UserError: they are damaged.
    """
    return read_json(folder / "state.json", f"remove {folder}")


def weights(folder: Path, kind: str = "drafter") -> dict[str, Tensor]:
    """Trainable weights, or their average (EMA), by the drafter's parameter names, float32.

    Raises:
        UserError: they cannot be read, pruned by a training that goes on perhaps.
    """
    return _load(folder, kind)


def has_average(folder: Path) -> bool:
    """Whether the run kept a moving average of its weights."""
    return _has(folder, EMA)


def save(engine: Any, root: Path, state: dict[str, Any], keep: int, world: World) -> None:
    """Write a checkpoint (every rank takes part; rank 0 writes) and prune old ones.

    The newest `keep` stay, and the one with the best validation accept length.

    Args:
        state: `step`, and the validation results if it was validated at this step.

    Raises:
        UserError: it could not be written, on every rank; the older ones are as they were.
    """
    parts = _gather(engine, world.rank == 0)
    problem = _write(root, state, parts) if world.rank == 0 else None
    failed = torch.tensor(float(problem is not None), device=world.device)
    if world.sum(failed).item():
        raise UserError(problem or "rank 0 could not write its checkpoint")
    if world.rank == 0:
        found = folders(root)
        stays = best(found)
        for old in found[:-keep]:
            if old != stays:
                gone = root / f".{old.name}.tmp"  # swept by the next save if this is killed
                old.rename(gone)
                shutil.rmtree(gone)


def _write(root: Path, state: dict[str, Any], parts: dict[str, dict[str, Tensor]]) -> str | None:
    """Write and rename a checkpoint folder; what went wrong, or None."""
    final = root / f"step-{state['step']:08d}"
    temporary = root / f".{final.name}.tmp"
    for stale in root.glob(".step-*.tmp"):  # of a process that was killed
        shutil.rmtree(stale)
    try:
        temporary.mkdir(parents=True)
        for kind, part in parts.items():
            save_file(part, _file(temporary, kind))
        write_json(temporary / "state.json", {**state, "parts": sorted(parts)})
        for file in temporary.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
    except (OSError, SafetensorError) as error:  # safetensors wraps the system's error
        shutil.rmtree(temporary, ignore_errors=True)
        needed = sum(tensor.nbytes for part in parts.values() for tensor in part.values())
        return (
            f"checkpoint {final} could not be written: {error}. It needs {needed:,} bytes, "
            f"{shutil.disk_usage(root).free:,} are free. Older checkpoints are intact: make room "
            "and run the same command, which resumes from the last one"
        )
    return None


def load_weights(module: nn.Module, folder: Path, kind: str = "drafter") -> None:
    """Put a checkpoint's weights, or their average, into a drafter."""
    found = weights(folder, kind)
    own = {n: p for n, p in module.named_parameters() if p.requires_grad}
    if own.keys() != found.keys():
        raise UserError(
            f"{folder} holds another drafter: missing {sorted(own.keys() - found.keys())}, extra "
            f"{sorted(found.keys() - own.keys())}"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(found[name])


def _gather(engine: Any, keep: bool) -> dict[str, dict[str, Tensor]]:
    """kind -> name -> whole float32 tensor on the host; ranks that do not `keep` only take part.

    Raises:
        RuntimeError: a weight is not finite: nothing that was trained from it is worth keeping.
    """
    parts: dict[str, dict[str, Tensor]] = {}
    for name, parameter in trainable(engine):
        for kind in (None, *state_kinds(engine, parameter)):
            tensor = whole(engine, parameter, kind)
            if not torch.isfinite(tensor).all():
                raise RuntimeError(f"{name} is not finite ({kind or 'weight'}): not saved")
            if keep:
                parts.setdefault(kind or "drafter", {})[name] = tensor.float().cpu().contiguous()
    return parts


def load_optimizer(engine: Any, folder: Path) -> None:
    """Put master weights and optimizer state into an initialised engine."""
    states = {kind: _load(folder, kind) for kind in STATES if _has(folder, kind)}
    restore(engine, weights(folder), states, load_state(folder)["step"])


def _has(folder: Path, kind: str) -> bool:
    """Whether a checkpoint was saved with this part; the earliest do not say."""
    parts = load_state(folder).get("parts")
    return _file(folder, kind).exists() if parts is None else kind in parts


def _load(folder: Path, kind: str) -> dict[str, Tensor]:
    path = _file(folder, kind)
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} is gone or damaged: {error}. The checkpoint before it can be used instead, "
            f"after {folder} is removed"
        ) from error


def _file(folder: Path, kind: str) -> Path:
    return folder / f"{kind}.safetensors"
