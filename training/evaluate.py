"""Validation during training: loss, acceptance and simulated decoding of held-out samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle3.store.reader import StoreReader
from eagle3.ttt import TTTModel
from eagle3.walk import marginals, sample_histograms
from training.data import pack, prefetch
from training.finite import all_finite, require
from training.world import World


def summary(
    prefix: str, step_loss: Tensor, rows: Tensor, accepted: Tensor | None
) -> dict[str, Any]:
    """Metrics of summed counts: loss per step and in mean, and acceptance.

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
    finite = torch.ones((), dtype=torch.bool, device=world.device)
    for loaded in prefetch(reader, batches, world.device, dtype):
        finite &= all_finite(loaded)
        output = model(loaded.batch, scale, score=True)
        for total, part in zip(
            totals, (output.step_loss, output.rows, output.accepted), strict=True
        ):
            total += part
    finite &= torch.isfinite(totals[0]).all()
    require(finite, sum(batches, []), reader, world, "the validation loss")
    step_loss, rows, accepted = world.sum(totals)
    return summary("validation", step_loss, rows, accepted)


@torch.no_grad()
def simulate(
    model: TTTModel,
    reader: StoreReader,
    numbers: list[int],
    num_drafts: int,
    world: World,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Acceptance of these samples as `eval.offline` counts it, shared out over the ranks.

    Speculative decoding is replayed on each, so that only those positions count at which a server
    would have drafted.
    """
    histogram = torch.zeros(num_drafts + 1, dtype=torch.float64, device=world.device)
    for number in numbers[world.rank :: world.size]:
        ids, mask = reader.tokens(number)
        aux, _ = reader.states(number)
        found = sample_histograms(
            model.drafter, ids.tolist(), mask.int().tolist(), aux.to(world.device, dtype),
            num_drafts,
        )  # fmt: skip
        for one in found:
            histogram += histogram.new_tensor(one)
    marginal = marginals(world.sum(histogram).cpu().numpy()).tolist()
    values = {f"validation/simulated_acceptance_{k}": m for k, m in enumerate(marginal)}
    return values | {"validation/simulated_accept_length": 1 + sum(marginal)}
