"""The least that a configuration's numbers may be, in one table, checked before anything starts.

What depends on the target, the data or another value is checked where that is known.
"""

from __future__ import annotations

from operator import attrgetter

from eagle3.config import Config
from eagle3.errors import UserError

LEAST = {
    "server.replicas": 1,
    "data.limit": 1,
    "data.max_length": 1,
    "respond.skip": 0,
    "respond.limit": 1,
    "respond.concurrency": 1,
    "respond.max_new_tokens": 1,
    "respond.temperature": 0,
    "respond.samples_per_prompt": 1,
    "extract.concurrency": 1,
    "extract.shard_bytes": 1,
    "verify.recapture": 0,
    "optimizer.weight_decay": 0,
    "train.max_steps": 1,
    "train.tokens_per_batch": 1,
    "train.accumulation": 1,
    "train.ttt_steps": 1,
    "train.step_decay": 0,
    "train.validation_ratio": 0,
    "train.simulate_samples": 0,
    "train.log_every": 1,
    "train.validate_every": 1,
    "train.save_every": 1,
    "train.keep_checkpoints": 1,
    "eval.concurrency": 1,
    "eval.max_new_tokens": 1,
    "eval.num_steps": 1,
    "eval.warmup": 0,
    "eval.offline_samples": 1,
}
"""Key -> least value; of a list, of each item."""

ABOVE_ZERO = (
    "server.deadline_s", "server.timeout_s", "respond.top_p", "extract.tokens_per_s",
    "optimizer.lr", "train.epochs", "train.peak_tflops",
)  # fmt: skip


def require(config: Config) -> None:
    """Refuse numbers that nothing could be done with; None is none.

    Raises:
        UserError: names the key, the value and what it may be.
    """
    found = {key: attrgetter(key)(config) for key in (*LEAST, *ABOVE_ZERO)}
    for name, benchmark in config.benchmark.items():
        found[f"benchmark.{name}.limit"] = benchmark.limit
    for key, value in found.items():
        if value == []:
            raise UserError(f"{key}=[] must name at least one")
        for one in value if isinstance(value, list) else [value]:
            above, least = key in ABOVE_ZERO, LEAST.get(key, 1)
            if one is not None and not (one > 0 if above else one >= least):
                raise UserError(
                    f"{key}={value} must be {'above 0' if above else f'{least} or more'}"
                )
