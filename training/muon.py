"""Muon: momentum whose update is made orthogonal (https://kellerjordan.github.io/posts/muon).

torch.optim.Muon does the same but orthogonalises in bfloat16 always, which a CPU without bfloat16
units takes 30 times as long for; here float32 stays float32 on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic that drives singular values towards 1 (not quite to it) in few steps."""
STEPS = 5


class Muon(torch.optim.Optimizer):
    """For matrices [rows, columns] only; Nesterov momentum and decoupled weight decay.

    An update has the root mean square of AdamW's (0.2 of a matrix of signs), so that one learning
    rate serves both.
    """

    def __init__(
        self, params: list[nn.Parameter], lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(weight.grad)
                buffer = state["momentum_buffer"].lerp_(weight.grad, 1 - momentum)
                update = orthogonal(weight.grad.lerp(buffer, momentum))
                weight.mul_(1 - lr * group["weight_decay"])
                weight.add_(update, alpha=-0.2 * lr * max(weight.shape) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """U V^T of the singular value decomposition U S V^T, about: its singular values are 0.7 to 1.2.

    In bfloat16 on a GPU, in the matrix's own type on a CPU; returned in that type.
    """
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = wide.bfloat16() if wide.is_cuda else wide
    x = x / x.norm().clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.to(matrix.dtype)
    return x.T if matrix.shape[0] > matrix.shape[1] else x
