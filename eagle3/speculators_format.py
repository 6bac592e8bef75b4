"""Drafter folders in speculators' format, which vLLM serves: written by speculators itself.

It differs from SGLang's (`export`) in its config.json, in counting the embeddings as aux layer 0,
in holding the target's embeddings, and in two names: `layers.0` for `midlayer`, and, in the layers
above, Llama's `input_layernorm` for what SGLang calls `hidden_norm`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3 import layers
from eagle3.drafter import NORMS, Drafter, DrafterConfig
from eagle3.drafter_folder import (
    UNREADABLE,
    load_config,
    load_tensors,
    refuse,
    tensor_problems,
    unreadable,
    with_maps,
)
from eagle3.errors import UserError
from eagle3.export import assemble, rope_theta
from eagle3.target import Target
from eagle3.vocab import DraftVocab

AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"


def save(
    drafter: Drafter, folder: Path, target: Target, aux_layers: list[int], num_steps: int
) -> None:
    """Write a drafter folder through speculators' own model class.

    Raises:
        UserError: a whole vocabulary in another order than the target's.
        RuntimeError: its class does not take exactly our tensors.
    """
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    ours = drafter.config
    layer = LlamaConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.hidden_size,
        intermediate_size=ours.intermediate_size,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_attention_heads,
        num_key_value_heads=ours.num_key_value_heads,
        head_dim=ours.head_dim,
        rms_norm_eps=ours.rms_norm_eps,
        max_position_embeddings=ours.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope_theta},
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
    )
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=ours.draft_vocab_size,
        norm_before_residual=False,
        norm_before_fc=ours.norm_before_fc,
        fc_norm=ours.fc_norm,
        norm_output=ours.norm_output,
        # vLLM's ids, like Hugging Face's, count the embeddings as 0
        eagle_aux_hidden_state_layer_ids=list(aux_layers),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=num_steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(
                name_or_path=str(target.folder), architectures=[target.architecture]
            ),
        ),
    )
    model = Eagle3DraftModel(config)
    tensors = {_theirs(name): tensor for name, tensor in drafter.state_dict().items()}
    if ours.draft_vocab_size == ours.vocab_size:  # then its class has no maps
        if tensors.pop("d2t").any():
            raise UserError(
                "speculators' format holds a whole vocabulary in the target's order only: set "
                "export.speculators=false"
            )
        del tensors["t2d"]
    result = model.load_state_dict(tensors, strict=False)
    missing = [k for k in result.missing_keys if not k.startswith("verifier_")]
    if missing or result.unexpected_keys:
        raise RuntimeError(
            f"speculators' model lacks {result.unexpected_keys} and wants {missing} besides"
        )
    torch.nn.Module.to(model, drafter.lm_head.weight.dtype)
    model.save_pretrained(str(folder))


def recognised(folder: Path) -> bool:
    """Whether a drafter folder is in this format."""
    return "speculators_model_type" in load_config(folder)


def load(folder: Path, target: Target) -> tuple[Drafter, list[int]]:
    """A drafter in float32 with the target's embeddings, and its canonical aux layers.

    Raises:
        UserError: the folder has problems, or is for a target of another shape.
    """
    config, tensors = _read(folder)
    aux_layers = load_config(folder).get(AUX_LAYERS) or layers.default(target.num_layers)
    return assemble(folder, config, tensors, target), aux_layers


def load_vocab(folder: Path, vocab_size: int) -> DraftVocab:
    """Draft vocabulary of a drafter folder.

    Raises:
        UserError: the folder has problems, or another target vocabulary.
    """
    config, tensors = _read(folder)
    if config.vocab_size != vocab_size:
        raise UserError(
            f"the drafter in {folder} is for {config.vocab_size} target tokens, not {vocab_size}"
        )
    return DraftVocab.from_d2t(tensors["d2t"], vocab_size)


def problems(folder: Path) -> list[str]:
    """What our drafter cannot be or hold, and what is missing or damaged; empty if nothing."""
    data = load_config(folder)
    try:
        if found := _config_problems(data):
            return found
        config = _config(data)
    except UNREADABLE as error:
        return [unreadable(error)]
    return tensor_problems(config, _tensors(folder, config))


def _read(folder: Path) -> tuple[DrafterConfig, dict[str, Tensor]]:
    refuse(folder, problems(folder))
    config = _config(load_config(folder))
    return config, _tensors(folder, config)


def _config(data: dict[str, Any]) -> DrafterConfig:
    """Shape of the drafter that a config.json describes."""
    layer = data["transformer_layer_config"]
    heads = layer["num_attention_heads"]
    return DrafterConfig(
        hidden_size=layer["hidden_size"],
        num_aux=len(data.get(AUX_LAYERS) or (2, 0, -3)),  # none named: speculators' three
        intermediate_size=layer["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=layer.get("num_key_value_heads") or heads,
        head_dim=layer.get("head_dim") or layer["hidden_size"] // heads,
        vocab_size=layer["vocab_size"],
        draft_vocab_size=data["draft_vocab_size"],
        max_position_embeddings=layer["max_position_embeddings"],
        num_layers=layer["num_hidden_layers"],
        rms_norm_eps=layer["rms_norm_eps"],
        rope_theta=rope_theta(layer),
        **{flag: data.get(flag, False) for flag in NORMS},
    )


def _tensors(folder: Path, config: DrafterConfig) -> dict[str, Tensor]:
    """By our names, without embeddings; a drafter of the whole vocabulary needs no maps."""
    tensors = {_ours(name): tensor for name, tensor in load_tensors(folder).items()}
    tensors.pop("embed_tokens.weight", None)
    return with_maps(tensors, config)


def _config_problems(data: dict[str, Any]) -> list[str]:
    found = []
    if data["speculators_model_type"] != "eagle3":
        found.append(f"speculators_model_type is {data['speculators_model_type']}, not eagle3")
    if data.get("norm_before_residual"):
        found.append("norm_before_residual: SGLang serves no such drafter")
    if data.get("embed_requires_grad"):
        found.append("embed_requires_grad: it has embeddings of its own, not the target's")
    layer = data.get("transformer_layer_config") or {}
    if layer.get("model_type") != "llama":
        found.append(f"its layers are those of {layer.get('model_type')}, not of llama")
    if layer.get("attention_bias") or layer.get("mlp_bias"):
        found.append("its layers have biases")
    if (act := layer.get("hidden_act", "silu")) != "silu":
        found.append(f"its activation is {act}, not silu")
    return found


def _theirs(name: str) -> str:
    """Their name of one of our tensors."""
    name = re.sub(r"^(layers\.\d+)\.hidden_norm\.", r"\1.input_layernorm.", name)
    return name.replace("midlayer.", "layers.0.")


def _ours(name: str) -> str:
    """Inverse of `_theirs`."""
    name = name.replace("layers.0.", "midlayer.")
    return re.sub(r"^(layers\.\d+)\.input_layernorm\.", r"\1.hidden_norm.", name)
