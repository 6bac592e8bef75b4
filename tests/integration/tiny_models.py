"""Tiny random targets of the families that SGLang can capture, saved as a user's would be.

Weights are random and norm weights are not 1, so that a state taken before or after a norm, or one
layer off, differs. All fit the tokenizer of the tiny target that ships with the tests.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

KIMI = "KimiK25ForConditionalGeneration"
TOKENIZER = Path(__file__).parents[1] / "assets" / "tiny-gsm-llama"
VOCAB = 2048
COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.1,
    tie_word_embeddings=False, bos_token_id=0, eos_token_id=1, pad_token_id=1,
)  # fmt: skip
YARN: dict[str, Any] = dict(
    rope_type="yarn", rope_theta=10000.0, factor=4.0, beta_fast=32.0, beta_slow=1.0, mscale=1.0,
    mscale_all_dim=1.0, original_max_position_embeddings=512,
)  # fmt: skip
MLA: dict[str, Any] = dict(
    num_key_value_heads=4, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16,
    qk_rope_head_dim=8, v_head_dim=16,
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(
    moe_intermediate_size=32, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
    n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.5,
    first_k_dense_replace=1,
)  # fmt: skip
"""A dense layer, then mixtures of experts."""

SHAPES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": dict(sliding_window=None),
    "Phi3ForCausalLM": {},
    "Qwen2ForCausalLM": dict(use_sliding_window=False),
    "Qwen3ForCausalLM": dict(head_dim=32),
    "Qwen3MoeForCausalLM": dict(
        head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        norm_topk_prob=True, decoder_sparse_step=1,
    ),
    "Glm4MoeForCausalLM": dict(**EXPERTS, head_dim=32, use_qk_norm=True, attention_bias=True),
    # Hugging Face gives its inner norms an epsilon of 1e-6 whatever rms_norm_eps says
    "Glm4MoeLiteForCausalLM": dict(**MLA, **EXPERTS, rms_norm_eps=1e-6),
    # Hugging Face's class never normalises the experts' weights, and has no yarn scale in attention
    "DeepseekV2ForCausalLM": {
        **MLA, **EXPERTS, "topk_method": "greedy", "norm_topk_prob": False,
        "rope_parameters": {**YARN, "mscale": 0.0, "mscale_all_dim": 0.0, "attention_factor": 1.0},
    },
    "DeepseekV3ForCausalLM": dict(**MLA, **EXPERTS, rope_parameters=YARN),
}  # fmt: skip
SHAPES[KIMI] = SHAPES["DeepseekV3ForCausalLM"]
DROPPED: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": dict(moe_layer_freq=1, ep_size=1, scoring_func="softmax"),
    "DeepseekV3ForCausalLM": dict(
        moe_layer_freq=1, ep_size=1, scoring_func="sigmoid", topk_method="noaux_tc",
        num_nextn_predict_layers=0,
    ),
}  # fmt: skip
"""Keys of real checkpoints that SGLang reads and Hugging Face's classes drop when they save."""


def build(
    folder: Path, architecture: str, num_layers: int = 6, seed: int = 0, **changes: Any
) -> transformers.PreTrainedModel:
    """Save a random float32 model of this architecture, with a tokenizer.

    changes: to the shape.

    Returns Hugging Face's model with the same weights; for Kimi, that of its language model.
    """
    kind = "DeepseekV3ForCausalLM" if architecture == KIMI else architecture
    model_class = getattr(transformers, kind)
    shape = {**COMMON, **SHAPES[architecture], "num_hidden_layers": num_layers}
    shape |= changes
    torch.manual_seed(seed)
    model = model_class(model_class.config_class(**shape)).float().eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                tensor.add_(torch.randn_like(tensor) * 0.2)
            elif name.endswith("e_score_correction_bias"):
                tensor.copy_(torch.randn_like(tensor) * 0.01)
            elif name.endswith("bias"):
                tensor.copy_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.update(DROPPED.get(kind, {}))
    if architecture == KIMI:
        config = _wrap_as_kimi(folder, config)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)
    return model


def _wrap_as_kimi(folder: Path, text: dict[str, Any]) -> dict[str, Any]:
    """Rename the tensors, and nest the configuration beside a vision tower's.

    `language_model_only` spares an image processor; the forward goes through the wrapper anyway.
    """
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    tower = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    vision = {**tower, **{f"vt_{name}": value for name, value in tower.items()}}
    return dict(
        architectures=[KIMI], model_type="kimi_k25", text_config=text, language_model_only=True,
        vision_config={**vision, "mm_hidden_size": 32, "text_hidden_size": text["hidden_size"]},
        dtype="float32", bos_token_id=0, eos_token_id=1, pad_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
