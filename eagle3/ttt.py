"""Training-time test: unroll the drafter on a packed batch as a server would run it, and score it.

At step k a row gets the embedding of the token k + 1 places on, and, from step 1 on, its own
previous output in place of the target's state. Only the rows that step k supervises are computed
(`batch`),
which is exact with a single layer: step-0 keys and values depend on inputs alone, so rows without
queries contribute theirs all the same. This is the definition; on a GPU `eagle3.fast` computes the
same where it can.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eagle3 import fast
from eagle3.attention import segmented, segments
from eagle3.batch import Batch, depths
from eagle3.drafter import Drafter
from eagle3.loss import Teacher, lm_head_loss


@dataclass(kw_only=True, slots=True)
class Step:
    """One TTT step: its supervised rows [R] and the drafter's normed states there [R, H]."""

    rows: Tensor
    states: Tensor


@dataclass(kw_only=True, slots=True)
class TTTOutput:
    """Sums over one batch; divide after adding up batches and ranks.

    loss: what to differentiate. step_loss: summed loss of each step [K].
    rows: supervised rows of each step [K]. accepted: rows at which the drafts of steps 0..k all
    match the target's choice [K], None unless `score` was asked for.
    """

    loss: Tensor
    step_loss: Tensor
    rows: Tensor
    accepted: Tensor | None


def unroll(drafter: Drafter, batch: Batch, num_steps: int) -> Iterator[Step]:
    """Yield each step's rows and states.

    A step without a supervised row is computed like any other, on zero rows: every rank then runs
    the same graph, so that gradients exist and come in the same order; ZeRO's buckets rely on it.
    """
    layer = drafter.midlayer
    depth = depths(batch)
    positions = batch.positions()
    rows = (depth > 0).nonzero().flatten()
    tokens = drafter.token_states(batch.input_ids)
    fused = drafter.fuse(batch.aux)
    # row t reads token t + 1; what a document's last row reads is never attended to
    inputs = layer.inputs(tokens.roll(-1, dims=0), fused)
    keys, values = layer.self_attn.keys_values(inputs, positions)
    hidden, inputs = fused[rows], inputs[rows]
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    for k in range(num_steps):
        at = positions[rows] + k
        q = layer.self_attn.queries(inputs, at)
        if k > 0:
            own_key, own_value = layer.self_attn.keys_values(inputs, at)
            own_keys.append(own_key)
            own_values.append(own_value)
        mixed = segmented(q, keys, values, own_keys, own_values, segments(rows, batch.doc_starts))
        states, fed = drafter.outputs(layer.finish(mixed, hidden))
        yield Step(rows=rows, states=states)
        keep = (depth[rows] > k + 1).nonzero().flatten()
        rows, hidden = rows[keep], fed[keep]
        own_keys = [x[keep] for x in own_keys]
        own_values = [x[keep] for x in own_values]
        inputs = layer.inputs(tokens[rows + k + 2], hidden)


class TTTModel(nn.Module):
    """Drafter and teacher under one forward, which is what the DeepSpeed engine wraps."""

    def __init__(
        self,
        drafter: Drafter,
        teacher: Teacher,
        step_weights: list[float],
        loss: str = "soft_ce",
    ) -> None:
        super().__init__()
        self.loss = loss
        self.drafter = drafter
        self.teacher = teacher
        self.step_weights = step_weights

    def forward(self, batch: Batch, scale: Tensor, score: bool) -> TTTOutput:
        """Loss sum_k w_k * scale_k * (summed loss of step k).

        Args:
            scale: factor of each step's sum [K]; one over its supervised rows gives the mean. The
                caller knows how many there are in the whole optimizer step, over ranks and batches.
            score: also count accepted drafts, which costs the target's whole lm_head.
        """
        num_steps = len(self.step_weights)
        device = batch.input_ids.device
        taught = self.teacher(batch.final, top1=score)
        if self.loss == "soft_ce" and fast.supported(self.drafter, batch):
            from eagle3.fast.step import fast_ttt

            return fast_ttt(self.drafter, batch, taught, self.step_weights, scale)
        step_loss = torch.zeros(num_steps, device=device)
        rows = torch.zeros(num_steps, dtype=torch.int64, device=device)
        accepted = torch.zeros(num_steps, dtype=torch.int64, device=device)
        matched = torch.ones(batch.num_rows, dtype=torch.bool, device=device)
        loss = torch.zeros((), device=device)
        for k, step in enumerate(unroll(self.drafter, batch, num_steps)):
            teacher_rows = batch.final_index[step.rows + 1 + k]
            summed, choice = lm_head_loss(
                step.states, self.drafter.lm_head.weight, taught.logits, teacher_rows, self.loss
            )
            loss = loss + self.step_weights[k] * scale[k] * summed
            step_loss[k] = summed.detach()
            rows[k] = step.rows.numel()
            if taught.top1 is not None:
                matched[step.rows] &= choice == taught.top1[teacher_rows]
                accepted[k] = matched[step.rows].sum()
        return TTTOutput(
            loss=loss, step_loss=step_loss, rows=rows, accepted=accepted if score else None
        )


def supervised_rows(batch: Batch, num_steps: int) -> Tensor:
    """Number of rows each step supervises [K], before anything is computed."""
    if batch.layout is not None:
        return batch.layout.counts(num_steps)
    depth = depths(batch)
    return torch.stack([(depth > k).sum() for k in range(num_steps)])
