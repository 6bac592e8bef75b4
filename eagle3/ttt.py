"""Training-time test: unroll the drafter on a packed batch as a server would run it, and score it.

At step k a row gets the embedding of the token k + 1 places on, and, from step 1 on, its own
previous output in place of the target's state. Only what some loss depends on is computed, which
changes nothing:

- step k needs the rows that it supervises (`batch`), a subset of step k - 1's;
- at step 0 every row gives keys and values, which depend on what enters the layer. With one layer
  that is the batch itself: other rows need no query, MLP or lm_head. With more, all but the last
  layer run on every row at step 0, since their outputs make the next layer's keys and values.

This is the definition; on a GPU `eagle3.fast` computes the same where it can.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eagle3 import fast
from eagle3.attention import Segment, segmented, segments
from eagle3.batch import Batch, depths
from eagle3.drafter import Drafter
from eagle3.errors import UserError
from eagle3.loss import Teacher, lm_head_loss

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Step:
    """One TTT step: its supervised rows [R] and the drafter's normed states there [R, H]."""

    rows: Tensor
    states: Tensor


@dataclass(kw_only=True, slots=True)
class TTTOutput:
    """Sums over one batch; divide after adding up batches and ranks.

    loss: what to differentiate; the only one in which the rows' weights count.
    step_loss: summed loss of each step [K]. rows: supervised rows of each step [K]. accepted: rows
    at which the drafts of steps 0..k all match the target's choice [K], None unless `score` was
    asked for.
    """

    loss: Tensor
    step_loss: Tensor
    rows: Tensor
    accepted: Tensor | None


class _Cache:
    """Keys and values that one layer's queries see (`attention`), as a server's cache holds them.

    Step-0 keys are of all rows [N, G, D]; own keys, one tensor a later step, of the step's rows.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.own_keys: list[Tensor] = []
        self.own_values: list[Tensor] = []

    def add(self, keys: Tensor, values: Tensor, keep: Tensor) -> None:
        """A new step's own keys; of earlier ones the rows `keep` go on."""
        self.own_keys = [*(x[keep] for x in self.own_keys), keys]
        self.own_values = [*(x[keep] for x in self.own_values), values]

    def attend(self, q: Tensor, pieces: list[Segment]) -> Tensor:
        """[R, Q, D] -> [R, Q, D]"""
        return segmented(q, self.keys, self.values, self.own_keys, self.own_values, pieces)


def unroll(drafter: Drafter, batch: Batch, num_steps: int) -> Iterator[Step]:
    """Yield each step's rows and states.

    A step without a supervised row is computed like any other, on zero rows: every rank then runs
    the same graph, so that gradients exist and come in the same order; ZeRO's buckets rely on it.
    """
    depth, positions = depths(batch), batch.positions()
    rows = (depth > 0).nonzero().flatten()
    tokens = drafter.token_states(batch.input_ids)
    hidden, caches = _first_step(drafter, batch, tokens, rows, positions)
    for k in range(num_steps):
        states, fed = drafter.outputs(hidden)
        yield Step(rows=rows, states=states)
        if k + 1 == num_steps:
            return
        keep = (depth[rows] > k + 1).nonzero().flatten()
        rows, hidden = rows[keep], fed[keep]
        pieces, at = segments(rows, batch.doc_starts), positions[rows] + k + 1
        for layer, cache in zip(drafter.decoder_layers, caches, strict=True):
            inputs = layer.inputs(tokens[rows + k + 2], hidden)
            cache.add(*layer.self_attn.keys_values(inputs, at), keep)
            mixed = cache.attend(layer.self_attn.queries(inputs, at), pieces)
            hidden = layer.finish(mixed, hidden)


def _first_step(
    drafter: Drafter, batch: Batch, tokens: Tensor, rows: Tensor, positions: Tensor
) -> tuple[Tensor, list[_Cache]]:
    """Last layer's output at `rows` [R, H] at step 0, and every layer's cache."""
    *below, last = drafter.decoder_layers
    # row t reads token t + 1; what a document's last row reads is never attended to
    tokens, hidden = tokens.roll(-1, dims=0), drafter.fuse(batch.aux)
    caches = []
    for layer in below:
        inputs = layer.inputs(tokens, hidden)
        caches.append(_Cache(*layer.self_attn.keys_values(inputs, positions)))
        everywhere = segments(torch.arange(batch.num_rows, device=rows.device), batch.doc_starts)
        mixed = caches[-1].attend(layer.self_attn.queries(inputs, positions), everywhere)
        hidden = layer.finish(mixed, hidden)
    inputs = last.inputs(tokens, hidden)
    caches.append(_Cache(*last.self_attn.keys_values(inputs, positions)))
    q = last.self_attn.queries(inputs[rows], positions[rows])
    mixed = caches[-1].attend(q, segments(rows, batch.doc_starts))
    return last.finish(mixed, hidden[rows]), caches


class TTTModel(nn.Module):
    """Drafter and teacher under one forward, which is what the DeepSpeed engine wraps."""

    def __init__(
        self,
        drafter: Drafter,
        teacher: Teacher,
        step_weights: list[float],
        loss: str = "soft_ce",
        fp8: bool = False,
    ) -> None:
        super().__init__()
        self.loss, self.fp8 = loss, fp8
        self.drafter = drafter
        self.teacher = teacher
        self.step_weights = step_weights
        self._told: set[str] = set()

    def forward(self, batch: Batch, scale: Tensor, score: bool) -> TTTOutput:
        """Loss sum_k w_k * scale_k * (sum of step k's losses, times the rows' weights).

        Args:
            scale: factor of each step's sum [K]; one over its `supervised_weight` gives the mean.
                The caller knows that of the whole optimizer step, over ranks and batches.
            score: also count accepted drafts, which costs the target's whole lm_head.

        Raises:
            UserError: fp8 was asked for and cannot be had.
        """
        num_steps = len(self.step_weights)
        device = batch.input_ids.device
        taught = self.teacher(batch.final, top1=score)
        fp8 = self.fp8 and torch.is_grad_enabled()  # validation measures what will be served
        if not self._obstacle(batch, fp8):
            from eagle3.fast.step import fast_ttt

            return fast_ttt(self.drafter, batch, taught, self.step_weights, scale, self.loss, fp8)
        step_loss = torch.zeros(num_steps, device=device)
        rows = torch.zeros(num_steps, dtype=torch.int64, device=device)
        accepted = torch.zeros(num_steps, dtype=torch.int64, device=device)
        matched = torch.ones(batch.num_rows, dtype=torch.bool, device=device)
        loss = torch.zeros((), device=device)
        for k, step in enumerate(unroll(self.drafter, batch, num_steps)):
            teacher_rows = batch.final_index[step.rows + 1 + k]
            summed, choice, step_loss[k] = lm_head_loss(
                step.states, self.drafter.lm_head.weight, taught.logits, teacher_rows, self.loss,
                None if batch.row_weights is None else batch.row_weights[step.rows],
            )  # fmt: skip
            loss = loss + self.step_weights[k] * scale[k] * summed
            rows[k] = step.rows.numel()
            if taught.top1 is not None:
                matched[step.rows] &= choice == taught.top1[teacher_rows]
                accepted[k] = matched[step.rows].sum()
        return TTTOutput(
            loss=loss, step_loss=step_loss, rows=rows, accepted=accepted if score else None
        )

    def _obstacle(self, batch: Batch, fp8: bool) -> str | None:
        """Why the plain path must do; told once on a GPU, where it is many times slower.

        Raises:
            UserError: fp8 was asked for, which only the fast path has.
        """
        found = fast.obstacle(self.drafter, batch, fp8)
        if found and fp8:
            raise UserError(f"train.fp8=true is not possible here: {found}")
        if found and batch.aux.is_cuda and found not in self._told:
            self._told.add(found)
            log.warning("training takes the slow path: %s", found)
        return found


def supervised_rows(batch: Batch, num_steps: int) -> Tensor:
    """Number of rows each step supervises [K], before anything is computed."""
    if batch.layout is not None:
        return batch.layout.counts(num_steps)
    depth = depths(batch)
    return torch.stack([(depth > k).sum() for k in range(num_steps)])


def supervised_weight(batch: Batch, num_steps: int) -> Tensor:
    """Sum of the weights of each step's supervised rows [K], float64: what makes a sum a mean."""
    if batch.row_weights is None:
        return supervised_rows(batch, num_steps).double()
    sums = torch.zeros(num_steps, dtype=torch.float64, device=batch.row_weights.device)
    if batch.layout is None:
        depth = depths(batch)
        parts = [batch.row_weights[depth > k] for k in range(num_steps)]
    else:  # which knows how many rows there are: nothing asks the GPU
        weights = batch.row_weights[batch.layout.rows]
        parts = [weights[:size] for size in batch.layout.sizes[:num_steps]]
    for k, part in enumerate(parts):
        sums[k] = part.sum(dtype=torch.float64)
    return sums
