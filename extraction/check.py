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

PROBED_ROWS = 8
RANGE_SLACK = 0.15
"""Relative to a row's largest value; 4 bits are up to 1/14 of it off."""
MAX_CANDIDATES = 1 << 23
"""Most lm_head values to look at for one sample: of a width of 4,096 those of 2,048 tokens. Reading
them is most of what a sample costs the client."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a capture was not stored; captures are counted by reason."""

    reason: str


class Verifier:
    """Checks captures of one target with `num_aux` aux layers, encoded by `codec`."""

    def __init__(self, target: Target, num_aux: int, codec: Codec) -> None:
        self.codec = codec
        self.lm_head = target.lm_head()
        self.candidates = self.lm_head[candidates(*self.lm_head.shape)].float()
        self.widths = {"aux": num_aux * target.hidden_size, "final": target.hidden_size}

    def check(
        self, sample: TokenSample, captured: dict[str, Tensor], output_ids: list[int]
    ) -> Encoded | Rejection:
        """Check rows, token ids and values, and that the last state explains the server's token.

        Args:
            captured: what the spool holds of a sample.
            output_ids: what the server generated, greedily, after the sample.
        """
        input_ids, ranges = captured["input_ids"], captured["range"]
        states = {k: v for k, v in captured.items() if k.startswith(("aux.", "final."))}
        if any(len(t) != len(sample.input_ids) for t in (input_ids, ranges, *states.values())):
            return Rejection("row count")
        if not np.array_equal(input_ids.numpy(), sample.input_ids):
            return Rejection("token ids")
        for kind, range_ in (("aux", ranges[:, :2]), ("final", ranges[:, 2:])):
            if not torch.isfinite(range_).all():
                return Rejection(f"{kind} not finite")
            if (range_[:, 0] == range_[:, 1]).any():
                return Rejection(f"{kind} constant")
            if problem := self._probe(kind, states, range_):
                return Rejection(problem)
        last = captured["last"][0]
        if not self._explains(last, output_ids[0]):
            return Rejection("argmax disagrees with the server's token")
        loss_mask = torch.from_numpy(sample.loss_mask)
        needed = needed_final(loss_mask)
        kept = {k: v[needed] if k.startswith("final.") else v for k, v in states.items()}
        return Encoded(
            id=sample.id,
            tensors={"input_ids": input_ids, "loss_mask": loss_mask, **kept},
            weight=sample.weight,
            conversation=sample.conversation,
        )

    def _probe(self, kind: str, states: dict[str, Tensor], range_: Tensor) -> str | None:
        """Decode a few rows: is it what the server saw before it encoded and copied them?"""
        rows = torch.linspace(0, len(range_) - 1, min(PROBED_ROWS, len(range_))).long()
        mine = {k: v[rows] for k, v in states.items() if k.startswith(kind)}
        decoded = self.codec.decode(kind, mine).float()
        if decoded.shape[1] != self.widths[kind]:
            return f"{kind} width"
        found = torch.stack(decoded.aminmax(dim=1), dim=1)
        slack = RANGE_SLACK * range_[rows].abs().amax(dim=1, keepdim=True)
        if not ((found - range_[rows]).abs() <= slack).all():
            return f"{kind} not as computed"
        return None

    def _explains(self, state: Tensor, token: int) -> bool:
        """Whether no candidate has a larger logit than `token`, up to the dtypes' rounding."""
        logits = self.candidates @ state.float()
        own = self.lm_head[token].float() @ state.float()
        eps = max(torch.finfo(state.dtype).eps, torch.finfo(self.lm_head.dtype).eps, 1e-5)
        return bool(own >= logits.max() - 2 * eps * logits.abs().max())


def candidates(vocab_size: int, width: int) -> Tensor:
    """Tokens of which a state of another row would likely prefer one to the server's.

    Half of them have the lowest ids, which tokenizers give to the commonest tokens, the others are
    spread over the rest. Of SmolLM2's states, set one row off, 98.5% are found with 703 of 49,152
    tokens and 99.9% with 9,831; evenly spread ones find 67% and 95%.
    """
    count = min(vocab_size, max(2, MAX_CANDIDATES // width))
    lowest = count if count == vocab_size else count // 2
    spread = torch.linspace(lowest, vocab_size - 1, count - lowest, dtype=torch.float64)
    return torch.cat([torch.arange(lowest), spread.long()])
