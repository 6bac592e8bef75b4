"""Random ragged batches for `bench/train.py`."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from eagle3.batch import Batch, needed_final
from eagle3.drafter import DrafterConfig

LLAMA_8B = DrafterConfig(
    hidden_size=4096, num_aux=3, intermediate_size=14336, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, vocab_size=128256, draft_vocab_size=32000,
    max_position_embeddings=8192, rope_theta=500000.0,
)  # fmt: skip
"""A drafter for Llama-3.1-8B."""


def document_masks(tokens: int, generator: np.random.Generator) -> list[np.ndarray]:
    """Loss masks of documents with `tokens` rows in all."""
    masks: list[np.ndarray] = []
    longest = max(64, tokens // 4)
    while (room := tokens - sum(map(len, masks))) >= min(64, tokens // 4):
        length = int(np.clip(generator.lognormal(np.log(tokens / 16) - 0.32, 0.8), 64, longest))
        length = min(length, room)
        num_turns = int(generator.integers(1, 4)) if length > 80 else 1
        inner = generator.choice(np.arange(8, length - 8), num_turns - 1, replace=False)
        mask = np.zeros(length, dtype=bool)
        for start, end in pairwise([0, *sorted(inner.tolist()), length]):
            share = np.clip(generator.normal(0.6, 0.1), 0.3, 0.9)
            mask[end - max(1, round((end - start) * share)) : end] = True
        masks.append(mask)
    return masks


def make_batch(masks: list[np.ndarray], config: DrafterConfig, device: str, seed: int) -> Batch:
    """Random tokens and states for these documents."""
    mask = torch.from_numpy(np.concatenate(masks))
    needed = torch.cat([needed_final(torch.from_numpy(m)) for m in masks])
    generator = torch.Generator(device).manual_seed(seed)
    ids = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def states(rows: int, width: int) -> torch.Tensor:
        return torch.randn(rows, width, device=device, dtype=dtype, generator=generator)

    batch = Batch(
        input_ids=torch.randint(0, config.vocab_size, (len(mask),), generator=ids),
        loss_mask=mask,
        doc_starts=torch.tensor([0, *map(len, masks)]).cumsum(0),
        aux=states(len(mask), config.num_aux * config.hidden_size),
        final=states(int(needed.sum()), config.hidden_size),
        final_index=torch.where(needed, needed.cumsum(0) - 1, -1),
    )
    return batch.to(device, dtype)


def make_batches(tokens: int, count: int, config: DrafterConfig, device: str) -> list[Batch]:
    """The micro-batches that every benchmark of the training step takes."""
    generator = np.random.default_rng(7)
    masks = [document_masks(tokens, generator) for _ in range(count)]
    return [make_batch(m, config, device, seed=i) for i, m in enumerate(masks)]
