"""Attention of the whole unroll: what is kept of each step, and its backward, last step first.

Letters in shapes: R rows of a step, T rows of all steps together, N batch rows, Q query heads, G
key/value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3.drafter import DrafterConfig
from eagle3.fast.diagonal import merge, merge_backward
from eagle3.fast.flash import Flash
from eagle3.fast.layout import Layout
from eagle3.fast.rope import heads, heads_backward, rotation_table


class UnrollAttention:
    """Keys and values of step 0 at all rows, then one step after the other.

    Args:
        token: token half of queries, keys and values of each token [N, (Q + 2G) * D].
        key_value: hidden half of step-0 keys and values [N, 2G * D].
        parts: rows of each step in what is kept of all steps.
    """

    def __init__(
        self,
        config: DrafterConfig,
        layout: Layout,
        parts: list[slice],
        token: Tensor,
        key_value: Tensor,
    ) -> None:
        self.layout, self.parts = layout, parts
        self.num_heads, self.num_kv = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.flash = Flash(layout, self.num_heads, self.num_kv, self.head_dim)
        self.token = self._split(token)
        self.table = rotation_table(
            layout.longest + len(parts), config.head_dim, config.rope_theta, token.device
        )
        self.keys = token.new_empty(token.shape[0], self.num_kv, self.head_dim)
        self.values = torch.empty_like(self.keys)
        halves = key_value.chunk(2, dim=1)
        heads(halves[0], self.token[1], None, layout.positions, self.table, 0, self.keys)
        heads(halves[1], self.token[2], None, layout.positions, None, 0, self.values)
        total = parts[-1].stop
        # those of step 0 are not own keys: their rows stay unused
        self.own_keys = token.new_empty(total, self.num_kv, self.head_dim)
        self.own_values = torch.empty_like(self.own_keys)
        # a row that ended at an earlier step keeps its place: zeros, which come to nothing; a
        # multiple of 4 places, so that every step's scores start at an address divisible by 16
        places = -(-len(layout.rows) // 4) * 4
        self.q = token.new_zeros(len(parts), places, self.num_heads, self.head_dim)
        self.logsumexp = self.q.new_empty(self.q.shape[:3], dtype=torch.float32)

    def forward(self, step: int, projected: Tensor, mixed: Tensor) -> None:
        """Attend at one step.

        Args:
            projected: hidden half of queries, keys and values [R, (Q + 2G) * D]; queries alone at
                step 0.
            mixed: where the output goes [R, Q * D].
        """
        layout, part = self.layout, self.parts[step]
        rows = layout.rows[: mixed.shape[0]]
        q, hidden = self.q[step], self._split(projected)
        at = layout.positions
        heads(hidden[0], self.token[0], rows, at, self.table, step, q, layout.slots)
        if step > 0:
            k, v = self.own_keys[part], self.own_values[part]
            heads(hidden[1], self.token[1], rows, at, self.table, step, k)
            heads(hidden[2], self.token[2], rows, at, None, step, v)
        attended = self.flash.attend(q, self.keys, self.values, self.logsumexp[step])
        merge(
            q, self.own_keys, self.own_values, step, layout.slots, layout.starts, attended,
            self.logsumexp[step], self._as_heads(mixed),
        )  # fmt: skip

    def start_backward(self) -> None:
        """Make room for gradients."""
        width = (self.num_heads + 2 * self.num_kv) * self.head_dim
        self.grad_token = self.q.new_zeros(len(self.token[0]), width, dtype=torch.float32)
        self.grad_own_keys, self.grad_own_values = (
            torch.zeros_like(self.own_keys, dtype=torch.float32) for _ in range(2)
        )
        self.grad_mixed = torch.zeros_like(self.q)
        self.delta = torch.zeros_like(self.logsumexp)
        self.grad_q = torch.empty_like(self.q[0])

    def backward(
        self, step: int, mixed: Tensor, grad_mixed: Tensor, grad_projected: Tensor
    ) -> None:
        """Gradient of one step's output -> that of its projections; call the last step first.

        Args:
            mixed, grad_mixed: output of `forward` and its gradient [R, Q * D].
            grad_projected: where the gradient goes [R, (Q + 2G) * D]; queries alone at step 0.
        """
        layout, part = self.layout, self.parts[step]
        rows, slots = layout.rows[: mixed.shape[0]], layout.slots[: mixed.shape[0]]
        mixed, grad_mixed = self._as_heads(mixed), self._as_heads(grad_mixed)
        merge_backward(
            self.q[step], self.own_keys, self.own_values, step, slots, layout.starts, mixed,
            self.logsumexp[step], grad_mixed, self.grad_mixed[step], self.delta[step], self.grad_q,
            self.grad_own_keys, self.grad_own_values,
        )  # fmt: skip
        self.flash.add_grad_q(
            self.q[step], self.keys, self.values, self.grad_mixed[step], self.logsumexp[step],
            self.delta[step], self.grad_q,
        )  # fmt: skip
        hidden, token = self._split(grad_projected), self._split(self.grad_token)
        at = layout.positions
        heads_backward(self.grad_q, rows, at, self.table, step, hidden[0], token[0], slots)
        if step > 0:
            grad_k, grad_v = self.grad_own_keys[part], self.grad_own_values[part]
            heads_backward(grad_k, rows, at, self.table, step, hidden[1], token[1])
            heads_backward(grad_v, rows, at, None, step, hidden[2], token[2])

    def finish_backward(self) -> tuple[Tensor, Tensor]:
        """Gradients of `key_value` [N, 2G * D] and of `token`, float32, after all steps."""
        num_rows = self.grad_token.shape[0]
        out = self.keys.new_empty(num_rows, 2 * self.num_kv * self.head_dim)
        halves, token = out.chunk(2, dim=1), self._split(self.grad_token)
        grad_k, grad_v = self.flash.grad_keys_values(
            self.q, self.keys, self.values, self.grad_mixed, self.logsumexp, self.delta
        )
        at = self.layout.positions
        heads_backward(grad_k, None, at, self.table, 0, halves[0], token[1])
        heads_backward(grad_v, None, at, None, 0, halves[1], token[2])
        return out, self.grad_token

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Columns of queries, keys and values."""
        width, kv_width = self.num_heads * self.head_dim, self.num_kv * self.head_dim
        return x[:, :width], x[:, width : width + kv_width], x[:, width + kv_width :]

    def _as_heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], self.num_heads, self.head_dim)
