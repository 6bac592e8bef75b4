"""What a capturing server must be: hooked functions that are known, settings that keep all rows.

Whatever is not known to be right is refused when the server starts, or at the first forward.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

LOGITS_PARAMETERS = [
    "self", "input_ids", "hidden_states", "lm_head", "logits_metadata", "aux_hidden_states",
]  # fmt: skip
BATCH_FIELDS = {
    "rids", "input_ids", "extend_seq_lens_cpu", "extend_prefix_lens_cpu", "forward_mode",
}  # fmt: skip
ONE_ONLY = {
    "pp_size": "pipeline parallelism spreads the aux layers over processes; use tp_size",
    "attn_cp_size": "context parallelism splits the rows of a sample over processes; use tp_size",
}
OFF_ONLY = {
    "speculative_algorithm": "a server that speculates does not capture its target; start it plain",
    "enable_two_batch_overlap": "two-batch overlap runs layers without exposing their states",
    "enable_prefill_cp": "context parallelism splits the rows of a sample; use tp_size",
    "enable_layernorm_sp": "sequence parallelism splits the rows of a sample",
}
"""Server settings, where this version of SGLang has them, and why they may not be on."""


def check_signatures() -> None:
    """Refuse to hook functions that are not what the plugin knows."""
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    found = list(inspect.signature(LogitsProcessor.forward).parameters)
    if found[: len(LOGITS_PARAMETERS)] != LOGITS_PARAMETERS:
        raise RuntimeError(f"LogitsProcessor.forward takes {found}, not {LOGITS_PARAMETERS}")
    if list(inspect.signature(ModelRunner.load_model).parameters) != ["self"]:
        raise RuntimeError("ModelRunner.load_model has other parameters than (self)")
    fields = getattr(ForwardBatch, "__dataclass_fields__", {})
    if missing := BATCH_FIELDS - set(fields):
        raise RuntimeError(f"ForwardBatch lacks {sorted(missing)}")


def check_settings(server_args: Any) -> None:
    """Refuse settings under which rows would be missing or split.

    Tensor and data parallelism are fine: every rank of an attention-TP group holds all rows of its
    batch, and a request belongs to one such group.
    """
    if not server_args.disable_radix_cache:
        raise RuntimeError("prefix caching would lose rows; start with --disable-radix-cache")
    for name, why in ONE_ONLY.items():
        if (value := getattr(server_args, name, 1)) not in (1, None):
            raise RuntimeError(f"{name}={value}: {why}")
    for name, why in OFF_ONLY.items():
        if value := getattr(server_args, name, None):
            raise RuntimeError(f"{name}={value}: {why}")


def check_rows(expected: int, input_ids: Tensor, aux: Tensor | list[Tensor], final: Tensor) -> None:
    """Refuse a forward that does not hold every row of its batch (more is padding, at the end)."""
    states = [aux] if isinstance(aux, Tensor) else aux
    found = [len(t) for t in (input_ids, *states, final)]
    if min(found) < expected:
        raise RuntimeError(
            f"the batch has {expected} rows, but token ids, aux and final states have {found}: "
            "are the rows split over processes? Capture with tensor parallelism only"
        )
