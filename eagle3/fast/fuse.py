"""The aux states become the drafter's first hidden states: an optional norm, then fc.

A norm's weight goes into fc: (x * w) @ fc.T = x @ (fc * w).T, so that only the plain norm of the
states, which needs no gradient, is ever kept. `norm_before_fc` is one norm over all aux states of a
row, `fc_norm` one for each. Letters in shapes: N rows, A aux states, H hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.drafter import Drafter
from eagle3.fast.fp8 import Product


class Fuse:
    """One forward and, after it, at most one backward pass."""

    def __init__(self, drafter: Drafter, fp8: bool) -> None:
        self.fc, self.eps, self.fp8 = drafter.fc.weight, drafter.config.rms_norm_eps, fp8
        prefixes = ("input_norm.", "fc_norm.")
        self.norms: dict[str, Tensor] = {
            name: p for name, p in drafter.named_parameters() if name.startswith(prefixes)
        }

    def forward(self, aux: Tensor) -> Tensor:
        """[N, A * H] -> [N, H]"""
        if not self.norms:
            self.inputs = aux
            return Product(self.fc, self.fp8)(aux)
        parts = aux.unflatten(1, (len(self.norms), -1))
        self.inputs = F.rms_norm(parts, parts.shape[2:], eps=self.eps).flatten(1)
        return Product(self.fc * self._weight(), self.fp8)(self.inputs)

    def backward(self, grad: Tensor) -> dict[str, Tensor]:
        """Gradient of `forward`'s result [N, H] -> those of fc and of the norms, by name."""
        grad_fc = grad.T @ self.inputs
        if not self.norms:
            return {"fc.weight": grad_fc}
        grad_weight = (grad_fc.float() * self.fc).sum(dim=0).chunk(len(self.norms))
        norms = dict(zip(self.norms, grad_weight, strict=True))
        return {"fc.weight": grad_fc * self._weight(), **norms}

    def _weight(self) -> Tensor:
        return torch.cat(list(self.norms.values()))
