"""What `train.fp8` does on a GPU, on the plain path, so that it can be tried anywhere.

Every product of fc and the layer, and the gradient of its input, is that of rounded factors
(`product_reference` in eagle3/fast/fp8.py); the gradient of its weight is not rounded. As on the
fast path the token and the hidden half of q, k and v are apart, and the outputs of one product
share a scale in each row of their gradient.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3.drafter import MLP, Attention, Drafter, rotate
from eagle3.fast.fp8 import product_reference


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product_reference(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return product_reference(grad, weight.T), grad.T @ x


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [R, I] @ weight [O, I].T, rounded."""
    return cast(Tensor, _Product.apply(x, weight))


class RoundedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight)


class RoundedMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        both = product(x, torch.cat([self.gate_proj.weight, self.up_proj.weight]))
        gate, up = both.chunk(2, dim=1)
        return self.down_proj(F.silu(gate) * up)


class RoundedAttention(Attention):
    """q, k and v of the same rows are one product; at step 0 there are fewer queries than keys."""

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        self.queries_of: Tensor | None = None
        if (positions == 0).any():  # step 0
            k, v = self._project(x, self.k_proj, self.v_proj)
        else:
            self.q, k, v = self._project(x, self.q_proj, self.k_proj, self.v_proj)
            self.queries_of = x
        return rotate(k, positions, self.config.rope_theta), v

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        q = self.q if x is self.queries_of else self._project(x, self.q_proj)[0]
        return rotate(q, positions, self.config.rope_theta)

    def _project(self, x: Tensor, *projections: nn.Linear) -> list[Tensor]:
        weight = torch.cat([projection.weight for projection in projections])
        (token, hidden), (token_weight, hidden_weight) = x.chunk(2, 1), weight.chunk(2, 1)
        both = product(token, token_weight) + product(hidden, hidden_weight)
        parts = both.split([len(projection.weight) for projection in projections], dim=1)
        return [part.unflatten(1, (-1, self.config.head_dim)) for part in parts]


def round_products(drafter: Drafter) -> None:
    """Let a drafter of one layer round as `train.fp8` does."""
    attention, mlp = drafter.midlayer.self_attn, drafter.midlayer.mlp
    attention.__class__, mlp.__class__ = RoundedAttention, RoundedMLP
    for linear in (drafter.fc, attention.o_proj, mlp.down_proj):
        linear.__class__ = RoundedLinear
