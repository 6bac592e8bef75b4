"""Random ragged batches for `bench/train.py`, and the work that training on one takes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from eagle3.batch import Batch, depths, needed_final
from eagle3.drafter import DrafterConfig


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
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def states(rows: int, width: int) -> torch.Tensor:
        return torch.randn(rows, width, device=device, dtype=dtype, generator=generator)

    batch = Batch(
        input_ids=torch.randint(0, config.vocab_size, (len(mask),), device="cpu"),
        loss_mask=mask,
        doc_starts=torch.tensor([0, *map(len, masks)]).cumsum(0),
        aux=states(len(mask), config.num_aux * config.hidden_size),
        final=states(int(needed.sum()), config.hidden_size),
        final_index=torch.where(needed, needed.cumsum(0) - 1, -1),
    )
    return batch.to(device, dtype)


def useful_flops(batch: Batch, config: DrafterConfig, num_steps: int) -> float:
    """Operations that a step has to do, whatever a system does.

    Per batch of N rows of which R_k are supervised at step k, T of them in all steps, with hidden
    size H, A aux states, intermediate size I, query width Q, key and value width E, draft
    vocabulary V, and P_k visible (query, key) pairs at step k:

        fc                4 A H^2 N               forward and weight gradient; the inputs need none
        token half        4 H (Q + 2E) N          once, forward and weight gradient
        step-0 keys       6 H 2E N                hidden half, forward and both gradients
        queries and on    6 (H Q + Q H + 3 H I) T
        own keys          6 H 2E (T - R_0)
        lm_head           6 H V T
        teacher           2 H V M                 M rows with a teacher
        attention         14 Q sum_k P_k          forward 4, backward 10 (with its scores again)
    """
    depth, positions = depths(batch), batch.positions()
    steps = [depth > k for k in range(num_steps)]
    n, total, first = batch.num_rows, sum(int(s.sum()) for s in steps), int(steps[0].sum())
    pairs = sum(int((positions[s] + 1 + k).sum()) for k, s in enumerate(steps))
    h, v, i = config.hidden_size, config.draft_vocab_size, config.intermediate_size
    q = config.num_attention_heads * config.head_dim
    e = config.num_key_value_heads * config.head_dim
    return (
        4 * config.num_aux * h * h * n
        + 4 * h * (q + 2 * e) * n
        + 6 * h * 2 * e * n
        + 6 * (2 * h * q + 3 * h * i) * total
        + 6 * h * 2 * e * (total - first)
        + 6 * h * v * total
        + 2 * h * v * batch.final.shape[0]
        + 14 * q * pairs
    )
