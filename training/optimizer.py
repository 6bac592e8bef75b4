"""The optimizer of a run: AdamW, or Muon for the matrices, and a moving average of the weights.

DeepSpeed may hand an optimizer float32 copies of whole weights or, from ZeRO 1 on, one flat part of
all weights of a group. AdamW and the average work on elements, so they do not care. Muon
orthogonalises whole matrices, so it needs ZeRO 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from eagle3.config import Config, OptimizerConfig
from eagle3.errors import UserError
from training.muon import Muon

EMA = "ema"
"""Key of the average in an optimizer's state, beside the moments: it is split and saved as they."""


class MuonAdamW(torch.optim.Optimizer):
    """Muon for some parameters and torch.optim.AdamW for the others, as one optimizer.

    Both see this optimizer's groups and state, whatever DeepSpeed puts there.
    """

    def __init__(self, matrices: list[nn.Parameter], others: list[nn.Parameter], **shared: Any):
        momentum, betas = shared.pop("momentum"), shared.pop("betas")
        self.muon = Muon(matrices, momentum=momentum, **shared)
        self.adamw = torch.optim.AdamW(others, betas=betas, fused=False, **shared)
        super().__init__([{"params": [*matrices, *others]}], shared)
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]
        self.muon.state = self.adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        self.muon.step()
        self.adamw.step()


def check(config: Config) -> None:
    """Refuse an optimizer that does not exist or cannot work.

    Raises:
        UserError: names the key and the remedy.
    """
    optimizer, ema = config.optimizer, config.train.ema
    if optimizer.name not in ("adamw", "muon"):
        raise UserError(f"optimizer.name={optimizer.name} is neither adamw nor muon")
    stage = (config.deepspeed.get("zero_optimization") or {}).get("stage", 0)
    if optimizer.name == "muon" and stage > 0:
        raise UserError(
            f"optimizer.name=muon needs whole matrices, which ZeRO stage {stage} cuts into flat "
            "parts: use deepspeed=zero0, or optimizer=adamw"
        )
    if ema is not None and not 0 < ema < 1:
        raise UserError(f"train.ema={ema} must be above 0 and below 1, or null for none")


def build(drafter: nn.Module, config: OptimizerConfig, ema: float | None) -> torch.optim.Optimizer:
    """Optimizer over the drafter's trainable parameters.

    Muon takes fc and the matrices of the decoder layers; lm_head, an output table, and the norms
    stay with AdamW.
    """
    named = {n: p for n, p in drafter.named_parameters() if p.requires_grad}
    shared: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "weight_decay": config.weight_decay,
    }
    optimizer: torch.optim.Optimizer
    if config.name == "muon":
        matrices = {n: p for n, p in named.items() if p.ndim == 2 and n != "lm_head.weight"}
        others = [p for n, p in named.items() if n not in matrices]
        optimizer = MuonAdamW(list(matrices.values()), others, momentum=config.momentum, **shared)
    else:
        optimizer = torch.optim.AdamW(named.values(), fused=False, **shared)
    if ema is not None:
        optimizer.register_step_post_hook(lambda own, *_: average(own, ema))
    return optimizer


@torch.no_grad()
def average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Move the average of every parameter just stepped: ema = decay * ema + (1 - decay) * weight.

    It starts at the weights after the first step.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = optimizer.state[parameter]
            if EMA in state:
                state[EMA].lerp_(parameter, 1 - decay)
            else:
                state[EMA] = parameter.detach().clone()
