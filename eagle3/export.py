"""Drafter folders in SGLang's format, both ways; `speculators_format` does speculators'.

A folder for SGLang holds config.json, model.safetensors and our manifest.json. SGLang drops weights
it does not know without a word and serves random ones in place of what is missing, so `problems`
looks for all of that beforehand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3 import provenance
from eagle3.drafter import NORMS, Drafter, DrafterConfig
from eagle3.drafter_folder import (
    UNREADABLE,
    WEIGHTS,
    load_config,
    load_tensors,
    refuse,
    tensor_problems,
    unreadable,
    with_maps,
)
from eagle3.errors import UserError
from eagle3.layers import from_sglang, to_sglang
from eagle3.manifest import NAME as MANIFEST
from eagle3.manifest import Manifest, write_json
from eagle3.target import Target
from eagle3.vocab import DraftVocab

KIND = "drafter"
ARCHITECTURE = "LlamaForCausalLMEagle3"


def sglang_config(
    config: DrafterConfig, aux_layers: list[int], target: Target, dtype: torch.dtype
) -> dict[str, Any]:
    """config.json of a drafter, every field spelled out, rope under both names."""
    dtype_name = str(dtype).removeprefix("torch.")
    eos = target.eos_ids
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": target.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "num_aux_hidden_states": config.num_aux,
        "tie_word_embeddings": False,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "bos_token_id": target.config.get("bos_token_id"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "dtype": dtype_name,
        "torch_dtype": dtype_name,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": to_sglang(aux_layers, target.architecture),
            "norm_before_fc": config.norm_before_fc,
        },
    }


def save_sglang(
    drafter: Drafter,
    folder: Path,
    target: Target,
    aux_layers: list[int],
    dtype: torch.dtype,
    manifest: Manifest,
) -> None:
    """Write a drafter folder that SGLang serves, then check it as a stranger would.

    Raises:
        RuntimeError: what was written has `problems` (a defect of ours).
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)  # of another drafter: it comes last, for all of it
    tensors = {
        name: tensor.detach().cpu().to(dtype if tensor.is_floating_point() else None).contiguous()
        for name, tensor in drafter.state_dict().items()
        if not name.startswith("embed_tokens.")
    }
    # before the weights, whose library would tell less of what the system refuses
    write_json(folder / "config.json", sglang_config(drafter.config, aux_layers, target, dtype))
    temporary = folder / f".{WEIGHTS}.tmp"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.rename(folder / WEIGHTS)
    manifest.inputs["weights"] = provenance.hash_file(folder / WEIGHTS)
    manifest.save(folder)
    if found := problems(folder):
        raise RuntimeError(f"the exported drafter in {folder} is wrong: {found}")


def drafter_config(data: dict[str, Any]) -> DrafterConfig:
    """Shape of the drafter that a config.json describes.

    Raises:
        UserError: its positions are scaled, or a size is none.
    """
    eagle = data.get("eagle_config") or {}
    num_aux = data.get("num_aux_hidden_states") or len(
        eagle.get("eagle_aux_hidden_state_layer_ids") or (0, 0, 0)
    )
    return DrafterConfig(
        hidden_size=data["hidden_size"],
        num_aux=num_aux,
        intermediate_size=data["intermediate_size"],
        num_attention_heads=data["num_attention_heads"],
        num_key_value_heads=data.get("num_key_value_heads") or data["num_attention_heads"],
        head_dim=data.get("head_dim") or data["hidden_size"] // data["num_attention_heads"],
        vocab_size=data["vocab_size"],
        draft_vocab_size=data.get("draft_vocab_size") or data["vocab_size"],
        max_position_embeddings=data["max_position_embeddings"],
        num_layers=data.get("num_hidden_layers", 1),
        rms_norm_eps=data["rms_norm_eps"],
        rope_theta=rope_theta(data),
        norm_before_fc=bool(eagle.get("norm_before_fc", data.get("norm_before_fc", False))),
        fc_norm=bool(data.get("fc_norm", False)),
        norm_output=bool(data.get("norm_output", False)),
    )


def rope_theta(data: dict[str, Any]) -> float:
    """Base of the rotary positions of a Llama config, under either name.

    Raises:
        UserError: they are scaled.
    """
    scaling, rope = data.get("rope_scaling") or {}, data.get("rope_parameters") or {}
    for found in (scaling, rope):
        kind = found.get("rope_type", found.get("type", "default"))
        if kind != "default" or (found.get("factor") or 1) != 1:
            raise UserError(f"rope_type {kind}: only drafters with unscaled positions are read")
    if (part := rope.get("partial_rotary_factor", data.get("partial_rotary_factor", 1))) != 1:
        raise UserError(f"partial_rotary_factor {part}: only drafters that rotate all are read")
    return rope.get("rope_theta") or data.get("rope_theta") or 10000.0


def load_sglang(folder: Path, target: Target) -> tuple[Drafter, list[int]]:
    """A drafter in float32 with the target's embeddings, and its canonical aux layers.

    Raises:
        UserError: the folder has problems, or is for a target of another shape.
    """
    data = load_config(folder)
    refuse(folder, problems(folder))
    config = drafter_config(data)
    drafter = assemble(folder, config, _tensors(folder, config), target)
    ids = data["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    return drafter, from_sglang(ids, target.architecture)


def assemble(
    folder: Path, config: DrafterConfig, tensors: dict[str, Tensor], target: Target
) -> Drafter:
    """A drafter in float32 of checked tensors, with the target's embeddings.

    Raises:
        UserError: it is for a target of another shape.
    """
    found = (config.hidden_size, config.vocab_size)
    if found != (target.hidden_size, target.vocab_size):
        raise UserError(
            f"the drafter in {folder} is for a target of hidden size {found[0]} and {found[1]} "
            f"tokens; {target.folder} has {target.hidden_size} and {target.vocab_size}"
        )
    drafter = Drafter(config)
    drafter.load_state_dict({**tensors, "embed_tokens.weight": target.embeddings()}, strict=True)
    return drafter.float().eval()


def trained_samples(facts: dict[str, Any], num_samples: int) -> list[int]:
    """Those of a store's samples that a run, or its drafter, whose manifest has these facts was
    trained on."""
    others = {*facts["validation_samples"], *facts.get("left_out_samples", [])}
    return [number for number in range(num_samples) if number not in others]


def load_vocab(folder: Path, vocab_size: int) -> DraftVocab:
    """Draft vocabulary of a drafter folder.

    Raises:
        UserError: the folder has problems, or another target vocabulary.
    """
    refuse(folder, problems(folder))
    config = drafter_config(load_config(folder))
    if (found := config.vocab_size) != vocab_size:
        raise UserError(f"the drafter in {folder} is for {found} target tokens, not {vocab_size}")
    return DraftVocab.from_d2t(_tensors(folder, config)["d2t"], vocab_size)


def norms_of(folder: Path) -> list[str]:
    """The norm switches that this drafter was trained with; a server has to know them."""
    config = drafter_config(load_config(folder))
    return [name for name in NORMS if getattr(config, name)]


def problems(folder: Path) -> list[str]:
    """What would make SGLang serve this folder wrongly or not at all; empty if nothing."""
    data = load_config(folder)
    found: list[str] = []
    try:
        found += _config_problems(data)
        config = drafter_config(data)
    except UNREADABLE as error:
        return [*found, unreadable(error)]
    if config.hidden_size % config.num_attention_heads:
        found.append("num_attention_heads does not divide hidden_size, which SGLang does not read")
    # SGLang loads every such file of the folder, whatever its name
    others = sorted(f.name for f in folder.glob("*.safetensors") if f.name != WEIGHTS)
    found += [f"{name} beside {WEIGHTS} would be loaded as well" for name in others]
    return found + tensor_problems(config, _tensors(folder, config))


def _config_problems(data: dict[str, Any]) -> list[str]:
    found = []
    if data.get("architectures") != [ARCHITECTURE]:
        found.append(f"architectures is {data.get('architectures')}, not [{ARCHITECTURE!r}]")
    eagle = data.get("eagle_config") or {}
    ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    if not ids:
        found.append(
            "eagle_config.eagle_aux_hidden_state_layer_ids is missing: add the layers that the "
            "drafter was trained on, in SGLang's numbering"
        )
    elif len(set(ids)) != len(ids) or not all(isinstance(k, int) for k in ids):
        found.append(f"eagle_aux_hidden_state_layer_ids={ids} are not distinct layers")
    elif data.get("num_aux_hidden_states", len(ids)) != len(ids):
        found.append("num_aux_hidden_states disagrees with the number of aux layers")
    rope = (data.get("rope_parameters") or {}).get("rope_theta", data.get("rope_theta"))
    if rope != data.get("rope_theta"):
        found.append(f"rope_theta is {data.get('rope_theta')} and {rope} in rope_parameters")
    if data.get("tie_word_embeddings"):
        found.append("tie_word_embeddings would replace lm_head by the embeddings")
    if data.get("attention_bias"):
        found.append("attention_bias would add biases that no tensor fills")
    if (act := data.get("hidden_act", "silu")) != "silu":
        found.append(f"hidden_act is {act}; SGLang's drafter has silu only")
    if data.get("norm_before_residual"):
        found.append("norm_before_residual is nothing that SGLang's drafter does")
    if data.get("bias"):
        found.append("bias would add biases that no tensor fills")
    if not data.get("rope_is_neox_style", True):
        found.append("rope_is_neox_style=false: our drafter rotates halves")
    if "norm_before_fc" in eagle and eagle["norm_before_fc"] != data.get(
        "norm_before_fc", eagle["norm_before_fc"]
    ):
        found.append("norm_before_fc disagrees with that of eagle_config")
    return found


def _tensors(folder: Path, config: DrafterConfig) -> dict[str, Tensor]:
    """By our names; newer checkpoints call the first layer `layers.0`."""
    tensors = load_tensors(folder)
    ours = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    return with_maps(ours, config)
