"""The DeepSpeed configuration: the user's, checked, and the keys we decide."""

from __future__ import annotations

import copy
import difflib
from typing import Any

from eagle3.config import Config
from eagle3.errors import UserError

OURS = {
    "train_batch_size": "train.tokens_per_batch and train.accumulation",
    "train_micro_batch_size_per_gpu": "train.tokens_per_batch",
    "gradient_accumulation_steps": "train.accumulation",
    "optimizer": "the optimizer group",
    "scheduler": "the optimizer group",
    "fp16": "nothing: use bf16 or fp32",
    "amp": "nothing: use bf16 or fp32",
    "torch_autocast": "nothing: use bf16 or fp32",
    "bfloat16": "deepspeed.bf16, its present name",
    "gradient_allreduce_op": "the loss, which counts on the mean",
    "managed_gradient_accumulation": "train.accumulation",
}
"""DeepSpeed keys that our own configuration decides."""

UNREADABLE = (ValueError, TypeError, AttributeError, KeyError, AssertionError)
"""What values of other types or out of range make DeepSpeed raise; its own class is a pydantic
model for sections only."""

KEEP_GATHERED = "stage3_param_persistence_threshold"
"""ZeRO 3 keeps parameters up to this size whole on every rank."""


def deepspeed_config(config: Config) -> dict[str, Any]:
    """The user's DeepSpeed configuration and the keys we decide.

    Raises:
        UserError: the user's sets one of ours, has a key or value that DeepSpeed has no use for, or
            asks for what we cannot save.
    """
    theirs = {key: value for key, value in config.deepspeed.items() if value is not None}
    for key, instead in OURS.items():
        if key in theirs:
            raise UserError(f"deepspeed.{key} is decided by {instead}; remove it")
    _require_read(theirs)
    clipping = theirs.get("gradient_clipping", 0.0)
    if not isinstance(clipping, int | float) or clipping < 0:
        raise UserError(f"deepspeed.gradient_clipping={clipping} must be at least 0; 0 is none")
    zero = dict(theirs.get("zero_optimization") or {})
    if not isinstance(stage := zero.get("stage", 0), int):
        raise UserError(f"deepspeed.zero_optimization.stage={stage!r} must be a number")
    for part, least in (("offload_optimizer", 1), ("offload_param", 3)):
        device = (zero.get(part) or {}).get("device") or "none"
        if device not in ("none", "cpu"):
            raise UserError(
                f"deepspeed.zero_optimization.{part}.device must be cpu or none: checkpoints need "
                "the optimizer state in memory"
            )
        if device == "cpu" and zero.get("stage", 0) < least:
            raise UserError(
                f"deepspeed.zero_optimization.{part} does nothing below ZeRO stage {least}: set "
                f"deepspeed.zero_optimization.stage={least}, or remove it"
            )
    accumulated = (theirs.get("data_types") or {}).get("grad_accum_dtype")
    if uses_bf16(config) and zero.get("stage", 0) == 0 and accumulated == "fp32":
        raise UserError(
            "deepspeed.data_types.grad_accum_dtype=fp32 needs ZeRO 1 to 3 in bf16: set "
            "deepspeed=zero1, or remove it"
        )
    if zero.get("stage", 0) == 3:
        # see `_keep_whole`
        if KEEP_GATHERED in zero:
            raise UserError(f"deepspeed.zero_optimization.{KEEP_GATHERED} is decided; remove it")
        zero[KEEP_GATHERED] = 10**12
    return {
        **theirs,
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": config.train.accumulation,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
    }


class _Asked(dict[str, Any]):
    """A configuration that knows which keys its reader asked for."""

    def __init__(self, *items: Any) -> None:
        super().__init__(*items)
        self.keys_asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(key, default) if key in self else default

    def __getitem__(self, key: str) -> Any:
        self.keys_asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.keys_asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:  # `in config.keys()` asks, too
        return self

    def __copy__(self) -> _Asked:
        return self


def _require_read(theirs: dict[str, Any]) -> None:
    """Refuse what DeepSpeed would pass over in silence: it forbids unknown keys in its sections
    only, and has no list of the others. Those that this version reads are those it asks for.

    Raises:
        UserError: names the key and the nearest that is read, or says what DeepSpeed refuses.
    """
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    # a copy: DeepSpeed fills sections in
    asked = _Asked(copy.deepcopy({**theirs, "train_micro_batch_size_per_gpu": 1}))
    try:
        DeepSpeedConfig(asked)
    except (DeepSpeedConfigError, *UNREADABLE) as error:
        raise UserError(f"DeepSpeed refuses what `deepspeed` says: {error}") from error
    for key in sorted(theirs.keys() - asked.keys_asked):
        near = difflib.get_close_matches(key, asked.keys_asked - OURS.keys(), n=1)
        remedy = f"correct it to {near[0]}" if near else "remove it"
        raise UserError(f"deepspeed.{key} is nothing that DeepSpeed reads: {remedy}")


def uses_bf16(config: Config) -> bool:
    return bool((config.deepspeed.get("bf16") or {}).get("enabled", False))


def offloads_optimizer(config: Config) -> bool:
    """Whether the optimizer steps on the host."""
    zero = config.deepspeed.get("zero_optimization") or {}
    return bool((zero.get("offload_optimizer") or {}).get("device", "none") == "cpu")
