"""Attention of the whole unroll: what is kept of each step, and its backward, last step first.

Letters in shapes: R rows of a step, T rows of all steps together, S attention queries, N batch
rows, Q query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3.drafter import DrafterConfig
from eagle3.fast import varlen
from eagle3.fast.diagonal import merge, merge_backward
from eagle3.fast.gather import add_groups, scatter_rows
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
        self.token = self._split(token)
        self.table = rotation_table(
            layout.longest + len(parts), config.head_dim, config.rope_theta, token.device
        )
        k, v = (token.new_empty(token.shape[0], self.num_kv, self.head_dim) for _ in range(2))
        halves = key_value.chunk(2, dim=1)
        heads(halves[0], self.token[1], None, layout.positions, self.table, 0, k)
        heads(halves[1], self.token[2], None, layout.positions, None, 0, v)
        # flash attention would repeat keys for the heads of a group on its own in every backward
        repeats = self.num_heads // self.num_kv
        self.keys = k[layout.key_rows].repeat_interleave(repeats, dim=1)
        self.values = v[layout.key_rows].repeat_interleave(repeats, dim=1)
        total = parts[-1].stop
        # those of step 0 are not own keys: their rows stay unused
        self.own_keys = token.new_empty(total, self.num_kv, self.head_dim)
        self.own_values = torch.empty_like(self.own_keys)
        self.q = token.new_zeros(len(parts), layout.num_slots, self.num_heads, self.head_dim)
        self.logsumexp: list[Tensor] = []

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
        attended, logsumexp = varlen.forward(q, self.keys, self.values, layout)
        merge(
            q, self.own_keys, self.own_values, step, layout.slots, layout.starts, attended,
            logsumexp, self._as_heads(mixed),
        )  # fmt: skip
        self.logsumexp.append(logsumexp)

    def start_backward(self) -> None:
        """Make room for gradients."""
        width = (self.num_heads + 2 * self.num_kv) * self.head_dim
        self.grad_token = self.q.new_zeros(len(self.token[0]), width, dtype=torch.float32)
        rows = (len(self.keys), len(self.keys), len(self.own_keys), len(self.own_keys))
        self.grad_keys, self.grad_values, self.grad_own_keys, self.grad_own_values = (
            self.q.new_zeros(n, self.num_kv, self.head_dim, dtype=torch.float32) for n in rows
        )
        # a place is written from its row's last step on, and zero before
        self.mixed_slots = torch.zeros_like(self.q[0])
        self.grad_slots = torch.zeros_like(self.q[0])

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
        scatter_rows(mixed, slots, self.mixed_slots, add=False)
        scatter_rows(grad_mixed, slots, self.grad_slots, add=False)
        grad_slots_q, grad_keys, grad_values = varlen.backward(
            self.grad_slots, self.q[step], self.keys, self.values, self.mixed_slots,
            self.logsumexp[step], layout,
        )  # fmt: skip
        add_groups(grad_keys, self.grad_keys)
        add_groups(grad_values, self.grad_values)
        grad_q = merge_backward(
            self.q[step], self.own_keys, self.own_values, step, slots, layout.starts, mixed,
            self.logsumexp[step], grad_mixed, grad_slots_q, self.grad_own_keys,
            self.grad_own_values,
        )  # fmt: skip
        hidden, token = self._split(grad_projected), self._split(self.grad_token)
        at = layout.positions
        heads_backward(grad_q, rows, at, self.table, step, hidden[0], token[0])
        if step > 0:
            grad_k, grad_v = self.grad_own_keys[part], self.grad_own_values[part]
            heads_backward(grad_k, rows, at, self.table, step, hidden[1], token[1])
            heads_backward(grad_v, rows, at, None, step, hidden[2], token[2])

    def finish_backward(self) -> tuple[Tensor, Tensor]:
        """Gradients of `key_value` [N, 2G * D] and of `token`, float32, after all steps."""
        num_rows = self.grad_token.shape[0]
        out = self.keys.new_empty(num_rows, 2 * self.num_kv * self.head_dim)
        halves, token = out.chunk(2, dim=1), self._split(self.grad_token)
        at, key_rows = self.layout.positions, self.layout.key_rows
        shape = num_rows, self.num_kv, self.head_dim
        grad_k = self.grad_keys.new_zeros(shape).index_add_(0, key_rows, self.grad_keys)
        heads_backward(grad_k, None, at, self.table, 0, halves[0], token[1])
        grad_v = self.grad_values.new_zeros(shape).index_add_(0, key_rows, self.grad_values)
        heads_backward(grad_v, None, at, None, 0, halves[1], token[2])
        return out, self.grad_token

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Columns of queries, keys and values."""
        width, kv_width = self.num_heads * self.head_dim, self.num_kv * self.head_dim
        return x[:, :width], x[:, width : width + kv_width], x[:, width + kv_width :]

    def _as_heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], self.num_heads, self.head_dim)
