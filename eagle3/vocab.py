"""The draft vocabulary: the target tokens a drafter can propose."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.errors import UserError


@dataclass(kw_only=True, slots=True)
class DraftVocab:
    """Distinct target ids [draft_vocab_size], one per draft id; ascending in what we `build`.

    On disk SGLang and speculators keep it as offsets `d2t` (target id = i + d2t[i]) and a boolean
    mask `t2d` over the target's vocabulary; both are derived here and nowhere else.
    """

    target_ids: Tensor
    vocab_size: int

    @classmethod
    def build(cls, counts: Tensor, size: int) -> DraftVocab:
        """The `size` most frequent target tokens; ties and padding go to the lowest ids.

        Args:
            counts: how often the target generated each token id [vocab_size].

        Raises:
            UserError: the target has fewer tokens than `size`.
        """
        vocab_size = counts.numel()
        if not 0 < size <= vocab_size:
            raise UserError(
                f"draft.vocab_size={size} must lie in 1..{vocab_size}, the target's vocabulary size"
            )
        order = torch.sort(counts, descending=True, stable=True).indices
        return cls(target_ids=order[:size].sort().values, vocab_size=vocab_size)

    @classmethod
    def from_d2t(cls, d2t: Tensor, vocab_size: int) -> DraftVocab:
        """Inverse of `d2t`.

        Raises:
            UserError: the offsets do not give distinct target ids inside the vocabulary.
        """
        ids = d2t.long() + torch.arange(d2t.numel(), device=d2t.device)
        distinct = ids.unique()
        if distinct.numel() != ids.numel() or ids.min() < 0 or ids.max() >= vocab_size:
            raise UserError("d2t does not map draft ids to distinct target ids: not offsets?")
        return cls(target_ids=ids, vocab_size=vocab_size)

    @property
    def size(self) -> int:
        return self.target_ids.numel()

    @property
    def d2t(self) -> Tensor:
        """Offsets [draft_vocab_size], int64."""
        return self.target_ids - torch.arange(self.size, device=self.target_ids.device)

    @property
    def t2d(self) -> Tensor:
        """Membership mask [vocab_size], bool."""
        mask = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.target_ids.device)
        mask[self.target_ids] = True
        return mask

    @property
    def draft_index(self) -> Tensor:
        """Draft id of each target id, -1 outside [vocab_size], int64."""
        index = torch.full((self.vocab_size,), -1, device=self.target_ids.device)
        index[self.target_ids] = torch.arange(self.size, device=self.target_ids.device)
        return index

    def coverage(self, counts: Tensor) -> float:
        """Share of generated tokens that the drafter can propose at all."""
        return (counts[self.target_ids].sum() / counts.sum().clamp(min=1)).item()
