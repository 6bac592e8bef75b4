"""A store of random hidden states and a target folder that fits it, for measuring training."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eagle3.manifest import Manifest
from eagle3.store.sample import Encoded, Sample
from eagle3.store.writer import KIND, StoreWriter
from eagle3.target import Target

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "rope_theta": 500000.0, "max_position_embeddings": 8192,
    },
    "smollm2-135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
        "rope_theta": 100000.0, "max_position_embeddings": 8192,
    },
}  # fmt: skip
"""Of targets, as transformers' LlamaConfig names them."""

LABELS = 0.58
"""Share of a document's tokens that the target generated."""


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def target_without_layers(folder: Path, shape: dict[str, Any], tokenizer: Path) -> Target:
    """What training reads of a Llama: its configuration, embeddings, last norm and lm_head.

    Args:
        tokenizer: folder whose tokenizer files make the target complete; no text is tokenized.
    """
    from transformers import LlamaConfig

    config = LlamaConfig(**shape, tie_word_embeddings=False, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    size = (shape["vocab_size"], shape["hidden_size"])
    torch.manual_seed(0)
    with device():
        tensors = {
            "model.embed_tokens.weight": torch.randn(size, dtype=torch.bfloat16) * 0.02,
            "model.norm.weight": torch.ones(size[1], dtype=torch.bfloat16),
            "lm_head.weight": torch.randn(size, dtype=torch.bfloat16) * size[1] ** -0.5,
        }
    save_file(
        {name: tensor.cpu() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    return Target(folder=folder)


def random_store(
    folder: Path, target: Target, codec: str, tokens: int, lengths: tuple[int, int]
) -> int:
    """Write documents of one turn with about `tokens` tokens in all; returns how many tokens."""
    aux_layers = target.aux_layers(None)
    match = {
        "codec": codec, "target": target.identity(), "aux_layers": aux_layers, "final": "post-norm",
    }  # fmt: skip
    writer = StoreWriter(folder, Manifest(kind=KIND, match=match), 1 << 29)
    rng, place, taken = random.Random(0), device(), 0
    while taken < tokens:
        length = rng.randint(*lengths)
        states = torch.randn(
            length, len(aux_layers) + 1, target.hidden_size, device=place, dtype=torch.bfloat16
        )
        encoded = Sample(
            id=str(writer.num_samples),
            input_ids=torch.randint(3, target.vocab_size, (length,)),
            loss_mask=torch.arange(length) >= round(length * (1 - LABELS)),
            aux=states[:, :-1].flatten(1),
            final=states[:, -1],
        ).encode(writer.codec)
        tensors = {name: tensor.cpu() for name, tensor in encoded.tensors.items()}
        writer.append(writer.num_samples, Encoded(id=encoded.id, tensors=tensors))
        taken += length
    writer.finish({})
    return taken
