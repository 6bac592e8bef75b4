"""Aux-layer ids: one convention in this project, translated at its borders.

The canonical id k is an index into Hugging Face's `output_hidden_states`: the residual stream after
k decoder layers (0 = embeddings). It is what configs, manifests and stores hold. Engines differ:

- SGLang, Llama-like models: `set_eagle3_layers_to_capture(ids)` adds 1 to every id, so it
  wants k - 1 (-1 for the embeddings).
- SGLang, DeepSeek-like models: takes k as it is, unless the first id is 1, when it adds 1 to all.

Both end up with the canonical ids in `model.layers_to_capture`, which the capture plugin checks.
That a model then exposes the residual stream at those places is proven for each architecture of
the table against Hugging Face, on a real server: tests/integration/test_families.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from eagle3.errors import UserError


class Family(Enum):
    """How SGLang's setter of a model family translates the ids it is given."""

    LLAMA_LIKE = "llama_like"
    DEEPSEEK_LIKE = "deepseek_like"


FAMILIES = {
    "LlamaForCausalLM": Family.LLAMA_LIKE,
    "MistralForCausalLM": Family.LLAMA_LIKE,
    "Phi3ForCausalLM": Family.LLAMA_LIKE,
    "Qwen2ForCausalLM": Family.LLAMA_LIKE,
    "Qwen3ForCausalLM": Family.LLAMA_LIKE,
    "Qwen3MoeForCausalLM": Family.LLAMA_LIKE,
    "Glm4MoeForCausalLM": Family.LLAMA_LIKE,
    "Glm4MoeLiteForCausalLM": Family.DEEPSEEK_LIKE,
    "DeepseekV2ForCausalLM": Family.DEEPSEEK_LIKE,
    "DeepseekV3ForCausalLM": Family.DEEPSEEK_LIKE,
    "KimiK25ForConditionalGeneration": Family.DEEPSEEK_LIKE,
}
"""Architecture in config.json (and SGLang's class of that name) -> family."""

WRONG_STATES = {
    "Gemma3ForCausalLM": "SGLang exposes the output of its MLP without the residual stream",
}
"""Architectures that SGLang captures, but not as `output_hidden_states` has them."""


def family_of(architecture: str) -> Family:
    """Family of a Hugging Face architecture name.

    Raises:
        UserError: the convention of this architecture has not been proven, or is not ours.
    """
    if architecture in FAMILIES:
        return FAMILIES[architecture]
    if architecture in WRONG_STATES:
        raise UserError(
            f"{architecture} cannot be a target: {WRONG_STATES[architecture]}, so what the server "
            f"gives a drafter is not the layer's hidden state. Known: {sorted(FAMILIES)}"
        )
    raise UserError(
        f"the aux-layer convention of {architecture} is not known; known: {sorted(FAMILIES)}. "
        "Prove it: add a tiny model to tests/integration/tiny_models.py, the architecture to "
        "FAMILIES in eagle3/layers.py, and run tests/integration/test_families.py"
    )


def check(aux_layers: Sequence[int], num_layers: int) -> None:
    """Check canonical ids against a target's depth.

    Raises:
        UserError: too few, unsorted, repeated or out of range. The last layer's output (id
            `num_layers`) is not available: SGLang exposes it only after the final norm.
    """
    ids = list(aux_layers)
    if not ids or ids != sorted(set(ids)):
        raise UserError(f"target.aux_layers={ids} must be distinct, ascending layer ids")
    if ids[0] < 0 or ids[-1] >= num_layers:
        raise UserError(
            f"target.aux_layers={ids} must lie in 0..{num_layers - 1} for a target of {num_layers} "
            "layers (ids index output_hidden_states; the last layer's output cannot be captured)"
        )


def default(num_layers: int) -> list[int]:
    """The customary early, middle and late layers: 2, n // 2, n - 3.

    Raises:
        UserError: the target is so shallow that they collide.
    """
    ids = [2, num_layers // 2, num_layers - 3]
    if ids != sorted(set(ids)):
        raise UserError(
            f"a target of {num_layers} layers is too shallow for the default aux layers {ids}; "
            "set target.aux_layers"
        )
    return ids


def resolve(configured: Sequence[int] | None, num_layers: int, architecture: str) -> list[int]:
    """The configured canonical ids, or the default ones, for a target of this depth and kind.

    Raises:
        UserError: they do not fit the depth, or SGLang cannot capture them.
    """
    ids = default(num_layers) if configured is None else list(configured)
    check(ids, num_layers)
    to_sglang(ids, architecture)
    return ids


def to_sglang(aux_layers: Sequence[int], architecture: str) -> list[int]:
    """Canonical ids -> what SGLang's setter (and a drafter's config.json for SGLang) wants.

    Raises:
        UserError: SGLang cannot express these ids for this family.
    """
    ids = list(aux_layers)
    if family_of(architecture) is Family.LLAMA_LIKE:
        return [k - 1 for k in ids]
    if ids[0] == 1:
        raise UserError(
            "SGLang cannot capture aux layer 1 first on DeepSeek-like models (it shifts all ids "
            "by 1 when the first is 1); choose another first layer"
        )
    return ids


def from_sglang(layer_ids: Sequence[int], architecture: str) -> list[int]:
    """Inverse of `to_sglang`, for reading drafters made for SGLang."""
    ids = list(layer_ids)
    if family_of(architecture) is Family.LLAMA_LIKE or ids[0] == 1:
        return [k + 1 for k in ids]
    return ids
