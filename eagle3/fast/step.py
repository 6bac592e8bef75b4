"""The whole training step behind one autograd function.

To autograd, and to an engine such as DeepSpeed that hooks into it, it is one operation on the
drafter's parameters. Its forward also makes the gradients of the lm_head and of what goes into it,
since only there the logits exist.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from eagle3.batch import Batch
from eagle3.drafter import Drafter
from eagle3.fast.layout import Layout
from eagle3.fast.loss import lm_head_loss
from eagle3.fast.unroll import Unroll
from eagle3.loss import TeacherRows
from eagle3.ttt import TTTOutput

BLOCK = 4096
HEAD = "lm_head.weight"


@triton.jit
def _scale_kernel(x, factor, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32) * tl.load(factor)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < count)


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x * factor in `dtype`, rounded once; in place where x has that type.

    Args:
        factor: float32, of one element. (PyTorch would first round it to x's type.)
    """
    out = x if x.dtype == dtype else torch.empty_like(x, dtype=dtype)
    grid = (triton.cdiv(x.numel(), BLOCK),)
    _scale_kernel[grid](x, factor, out, x.numel(), BLOCK=BLOCK, num_warps=8)
    return out


def fast_ttt(
    drafter: Drafter,
    batch: Batch,
    taught: TeacherRows,
    step_weights: list[float],
    scale: Tensor,
    kind: str = "soft_ce",
    fp8: bool = False,
) -> TTTOutput:
    """What `eagle3.ttt.TTTModel.forward` returns, differentiable in the drafter's parameters.

    Args:
        taught: the teacher of `batch.final`; acceptance is counted where it has a top-1.
        scale: factor of each step's summed loss [K]. kind: one of `eagle3.loss.LOSSES`.
        fp8: the products of fc and the layer in fp8 (`fast.fp8`); the lm_head stays as it is.
    """
    layout = batch.layout
    if layout is None:
        raise ValueError("the batch has no layout: move it to its device with Batch.to")
    named = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
    weights = [scale[k].float() * weight for k, weight in enumerate(step_weights)]
    need_grad = torch.is_grad_enabled()
    loss, step_loss, top1 = _FastTTT.apply(
        drafter, batch, layout, taught, weights, kind, fp8, list(named), need_grad, *named.values()
    )
    counts = layout.counts(len(step_weights))
    accepted = None if taught.top1 is None else _accepted(batch, layout, taught.top1, top1, counts)
    return TTTOutput(loss=loss, step_loss=step_loss, rows=counts, accepted=accepted)


class _FastTTT(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        drafter: Drafter,
        batch: Batch,
        layout: Layout,
        taught: TeacherRows,
        weights: list[Tensor],
        kind: str,
        fp8: bool,
        names: list[str],
        need_grad: bool,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, summed loss of each step [K], and the drafter's choice in all rows [T]."""
        if not layout.sizes:  # nothing is supervised: no loss, and zeros as gradients
            ctx.unroll = None
            ctx.save_for_backward(*parameters)
            zeros = torch.zeros(len(weights), device=batch.input_ids.device)
            top1 = batch.input_ids.new_empty(0)
            ctx.mark_non_differentiable(zeros, top1)
            return zeros.sum(), zeros, top1
        unroll = Unroll(drafter, batch, layout, len(weights), fp8)
        states = unroll.forward()
        row_weights = torch.cat([w.expand(n) for w, n in zip(weights, layout.sizes, strict=False)])
        if batch.row_weights is not None:
            own = batch.row_weights[layout.rows]
            row_weights *= torch.cat([own[:n] for _, n in _steps(layout, len(weights))])
        row_loss, top1, grad_lm_head = lm_head_loss(
            states, drafter.lm_head.weight, taught.logits, _teacher_rows(batch, layout, unroll),
            row_weights, kind, need_grad, HEAD in names,
        )  # fmt: skip
        step_loss = torch.zeros(len(weights), device=states.device)
        for k, part in enumerate(unroll.parts):
            step_loss[k] = row_loss[part].sum()
        if need_grad:
            ctx.unroll, ctx.grad_states, ctx.grad_lm_head = unroll, states, grad_lm_head
            ctx.names, ctx.dtypes = names, [p.dtype for p in parameters]
        ctx.mark_non_differentiable(step_loss, top1)
        if batch.row_weights is None:
            loss = (step_loss * torch.stack(weights)).sum()
        else:
            loss = (row_loss * row_weights).sum()
        return loss, step_loss, top1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.unroll is None:
            return (*[None] * 9, *(torch.zeros_like(p) for p in ctx.saved_tensors))
        factor = grad_loss.float()
        grads = ctx.unroll.backward(scaled(ctx.grad_states, factor, ctx.grad_states.dtype))
        del ctx.unroll, ctx.grad_states
        dtypes = dict(zip(ctx.names, ctx.dtypes, strict=True))
        if HEAD in dtypes:
            grads[HEAD] = scaled(ctx.grad_lm_head, factor, dtypes[HEAD])
        del ctx.grad_lm_head
        return (*[None] * 9, *(grads[name].to(dtype) for name, dtype in dtypes.items()))


def _teacher_rows(batch: Batch, layout: Layout, unroll: Unroll) -> Tensor:
    """Row of the teacher for each row of all steps [T]."""
    return torch.cat(
        [batch.final_index[layout.rows[:n] + 1 + k] for k, n in _steps(layout, len(unroll.parts))]
    )


def _accepted(batch: Batch, layout: Layout, wanted: Tensor, top1: Tensor, counts: Tensor) -> Tensor:
    """Rows at which the drafts of steps 0..k all match the target's choice [K]."""
    accepted = torch.zeros_like(counts)
    matched = torch.ones_like(layout.rows, dtype=torch.bool)
    start = 0
    for k, n in _steps(layout, len(counts)):
        taught = wanted[batch.final_index[layout.rows[:n] + 1 + k]]
        matched[:n] &= top1[start : start + n] == taught
        accepted[k] = matched[:n].sum()
        start += n
    return accepted


def _steps(layout: Layout, num_steps: int) -> list[tuple[int, int]]:
    """Number and rows of each step that has any."""
    return list(enumerate(layout.sizes[:num_steps]))
