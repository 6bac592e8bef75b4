"""Is this capture what the server computed for this sample? Checked before anything is stored."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagle3.batch import needed_final
from eagle3.store.codecs import Codec
from eagle3.store.sample import Encoded
from eagle3.target import Target
from extraction.samples import TokenSample

MAX_CANDIDATES = 1 << 26
"""Most lm_head values to look at for one sample; a larger head is thinned out to that."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a capture was not stored; captures are counted by reason."""

    reason: str


class Verifier:
    """Checks captures of one target with `num_aux` aux layers, encoded by `codec`."""

    def __init__(self, target: Target, num_aux: int, codec: Codec) -> None:
        self.codec = codec
        self.lm_head = target.lm_head()
        stride = -(-self.lm_head.numel() // MAX_CANDIDATES)
        self.candidates = self.lm_head[::stride].float()
        self.widths = {"aux": num_aux * target.hidden_size, "final": target.hidden_size}

    def check(
        self, sample: TokenSample, captured: dict[str, Tensor], output_ids: list[int]
    ) -> Encoded | Rejection:
        """Check rows, token ids and values, and that the last state explains the server's token.

        Args:
            captured: what the spool holds of a sample.
            output_ids: what the server generated, greedily, after the sample.
        """
        input_ids, last = captured["input_ids"], captured["last"]
        states = {k: v for k, v in captured.items() if k.startswith(("aux.", "final."))}
        if any(len(t) != len(sample.input_ids) for t in (input_ids, *states.values())):
            return Rejection("row count")
        if not np.array_equal(input_ids.numpy(), sample.input_ids):
            return Rejection("token ids")
        for kind, width in self.widths.items():
            decoded = self.codec.decode(kind, states)
            if decoded.shape[1] != width:
                return Rejection(f"{kind} width")
            low, high = decoded.aminmax(dim=1)  # both are nan where any value is
            if not (torch.isfinite(low) & torch.isfinite(high)).all():
                return Rejection(f"{kind} not finite")
            if (low == high).any():
                return Rejection(f"{kind} constant")
        if not self._explains(last, output_ids[0]):
            return Rejection("argmax disagrees with the server's token")
        loss_mask = torch.from_numpy(sample.loss_mask)
        needed = needed_final(loss_mask)
        kept = {k: v[needed] if k.startswith("final.") else v for k, v in states.items()}
        return Encoded(
            id=sample.id, tensors={"input_ids": input_ids, "loss_mask": loss_mask, **kept}
        )

    def _explains(self, state: Tensor, token: int) -> bool:
        """Whether no candidate has a larger logit than `token`, up to the dtypes' rounding."""
        logits = self.candidates @ state.float()
        own = self.lm_head[token].float() @ state.float()
        eps = max(torch.finfo(state.dtype).eps, torch.finfo(self.lm_head.dtype).eps, 1e-5)
        return bool(own >= logits.max() - 2 * eps * logits.abs().max())
