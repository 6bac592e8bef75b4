"""Learning rate of each step: a pure function of the step, so that a resumed run has the same."""

from __future__ import annotations

import math

from eagle3.config import OptimizerConfig
from eagle3.errors import UserError

SCHEDULES = ("cosine", "wsd", "constant")


def check(config: OptimizerConfig) -> None:
    """Refuse a schedule that does not exist or does not fit into the run.

    Raises:
        UserError: names the key and what it may be.
    """
    if config.schedule not in SCHEDULES:
        raise UserError(f"optimizer.schedule={config.schedule} is not one of {list(SCHEDULES)}")
    for key in ("warmup_ratio", "decay_ratio", "min_lr_ratio"):
        if not 0 <= (value := getattr(config, key)) <= 1:
            raise UserError(f"optimizer.{key}={value} must be between 0 and 1")
    if config.schedule == "wsd" and config.warmup_ratio + config.decay_ratio > 1:
        raise UserError(
            f"optimizer.warmup_ratio={config.warmup_ratio} and optimizer.decay_ratio="
            f"{config.decay_ratio} exceed the run: their sum must not be above 1"
        )


def learning_rate(step: int, num_steps: int, config: OptimizerConfig) -> float:
    """Learning rate of optimizer step `step` (from 0).

    A linear warm-up over `warmup_ratio` of the steps (one at least) comes first. Then `cosine`
    falls to `min_lr_ratio * lr` over all that remains, `wsd` stays at lr and falls there linearly
    over the last `decay_ratio` of the steps, and `constant` stays.
    """
    warmup = max(1, round(config.warmup_ratio * num_steps))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    decay = num_steps - warmup
    if config.schedule == "wsd":
        decay = min(decay, round(config.decay_ratio * num_steps))
    progress = min(1.0, max(0.0, (step - (num_steps - decay)) / max(1, decay)))
    wave = 0.5 * (1 + math.cos(math.pi * progress))
    share = 1 - progress if config.schedule == "wsd" else wave
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)
