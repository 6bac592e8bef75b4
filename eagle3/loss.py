"""Teacher and training losses, on the draft vocabulary.

A loss compares the teacher p, the target's distribution restricted to the draft vocabulary and
renormalised, with the drafter q; `LOSSES` defines them. Letters in shapes: R rows, H hidden size, V
draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from eagle3.vocab import DraftVocab

CHUNK_ROWS = 1024


@dataclass(kw_only=True, slots=True)
class TeacherRows:
    """What the target says at M rows.

    logits: [M, V], float32 at least.
    top1: draft id of the target's most likely token over its *whole* vocabulary, -1 where the
        drafter cannot propose it [M]; None unless asked for, since it costs the whole lm_head.
    """

    logits: Tensor
    top1: Tensor | None


class Teacher(nn.Module):
    """The target's lm_head, frozen, split into draft columns and the rest."""

    def __init__(self, lm_head: Tensor, vocab: DraftVocab) -> None:
        super().__init__()
        # by draft id: an existing drafter's ids need not ascend with the target's
        self.register_buffer("inside", lm_head[vocab.target_ids], persistent=False)
        self.register_buffer("outside", lm_head[~vocab.t2d], persistent=False)
        self.inside: Tensor
        self.outside: Tensor

    @torch.no_grad()
    def forward(self, final: Tensor, top1: bool) -> TeacherRows:
        """Teacher of post-norm final states [M, H]."""
        logits = wide_product(final, self.inside.T)
        if not top1:
            return TeacherRows(logits=logits, top1=None)
        best, index = logits.max(dim=-1)
        if self.outside.numel():
            for start in range(0, final.shape[0], CHUNK_ROWS):
                part = slice(start, start + CHUNK_ROWS)
                rival = wide_product(final[part], self.outside.T).max(dim=-1).values
                index[part] = torch.where(rival > best[part], -1, index[part])
        return TeacherRows(logits=logits, top1=index)


LEAST_OVERLAP = 1e-6
"""Overlap below which log_acceptance is constant."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""Teacher probabilities p [R, V] and log q [R, V] -> loss of each row [R]."""


def _soft_ce(p: Tensor, log_q: Tensor) -> Tensor:
    """-sum p log q: KL(p || q) but for the teacher's entropy."""
    return -(p * log_q).sum(dim=-1)


def _hard_ce(p: Tensor, log_q: Tensor) -> Tensor:
    """-log q of the teacher's most likely token."""
    return -log_q.gather(-1, p.argmax(dim=-1, keepdim=True)).squeeze(-1)


def _overlap(p: Tensor, log_q: Tensor) -> Tensor:
    """sum min(p, q): the chance that speculative sampling accepts a draft."""
    return torch.minimum(p, log_q.exp()).sum(dim=-1)


LOSSES: dict[str, Loss] = {
    "soft_ce": _soft_ce,
    "hard_ce": _hard_ce,
    "tv": lambda p, log_q: 1 - _overlap(p, log_q),  # total variation: the chance of a rejection
    "log_acceptance": lambda p, log_q: -_overlap(p, log_q).clamp(min=LEAST_OVERLAP).log(),
}


def loss_reference(
    hidden: Tensor, weight: Tensor, teacher_logits: Tensor, kind: str = "soft_ce"
) -> Tensor:
    """The definition: summed loss of rows [R, H] under lm_head `weight` [V, H]."""
    log_q = wide_product(hidden, weight.T).log_softmax(dim=-1)
    return LOSSES[kind](_wide(teacher_logits).softmax(dim=-1), log_q).sum()


class _LmHeadLoss(torch.autograd.Function):
    """lm_head and loss in row chunks; the forward pass makes the gradients, while logits exist."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher_logits: Tensor,
        teacher_rows: Tensor,
        kind: str,
        row_weights: Tensor | None,
        need_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        loss, plain_loss = (_wide(hidden.new_zeros(())) for _ in range(2))
        top1 = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if need_grad else None
        train_weight = need_grad and ctx.needs_input_grad[1]
        grad_weight = _wide(torch.zeros_like(weight)) if train_weight else None
        for start in range(0, hidden.shape[0], CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            logits = wide_product(hidden[part], weight.T)
            top1[part] = logits.argmax(dim=-1)
            p = _wide(teacher_logits[teacher_rows[part]]).softmax(dim=-1)
            weights = None if row_weights is None else row_weights[part]
            found = _loss_and_gradient(kind, p, logits, weights, need_grad)
            chunk_loss, chunk_plain_loss, grad_logits = found
            loss += chunk_loss
            plain_loss += chunk_plain_loss
            if grad_hidden is not None and grad_logits is not None:
                grad_logits = grad_logits.to(weight.dtype)
                grad_hidden[part] = grad_logits @ weight
                if grad_weight is not None:
                    grad_weight.addmm_(_wide(grad_logits.T), _wide(hidden[part]))
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(top1, plain_loss)
        return loss, top1, plain_loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            grad_hidden * grad_loss.to(grad_hidden.dtype),
            None if grad_weight is None else (grad_weight * grad_loss).to(ctx.weight_dtype),
            *[None] * 5,
        )


def _loss_and_gradient(
    kind: str, p: Tensor, logits: Tensor, weights: Tensor | None, need_grad: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weighted and plain sum of a chunk's losses, and the first one's gradient in the logits."""
    if kind == "soft_ce":  # the gradient is q - p
        log_q = logits.log_softmax(dim=-1)
        loss = plain_loss = -torch.dot(p.flatten(), log_q.flatten())
        if weights is not None:
            loss = (weights * _soft_ce(p, log_q)).sum()
        grad = log_q.exp_().sub_(p) if need_grad else None
        if weights is not None and grad is not None:
            grad *= weights[:, None]
        return loss, plain_loss, grad
    with torch.set_grad_enabled(need_grad):
        logits = logits.detach().requires_grad_(need_grad)
        rows = LOSSES[kind](p, logits.log_softmax(dim=-1))
        loss = (rows if weights is None else weights * rows).sum()
        grad = torch.autograd.grad(loss, logits)[0] if need_grad else None
        return loss.detach(), rows.detach().sum(), grad


def lm_head_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher_logits: Tensor,
    teacher_rows: Tensor,
    kind: str = "soft_ce",
    row_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Summed loss and the drafter's choices, without ever holding all logits.

    Args:
        hidden: normed drafter states [R, H]. weight: drafter lm_head [V, H].
        teacher_logits: [M, V]; row i of `hidden` is taught by row `teacher_rows[i]` of it.
        kind: one of LOSSES.
        row_weights: factor of each row's loss [R]; None for 1.

    Returns:
        The weighted sum over rows (float32 at least), the top-1 draft id of each row [R], and the
        sum without weights, which has no gradient.
    """
    need_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _LmHeadLoss.apply(
        hidden, weight, teacher_logits, teacher_rows, kind, row_weights, need_grad
    )


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, summed and kept in float32 at least.

    Logits rounded to bf16 put gradients off by percents: q - p is small beside its parts, and the
    gradients that jump where p = q fall on the wrong side.
    """
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16) and not torch.is_grad_enabled():
        return torch.mm(a, b, out_dtype=torch.float32)
    return _wide(a) @ _wide(b)


def _wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x if x.dtype == torch.float64 else x.float()
