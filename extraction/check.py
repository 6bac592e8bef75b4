"""Is this capture what the server computed for this sample? Checked before anything is stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.store.writer import Sample
from eagle3.target import Target
from extraction.samples import TokenSample

UPCAST_LIMIT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a capture was not stored; captures are counted by reason."""

    reason: str


class Verifier:
    """Checks captures of one target with `num_aux` aux layers."""

    def __init__(self, target: Target, num_aux: int) -> None:
        head = target.lm_head()
        self.lm_head = head.float() if head.nbytes < UPCAST_LIMIT_BYTES else head
        self.aux_width = num_aux * target.hidden_size

    def check(
        self, sample: TokenSample, tensors: dict[str, Tensor], output_ids: list[int]
    ) -> Sample | Rejection:
        """Check rows, token ids and values, and that the last state explains the server's token."""
        input_ids, aux, final = tensors["input_ids"], tensors["aux"], tensors["final"]
        rows = len(sample.input_ids)
        if not len(input_ids) == len(aux) == len(final) == rows:
            return Rejection("row count")
        if aux.shape[1] != self.aux_width:
            return Rejection("aux width")
        if input_ids.tolist() != sample.input_ids:
            return Rejection("token ids")
        for name, states in (("aux", aux), ("final", final)):
            if not torch.isfinite(states).all():
                return Rejection(f"{name} not finite")
            if (states.amax(dim=1) == states.amin(dim=1)).any():
                return Rejection(f"{name} constant")
        if not self._explains(final[-1], output_ids[0]):
            return Rejection("argmax disagrees with the server's token")
        return Sample(
            id=sample.id,
            input_ids=input_ids,
            loss_mask=torch.tensor(sample.loss_mask, dtype=torch.uint8),
            aux=aux,
            final=final,
        )

    def _explains(self, state: Tensor, token: int) -> bool:
        """Whether `token` is the argmax of the state's logits, up to the dtypes' rounding."""
        logits = (self.lm_head @ state.to(self.lm_head.dtype)).float()
        eps = max(torch.finfo(state.dtype).eps, torch.finfo(self.lm_head.dtype).eps, 1e-5)
        return bool(logits[token] >= logits.max() - 2 * eps * logits.abs().max())
