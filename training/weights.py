"""Whole float32 weights and optimizer state by the drafter's names, however DeepSpeed holds them.

DeepSpeed has three ways. In float32 with ZeRO 0 the optimizer steps the parameters themselves; in
bf16 with ZeRO 0 it steps a float32 copy of each; from ZeRO 1 on each rank steps its part of one
flat float32 tensor a group. The parameters themselves are whole in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from eagle3.ttt import TTTModel
from training.optimizer import EMA


def trainable(engine: Any) -> list[tuple[str, nn.Parameter]]:
    """The drafter's trainable parameters by name."""
    drafter = engine.module.model.drafter
    return [(n, p) for n, p in drafter.named_parameters() if p.requires_grad]


def whole(engine: Any, parameter: nn.Parameter, kind: str | None) -> Tensor:
    """A parameter's float32 weight (None) or a part of its optimizer state, on every rank."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    copies = _copies(engine)
    if copies is not None:
        copy = copies[parameter]
        return copy.detach() if kind is None else engine.optimizer.state[copy][kind]
    if kind is None:
        found = safe_get_full_fp32_param(parameter)
    else:
        found = safe_get_full_optimizer_state(parameter, kind)
    if found is None:
        raise RuntimeError(f"DeepSpeed gives no {kind or 'float32 weight'}")
    return found


def state_kinds(engine: Any, parameter: nn.Parameter) -> list[str]:
    """What the optimizer keeps of a parameter after a step: moments, momentum, average."""
    copies = _copies(engine)
    if copies is not None:
        state = engine.optimizer.state[copies[parameter]]
    else:  # every flat part has the same
        state = next(iter(engine.optimizer.optimizer.state.values()))
    return [kind for kind in state if kind != "step"]


def restore(
    engine: Any, weights: dict[str, Tensor], states: dict[str, dict[str, Tensor]], step: int
) -> None:
    """Put whole weights and optimizer state into an engine that has not stepped yet.

    Args:
        weights: float32, by name; the module holds them already, in its own dtype.
        states: kind -> name -> tensor.
        step: optimizer steps taken, for AdamW's bias correction.
    """
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    copies = _copies(engine)
    if copies is None:
        _prepare_parts(engine, list(states), step)
    for name, parameter in trainable(engine):
        own = {kind: named[name] for kind, named in states.items() if name in named}
        if copies is not None:
            copy = copies[parameter]
            with torch.no_grad():
                copy.copy_(weights[name])
            state = {k: v.to(copy.device) for k, v in own.items()}
            if "exp_avg" in own:
                state["step"] = torch.tensor(float(step))
            engine.optimizer.state[copy] = state
            continue
        device = engine.device
        safe_set_full_fp32_param(parameter, weights[name].to(device))
        for kind, value in own.items():
            safe_set_full_optimizer_state(parameter, value.to(device), kind)


def _prepare_parts(engine: Any, kinds: list[str], step: int) -> None:
    """Give each flat part its optimizer state: DeepSpeed links to it only after a first step."""
    optimizer = engine.optimizer
    inner = optimizer.optimizer
    parts = getattr(optimizer, "fp32_partitioned_groups_flat", None)  # ZeRO 3
    if parts is None:
        parts = [p for group in inner.param_groups for p in group["params"]]
    for part in parts:
        inner.state[part] = {
            "step": torch.tensor(float(step)), **{k: torch.zeros_like(part) for k in kinds}
        }  # fmt: skip
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._lazy_init_hp_params_optimizer_state()


def _copies(engine: Any) -> dict[nn.Parameter, Tensor] | None:
    """The float32 tensor that is stepped for each parameter; None if parts are (ZeRO 1 on)."""
    optimizer = engine.optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        return {p: p for group in optimizer.param_groups for p in group["params"]}
    if hasattr(optimizer, "fp32_groups"):
        return {
            low: wide
            for pair in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
            for low, wide in zip(*pair, strict=True)
        }
    return None


@contextmanager
def for_evaluation(engine: Any, ema: bool) -> Iterator[TTTModel]:
    """The model in eval mode, with the average of its weights if `ema`; afterwards as it was.

    Every rank takes part.
    """
    model: TTTModel = engine.module.model
    was_training = model.training
    kept: list[tuple[nn.Parameter, Tensor]] = []
    model.eval()
    with torch.no_grad():
        if ema:
            for _, parameter in trainable(engine):
                kept.append((parameter, parameter.detach().clone()))
                parameter.copy_(whole(engine, parameter, EMA))
        try:
            yield model
        finally:
            for parameter, value in kept:
                parameter.copy_(value)
            model.train(was_training)
