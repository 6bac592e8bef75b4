"""Drafter folders: SGLang's format both ways, speculators' format by speculators itself.

A folder for SGLang holds config.json, model.safetensors and our manifest.json. SGLang drops weights
it does not know without a word and serves random ones in place of what is missing, so `problems`
looks for all of that beforehand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3 import provenance
from eagle3.drafter import Drafter, DrafterConfig
from eagle3.errors import UserError
from eagle3.layers import from_sglang, to_sglang
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
        "num_hidden_layers": 1,
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
    tensors = {
        name: tensor.detach().cpu().to(dtype if tensor.is_floating_point() else None).contiguous()
        for name, tensor in drafter.state_dict().items()
        if not name.startswith("embed_tokens.")
    }
    temporary = folder / ".model.safetensors.tmp"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.rename(folder / "model.safetensors")
    write_json(folder / "config.json", sglang_config(drafter.config, aux_layers, target, dtype))
    manifest.inputs["weights"] = provenance.hash_file(folder / "model.safetensors")
    manifest.save(folder)
    if found := problems(folder):
        raise RuntimeError(f"the exported drafter in {folder} is wrong: {found}")


def load_config(folder: Path) -> dict[str, Any]:
    """config.json of a drafter folder.

    Raises:
        UserError: there is none.
    """
    path = folder / "config.json"
    if not path.exists():
        raise UserError(f"{folder} holds no drafter: no config.json")
    return json.loads(path.read_text())


def drafter_config(data: dict[str, Any]) -> DrafterConfig:
    """Shape of the drafter that a config.json describes."""
    eagle = data.get("eagle_config") or {}
    rope = data.get("rope_parameters") or {}
    num_aux = data.get("num_aux_hidden_states") or len(
        eagle.get("eagle_aux_hidden_state_layer_ids") or (0, 0, 0)
    )
    return DrafterConfig(
        hidden_size=data["hidden_size"],
        num_aux=num_aux,
        intermediate_size=data["intermediate_size"],
        num_attention_heads=data["num_attention_heads"],
        num_key_value_heads=data.get("num_key_value_heads", data["num_attention_heads"]),
        head_dim=data.get("head_dim") or data["hidden_size"] // data["num_attention_heads"],
        vocab_size=data["vocab_size"],
        draft_vocab_size=data.get("draft_vocab_size") or data["vocab_size"],
        max_position_embeddings=data["max_position_embeddings"],
        rms_norm_eps=data["rms_norm_eps"],
        rope_theta=rope.get("rope_theta") or data.get("rope_theta") or 10000.0,
        norm_before_fc=bool(eagle.get("norm_before_fc", data.get("norm_before_fc", False))),
        fc_norm=bool(data.get("fc_norm", False)),
        norm_output=bool(data.get("norm_output", False)),
    )


def load_sglang(folder: Path, target: Target) -> tuple[Drafter, list[int]]:
    """A drafter in float32 with the target's embeddings, and its canonical aux layers.

    Raises:
        UserError: the folder has problems.
    """
    data = load_config(folder)
    if found := problems(folder):
        raise UserError(f"the drafter in {folder} cannot be used:\n  " + "\n  ".join(found))
    drafter = Drafter(drafter_config(data))
    tensors = {k.replace("layers.0.", "midlayer."): v for k, v in _tensors(folder).items()}
    tensors["embed_tokens.weight"] = target.embeddings()
    drafter.load_state_dict(tensors, strict=True)
    ids = data["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    return drafter.float().eval(), from_sglang(ids, target.architecture)


def load_vocab(folder: Path, vocab_size: int) -> DraftVocab:
    """Draft vocabulary of a drafter folder.

    Raises:
        UserError: the folder has problems, or another target vocabulary.
    """
    if found := problems(folder):
        raise UserError(f"the drafter in {folder} cannot be used:\n  " + "\n  ".join(found))
    if load_config(folder)["vocab_size"] != vocab_size:
        raise UserError(f"the drafter in {folder} is for another vocabulary than {vocab_size}")
    return DraftVocab.from_d2t(_tensors(folder)["d2t"], vocab_size)


def problems(folder: Path) -> list[str]:
    """What would make SGLang serve this folder wrongly or not at all; empty if nothing."""
    data = load_config(folder)
    if not (folder / "model.safetensors").exists():
        return ["no model.safetensors"]
    found = _config_problems(data)
    try:
        config = drafter_config(data)
    except (KeyError, ValueError) as error:
        return [*found, f"config.json: {error}"]
    with torch.device("meta"):
        expected = Drafter(config).state_dict()
    tensors = {k.replace("layers.0.", "midlayer."): v for k, v in _tensors(folder).items()}
    for name, like in expected.items():
        if name.startswith("embed_tokens."):
            continue
        if name not in tensors:
            found.append(f"missing tensor {name}")
        elif tensors[name].shape != like.shape:
            found.append(f"{name} is {list(tensors[name].shape)}, not {list(like.shape)}")
        else:
            found += _value_problems(name, tensors[name])
    found += [f"extra tensor {n}" for n in tensors.keys() - expected.keys()]
    if not found:
        found += _vocab_problems(tensors["d2t"], tensors["t2d"])
    return found


def _config_problems(data: dict[str, Any]) -> list[str]:
    found = []
    if data.get("architectures") != [ARCHITECTURE]:
        found.append(f"architectures is {data.get('architectures')}, not [{ARCHITECTURE!r}]")
    if data.get("num_hidden_layers") != 1:
        found.append(f"num_hidden_layers is {data.get('num_hidden_layers')}, not 1")
    eagle = data.get("eagle_config") or {}
    ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    if not ids:
        found.append("eagle_config.eagle_aux_hidden_state_layer_ids is missing")
    elif data.get("num_aux_hidden_states", len(ids)) != len(ids):
        found.append("num_aux_hidden_states disagrees with the number of aux layers")
    rope = (data.get("rope_parameters") or {}).get("rope_theta", data.get("rope_theta"))
    if rope != data.get("rope_theta"):
        found.append(f"rope_theta is {data.get('rope_theta')} and {rope} in rope_parameters")
    if data.get("tie_word_embeddings"):
        found.append("tie_word_embeddings would replace lm_head by the embeddings")
    return found


def _value_problems(name: str, tensor: Tensor) -> list[str]:
    if tensor.is_floating_point():
        if not torch.isfinite(tensor).all():
            return [f"{name} is not finite"]
        if not tensor.any():
            return [f"{name} is all zero"]
    return []


def _vocab_problems(d2t: Tensor, t2d: Tensor) -> list[str]:
    ids = d2t.long() + torch.arange(d2t.numel())
    if ids.min() < 0 or ids.max() >= t2d.numel() or ids.unique().numel() != ids.numel():
        return ["d2t does not give distinct target ids"]
    mask = torch.zeros_like(t2d, dtype=torch.bool)
    mask[ids] = True
    return [] if torch.equal(mask, t2d.bool()) else ["t2d disagrees with d2t"]


def _tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def save_speculators(
    drafter: Drafter, folder: Path, target: Target, aux_layers: list[int], num_steps: int
) -> None:
    """Write speculators' format (which vLLM serves) through speculators' own model class.

    Raises:
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
        num_hidden_layers=1,
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
    tensors = {k.replace("midlayer.", "layers.0."): v for k, v in drafter.state_dict().items()}
    result = model.load_state_dict(tensors, strict=False)
    missing = [k for k in result.missing_keys if not k.startswith("verifier_")]
    if missing or result.unexpected_keys:
        raise RuntimeError(
            f"speculators' model lacks {result.unexpected_keys} and wants {missing} besides"
        )
    torch.nn.Module.to(model, drafter.lm_head.weight.dtype)
    model.save_pretrained(str(folder))
