"""What the numbers of a training's configuration may be, told before anything is read."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from eagle3.config import Config
from eagle3.errors import UserError

LIMITS: list[tuple[str, Callable[[float], bool], tuple[str, ...]]] = [
    (
        "at least 1",
        lambda x: x >= 1,
        ("train.max_steps", "train.accumulation", "train.ttt_steps", "train.log_every",
         "train.validate_every", "train.save_every", "train.keep_checkpoints", "eval.num_steps"),
    ),
    ("above 0", lambda x: x > 0, ("train.epochs", "train.peak_tflops", "optimizer.lr")),
    (
        "at least 0",
        lambda x: x >= 0,
        ("seed", "train.simulate_samples", "train.step_decay", "optimizer.weight_decay"),
    ),
    (
        "at least 0 and below 1",
        lambda x: 0 <= x < 1,
        ("train.validation_ratio", "optimizer.beta1", "optimizer.beta2", "optimizer.momentum"),
    ),
]  # fmt: skip
"""What it must be, whether it is, and of which keys; a value that is not set is left alone."""


def check(config: Config) -> None:
    """Refuse a number that no training can have.

    Raises:
        UserError: names the key and what it may be.
    """
    for words, holds, keys in LIMITS:
        for key in keys:
            value = attrgetter(key)(config)
            if value is not None and not holds(value):
                raise UserError(f"{key}={value} must be {words}")
