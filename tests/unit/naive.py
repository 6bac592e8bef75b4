"""The training objective written out plainly: every row at every step, explicit masks, no
pruning."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from eagle3.attention import reference
from eagle3.batch import Batch
from eagle3.drafter import Drafter
from eagle3.loss import LOSSES


def supervised(batch: Batch, step: int) -> list[int]:
    """Rows that `step` supervises, straight from the rule: x_{t+1}..x_{t+2+k} all generated."""
    rows = []
    bounds = batch.doc_starts.tolist()
    for start, end in zip(bounds, bounds[1:], strict=False):
        for t in range(start, end):
            wanted = range(t + 1, t + 3 + step)
            if wanted.stop <= end and all(batch.loss_mask[j] for j in wanted):
                rows.append(t)
    return rows


def naive_logits(drafter: Drafter, batch: Batch, num_steps: int) -> list[Tensor]:
    """Logits of all N rows at every step [N, V]; past a document's end they mean nothing."""
    rows = torch.arange(batch.num_rows)
    positions = batch.positions()
    hidden = drafter.fuse(batch.aux)
    layers = drafter.decoder_layers
    keys, values = [[] for _ in layers], [[] for _ in layers]
    all_logits = []
    for k in range(num_steps):
        tokens = drafter.token_states(batch.input_ids.roll(-1 - k))
        for i, layer in enumerate(layers):
            inputs = layer.inputs(tokens, hidden)
            q = layer.self_attn.queries(inputs, positions + k)
            key, value = layer.self_attn.keys_values(inputs, positions + k)
            keys[i].append(key)
            values[i].append(value)
            first, later = (keys[i][0], values[i][0]), (keys[i][1:], values[i][1:])
            mixed = reference(q, *first, *later, rows, batch.doc_starts)
            hidden = layer.finish(mixed, hidden)
        normed, hidden = drafter.outputs(hidden)
        all_logits.append(drafter.lm_head(normed))
    return all_logits


def naive_losses(
    drafter: Drafter, lm_head: Tensor, batch: Batch, num_steps: int, kind: str = "soft_ce"
) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Supervised rows of each step, their losses, and how many of them are accepted."""
    found, losses, accepted = [], [], []
    inside = drafter.vocab.target_ids
    alive = torch.ones(batch.num_rows, dtype=torch.bool)
    for k, logits in enumerate(naive_logits(drafter, batch, num_steps)):
        rows = torch.tensor(supervised(batch, k), dtype=torch.int64)
        target_logits = batch.final[batch.final_index[rows + 1 + k]] @ lm_head.T
        p = target_logits[:, inside].softmax(dim=-1)
        losses.append(LOSSES[kind](p, logits[rows].log_softmax(dim=-1)))
        alive[rows] &= inside[logits[rows].argmax(dim=-1)] == target_logits.argmax(dim=-1)
        found.append(rows)
        accepted.append(int(alive[rows].sum()))
    return found, losses, accepted


def naive_sums(
    drafter: Drafter, lm_head: Tensor, batch: Batch, num_steps: int, kind: str = "soft_ce"
) -> tuple[list[Tensor], list[int], list[int]]:
    """Summed loss, supervised rows and accepted rows of each step."""
    rows, losses, accepted = naive_losses(drafter, lm_head, batch, num_steps, kind)
    return [x.sum() for x in losses], [len(r) for r in rows], accepted


def naive_loss(
    drafter: Drafter, lm_head: Tensor, batch: Batch, weights: list[float], kind: str = "soft_ce"
) -> tuple[Tensor, list[int], list[int]]:
    """Loss with every step averaged over its rows, by their weights; supervised rows and accepted
    rows per step."""
    rows, losses, accepted = naive_losses(drafter, lm_head, batch, len(weights), kind)
    own = [1.0] * batch.num_rows if batch.row_weights is None else batch.row_weights.tolist()
    total = torch.zeros((), dtype=batch.aux.dtype)
    for weight, step_rows, step_losses in zip(weights, rows, losses, strict=True):
        factors = [own[t] for t in step_rows.tolist()]
        for factor, loss in zip(factors, step_losses, strict=True):
            total = total + weight * factor * loss / sum(factors)
    return total, [len(r) for r in rows], accepted


def documents(batch: Batch) -> list[Batch]:
    """Each document as a batch of its own."""
    found = []
    for start, end in pairwise(batch.doc_starts.tolist()):
        index = batch.final_index[start:end]
        needed = index >= 0
        found.append(
            Batch(
                input_ids=batch.input_ids[start:end],
                loss_mask=batch.loss_mask[start:end],
                doc_starts=torch.tensor([0, end - start]),
                aux=batch.aux[start:end],
                final=batch.final[index[needed]],
                final_index=torch.where(needed, needed.cumsum(0) - 1, -1),
                row_weights=None if batch.row_weights is None else batch.row_weights[start:end],
            )
        )
    return found
