"""Checkpoints that do not depend on the number of ranks.

A drafter is small, so a checkpoint holds it whole: float32 master weights and optimizer state,
gathered from however DeepSpeed has split them (training/weights.py). A folder is written under a
temporary name and renamed.

    step-00000200/drafter.safetensors          trainable weights, float32
    step-00000200/exp_avg.safetensors          AdamW's first moment, by weight name
    step-00000200/exp_avg_sq.safetensors       its second moment
    step-00000200/momentum_buffer.safetensors  Muon's momentum, of the weights that Muon steps
    step-00000200/ema.safetensors              moving average of the weights, if train.ema is set
    step-00000200/state.json                   step and validation results
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from eagle3.errors import UserError
from eagle3.manifest import write_json
from training.optimizer import EMA
from training.weights import restore, state_kinds, trainable, whole

log = logging.getLogger(__name__)
STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer", EMA)


def folders(root: Path) -> list[Path]:
    """Checkpoints under `root`, oldest first."""
    return sorted(p for p in root.glob("step-*") if (p / "state.json").exists())


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
        return max(found, key=lambda f: (load_state(f).get("accept_length") or 0.0, f.name))
    named = root / f"step-{int(which):08d}"
    if named not in found:
        raise UserError(f"export.checkpoint={which}: {root} has {[f.name for f in found]}")
    return named


def load_state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "state.json").read_text())


def weights(folder: Path, kind: str = "drafter") -> dict[str, Tensor]:
    """Trainable weights, or their average (EMA), by the drafter's parameter names, float32."""
    return load_file(_file(folder, kind))


def has_average(folder: Path) -> bool:
    """Whether the run kept a moving average of its weights."""
    return _file(folder, EMA).exists()


def save(engine: Any, root: Path, state: dict[str, Any], keep: int, rank: int) -> None:
    """Write a checkpoint (every rank takes part; rank 0 writes) and prune old ones.

    The newest `keep` stay, and the one with the best validation accept length.
    """
    parts = _gather(engine)
    if rank == 0:
        final = root / f"step-{state['step']:08d}"
        temporary = root / f".{final.name}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for kind, part in parts.items():
            save_file(part, _file(temporary, kind))
        write_json(temporary / "state.json", state)
        for file in temporary.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        best = choose(root, "best")
        for old in folders(root)[:-keep]:
            if old != best:
                shutil.rmtree(old)
    if torch.distributed.get_world_size() > 1:
        torch.distributed.barrier()


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


def _gather(engine: Any) -> dict[str, dict[str, Tensor]]:
    """kind -> name -> whole float32 tensor on the host of rank 0; the other ranks only take part.

    Raises:
        RuntimeError: a weight is not finite: nothing that was trained from it is worth keeping.
    """
    keep = torch.distributed.get_rank() == 0
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
    states = {kind: load_file(path) for kind in STATES if (path := _file(folder, kind)).exists()}
    restore(engine, weights(folder), states, load_state(folder)["step"])


def _file(folder: Path, kind: str) -> Path:
    return folder / f"{kind}.safetensors"
