"""Teacher, training loss and acceptance counts, all on the draft vocabulary.

Loss of a row: soft cross-entropy -sum_v p(v) log q(v) between the teacher p, the target's
distribution restricted to the draft vocabulary and renormalised, and the drafter q. It differs from
KL(p || q) by the teacher's entropy, a constant. Letters in shapes: R rows, H hidden size, V draft
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from eagle3.vocab import DraftVocab

CHUNK_ROWS = 1024


@dataclass(kw_only=True, slots=True)
class TeacherRows:
    """What the target says at M rows.

    logits: [M, V]. top1: draft id of the target's most likely token over its *whole* vocabulary, -1
    where the drafter cannot propose it [M]; None unless asked for, since it costs the whole
    lm_head.
    """

    logits: Tensor
    top1: Tensor | None


class Teacher(nn.Module):
    """The target's lm_head, frozen, split into draft columns and the rest."""

    def __init__(self, lm_head: Tensor, vocab: DraftVocab) -> None:
        super().__init__()
        inside = vocab.t2d
        self.register_buffer("inside", lm_head[inside].contiguous(), persistent=False)
        self.register_buffer("outside", lm_head[~inside].contiguous(), persistent=False)
        self.inside: Tensor
        self.outside: Tensor

    @torch.no_grad()
    def forward(self, final: Tensor, top1: bool) -> TeacherRows:
        """Teacher of post-norm final states [M, H]."""
        logits = final @ self.inside.T
        if not top1:
            return TeacherRows(logits=logits, top1=None)
        best, index = logits.max(dim=-1)
        if self.outside.numel():
            for start in range(0, final.shape[0], CHUNK_ROWS):
                part = slice(start, start + CHUNK_ROWS)
                rival = (final[part] @ self.outside.T).max(dim=-1).values
                index[part] = torch.where(rival > best[part], -1, index[part])
        return TeacherRows(logits=logits, top1=index)


def soft_cross_entropy_reference(hidden: Tensor, weight: Tensor, teacher_logits: Tensor) -> Tensor:
    """The definition: summed soft cross-entropy of rows [R, H] under lm_head `weight` [V, H]."""
    log_q = _wide(hidden @ weight.T).log_softmax(dim=-1)
    return -(_wide(teacher_logits).softmax(dim=-1) * log_q).sum()


class _FusedSoftCrossEntropy(torch.autograd.Function):
    """lm_head and loss in row chunks; the forward pass makes the gradients, while logits exist."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher_logits: Tensor,
        teacher_rows: Tensor,
        need_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        loss = _wide(hidden.new_zeros(()))
        top1 = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if need_grad else None
        grad_weight = _wide(torch.zeros_like(weight)) if need_grad else None
        for start in range(0, hidden.shape[0], CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            logits = _wide(hidden[part] @ weight.T)
            top1[part] = logits.argmax(dim=-1)
            log_q = logits.log_softmax(dim=-1)
            p = _wide(teacher_logits[teacher_rows[part]]).softmax(dim=-1)
            loss -= torch.dot(p.flatten(), log_q.flatten())
            if grad_hidden is not None and grad_weight is not None:
                grad_logits = log_q.exp_().sub_(p).to(weight.dtype)
                grad_hidden[part] = grad_logits @ weight
                grad_weight.addmm_(_wide(grad_logits.T), _wide(hidden[part]))
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(top1)
        return loss, top1

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            grad_hidden * grad_loss.to(grad_hidden.dtype),
            (grad_weight * grad_loss).to(ctx.weight_dtype),
            None,
            None,
            None,
        )


def soft_cross_entropy(
    hidden: Tensor, weight: Tensor, teacher_logits: Tensor, teacher_rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Summed soft cross-entropy and the drafter's choices, without ever holding all logits.

    Args:
        hidden: normed drafter states [R, H]. weight: drafter lm_head [V, H].
        teacher_logits: [M, V]; row i of `hidden` is taught by row `teacher_rows[i]` of it.

    Returns:
        The sum over rows (float32 at least), and the top-1 draft id of each row [R].
    """
    need_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _FusedSoftCrossEntropy.apply(hidden, weight, teacher_logits, teacher_rows, need_grad)


def _wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x if x.dtype == torch.float64 else x.float()
