"""The training objective written out plainly: every row at every step, explicit masks, no
pruning."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3.attention import reference
from eagle3.batch import Batch
from eagle3.drafter import Drafter


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


def naive_loss(
    drafter: Drafter, lm_head: Tensor, batch: Batch, weights: list[float]
) -> tuple[Tensor, list[int], list[int]]:
    """Loss with every step averaged over its rows; supervised rows and accepted rows per step."""
    loss = torch.zeros((), dtype=batch.aux.dtype)
    alive = {t: True for t in range(batch.num_rows)}
    counts, accepted = [], []
    inside = drafter.vocab.target_ids
    for k, logits in enumerate(naive_logits(drafter, batch, len(weights))):
        rows = supervised(batch, k)
        total = torch.zeros((), dtype=batch.aux.dtype)
        hits = 0
        for t in rows:
            final = batch.final[batch.final_index[t + 1 + k]]
            target_logits = lm_head @ final
            p = target_logits[inside].softmax(-1)
            total = total - (p * logits[t].log_softmax(-1)).sum()
            alive[t] &= bool(inside[logits[t].argmax()] == target_logits.argmax())
            hits += alive[t]
        loss = loss + weights[k] * total / max(len(rows), 1)
        counts.append(len(rows))
        accepted.append(hits)
    return loss, counts, accepted
