"""Checkpoints that do not depend on the number of ranks.

A drafter is small, so a checkpoint holds it whole: float32 master weights and both AdamW moments,
gathered from however DeepSpeed has split them. A folder is written under a temporary name and
renamed.

    step-00000200/drafter.safetensors      trainable weights, float32
    step-00000200/exp_avg.safetensors      AdamW's first moment, by weight name
    step-00000200/exp_avg_sq.safetensors   its second moment
    step-00000200/state.json               step and validation results
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

log = logging.getLogger(__name__)
MOMENTS = ("exp_avg", "exp_avg_sq")


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


def weights(folder: Path) -> dict[str, Tensor]:
    """Trainable weights by the drafter's parameter names, float32."""
    return load_file(folder / "drafter.safetensors")


def save(engine: Any, root: Path, state: dict[str, Any], keep: int, rank: int) -> None:
    """Write a checkpoint (every rank takes part; rank 0 writes) and prune old ones.

    The newest `keep` stay, and the one with the best validation accept length.
    """
    tensors = {name: _gather(engine, name, parameter) for name, parameter in _trainable(engine)}
    if rank == 0:
        final = root / f"step-{state['step']:08d}"
        temporary = root / f".{final.name}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for kind in ("drafter", *MOMENTS):
            part = {name: gathered[kind] for name, gathered in tensors.items()}
            save_file(part, temporary / f"{kind}.safetensors")
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


def load_weights(module: nn.Module, folder: Path) -> None:
    """Put a checkpoint's weights into a drafter (before the engine copies them)."""
    found = weights(folder)
    own = {n: p for n, p in module.named_parameters() if p.requires_grad}
    if own.keys() != found.keys():
        raise UserError(
            f"{folder} holds another drafter: missing {sorted(own.keys() - found.keys())}, extra "
            f"{sorted(found.keys() - own.keys())}"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(found[name])


def load_optimizer(engine: Any, folder: Path) -> None:
    """Put master weights and moments into an initialised engine."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    master = weights(folder)
    moments = {kind: load_file(folder / f"{kind}.safetensors") for kind in MOMENTS}
    step = float(load_state(folder)["step"])
    if _plain(engine):
        for name, parameter in _trainable(engine):
            engine.optimizer.state[parameter] = {
                "step": torch.tensor(step),
                **{kind: moments[kind][name].to(parameter.device) for kind in MOMENTS},
            }
        return
    # DeepSpeed links parameters to their moments after the first step; we need them before it
    torch_optimizer = engine.optimizer.optimizer
    for flat in (p for group in torch_optimizer.param_groups for p in group["params"]):
        torch_optimizer.state[flat] = {
            "step": torch.tensor(step), **{kind: torch.zeros_like(flat) for kind in MOMENTS}
        }  # fmt: skip
    engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in _trainable(engine):
        safe_set_full_fp32_param(parameter, master[name].to(parameter.device))
        for kind in MOMENTS:
            safe_set_full_optimizer_state(parameter, moments[kind][name].to(parameter.device), kind)


def _trainable(engine: Any) -> list[tuple[str, nn.Parameter]]:
    drafter = engine.module.drafter
    return [(n, p) for n, p in drafter.named_parameters() if p.requires_grad]


def _plain(engine: Any) -> bool:
    """Whether the engine steps the torch optimizer itself (float32, ZeRO 0)."""
    return isinstance(engine.optimizer, torch.optim.Optimizer)


def _gather(engine: Any, name: str, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Whole float32 weight and moments of a parameter, on the host."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if _plain(engine):
        state = engine.optimizer.state[parameter]
        found = {"drafter": parameter.detach(), **{kind: state[kind] for kind in MOMENTS}}
    else:
        found = {"drafter": safe_get_full_fp32_param(parameter)} | {
            kind: safe_get_full_optimizer_state(parameter, kind) for kind in MOMENTS
        }
    if missing := [kind for kind, value in found.items() if value is None]:
        raise RuntimeError(f"DeepSpeed gives no {missing} of {name}")
    return {kind: value.detach().float().cpu().contiguous() for kind, value in found.items()}
