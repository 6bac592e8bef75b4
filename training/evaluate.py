"""Validation during training: the loss and acceptance of held-out samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle3.store.reader import StoreReader
from eagle3.ttt import TTTModel
from training.data import pack, prefetch
from training.engine import World


def summary(
    prefix: str, step_loss: Tensor, rows: Tensor, accepted: Tensor | None
) -> dict[str, Any]:
    """Metrics of summed counts: loss per step and in mean, and acceptance as DESIGN defines it.

    marginal_k is the share of drafting rows whose drafts 0..k all match the target's choice (a
    target token outside the draft vocabulary never matches); conditional_k = marginal_k /
    marginal_{k-1}; accept length = 1 + the sum of marginals.
    """
    means = (step_loss / rows.clamp(min=1)).tolist()
    values: dict[str, Any] = {f"{prefix}/loss": sum(means) / len(means)}
    values |= {f"{prefix}/loss_{k}": mean for k, mean in enumerate(means)}
    if accepted is not None:
        marginal = (accepted / rows[0].clamp(min=1)).tolist()
        before = [1.0, *marginal[:-1]]
        values |= {f"{prefix}/acceptance_{k}": m for k, m in enumerate(marginal)}
        values |= {
            f"{prefix}/conditional_{k}": m / b if b else 0.0
            for k, (m, b) in enumerate(zip(marginal, before, strict=True))
        }
        values[f"{prefix}/accept_length"] = 1 + sum(marginal)
    return values


@torch.no_grad()
def validate(
    model: TTTModel,
    reader: StoreReader,
    numbers: list[int],
    tokens_per_batch: int,
    num_steps: int,
    world: World,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Metrics over the validation samples, shared out over the ranks."""
    totals = torch.zeros(3, num_steps, dtype=torch.float64, device=world.device)
    batches = pack(numbers, reader.lengths, tokens_per_batch)[world.rank :: world.size]
    scale = torch.zeros(num_steps, device=world.device)
    for batch in prefetch(reader, batches, world.device, dtype):
        output = model(batch, scale, score=True)
        for total, part in zip(
            totals, (output.step_loss, output.rows, output.accepted), strict=True
        ):
            total += part
    step_loss, rows, accepted = world.sum(totals)
    return summary("validation", step_loss, rows, accepted)
