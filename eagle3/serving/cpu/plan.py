"""Plans of attention on the CPU: made once for a forward of the model, used by all its layers.

- `PaddedPlan`, when all sequences bring the same few queries (decode, draft, verify): one batched
  attention over keys gathered into a rectangle and masked;
- `SequencePlan` otherwise (prefill): one attention a sequence, straight on the new keys where
  nothing is cached before them.

In a padded plan grouped queries are folded into rows of their key head, so keys are not repeated.

Shapes: B sequences, T rows of the flattened batch, Q queries a sequence, L keys, N query heads,
M key heads, D head size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

MAX_PADDED_QUERIES = 64
"""Longest uniform query block that is batched; a longer one is a prefill."""
MAX_PADDING = 4
"""A batch is padded unless that makes its keys more than this many times as many."""


NewRows = tuple[Tensor, Tensor] | None
"""Keys and values [T, M, D] of the batch's own rows, or None when only the cache has them."""


@dataclass(slots=True)
class PaddedPlan:
    """B sequences of the same number of queries."""

    slots: Tensor
    """[B, L] cache slots of the keys; a padded place repeats the sequence's first slot."""
    bias: Tensor | None
    """[B, 1, Q, L], 0 or -inf; None when every query sees every key."""
    num_queries: int

    @property
    def num_rows(self) -> int:
        return self.slots.shape[0] * self.num_queries

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, new: NewRows, scale: float
    ) -> Tensor:
        """q [T, N, D], caches [slots, M, D] -> [T, N, D of the values]."""
        (batch, length), heads = self.slots.shape, k_cache.shape[1]
        groups, flat = q.shape[1] // heads, self.slots.view(-1)
        keys, values = (
            cache.index_select(0, flat).view(batch, length, heads, -1).transpose(1, 2).to(q.dtype)
            for cache in (k_cache, v_cache)
        )
        rows = q.view(batch, self.num_queries, heads, groups, -1).permute(0, 2, 3, 1, 4)
        rows = rows.reshape(batch, heads, groups * self.num_queries, -1)
        bias = None if self.bias is None else self.bias.repeat(1, 1, groups, 1).to(q.dtype)
        out = sdpa(rows, keys, values, attn_mask=bias, scale=scale)
        out = out.unflatten(2, (groups, self.num_queries)).permute(0, 3, 1, 2, 4)
        return out.reshape(q.shape[0], q.shape[1], -1)


@dataclass(slots=True)
class Sequence:
    """One sequence of a prefill: rows start..end of the batch, after `prefix_len` cached tokens."""

    start: int
    end: int
    prefix_len: int
    slots: Tensor
    """[L] cache slots of prefix and new tokens."""
    bias: Tensor | None
    """[Q, L], 0 or -inf; None where there is no prefix and plain causality does."""


@dataclass(slots=True)
class SequencePlan:
    """Sequences of any number of queries."""

    sequences: list[Sequence]

    @property
    def num_rows(self) -> int:
        return self.sequences[-1].end if self.sequences else 0

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, new: NewRows, scale: float
    ) -> Tensor:
        """q [T, N, D], caches [slots, M, D] -> [T, N, D of the values]."""
        out = q.new_empty((q.shape[0], q.shape[1], v_cache.shape[-1]))
        grouped = q.shape[1] != k_cache.shape[1]
        for seq in self.sequences:
            rows = slice(seq.start, seq.end)
            if new is not None and seq.prefix_len == 0:
                keys, values = new[0][rows], new[1][rows]
            else:
                keys = k_cache.index_select(0, seq.slots).to(q.dtype)
                values = v_cache.index_select(0, seq.slots).to(q.dtype)
            query, keys, values = (x.transpose(0, 1)[None] for x in (q[rows], keys, values))
            attended = sdpa(
                query,
                keys,
                values,
                attn_mask=seq.bias,
                is_causal=seq.bias is None,
                scale=scale,
                enable_gqa=grouped,
            )
            out[rows] = attended[0].transpose(0, 1)
        return out


def make_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where visible, -inf elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))


def make_plan(
    table: Tensor,
    table_rows: Tensor,
    query_lens: list[int],
    kv_lens: list[int],
    dtype: torch.dtype,
    trees: Tensor | None = None,
) -> PaddedPlan | SequencePlan:
    """Plan a forward in which sequence b brings the last query_lens[b] of its kv_lens[b] tokens.

    table: slot of every token, a row a sequence pool entry; table_rows [B]: each sequence's entry.
    trees: [B, Q, Q] what each query sees of the queries, instead of those up to itself.
    """
    batch, longest, num_queries = len(kv_lens), max(kv_lens, default=0), max(query_lens, default=0)
    uniform = batch > 0 and min(query_lens) == num_queries <= MAX_PADDED_QUERIES
    if uniform and (trees is not None or batch * longest <= MAX_PADDING * sum(kv_lens)):
        return _padded_plan(table, table_rows, num_queries, kv_lens, dtype, trees)
    sequences, start = [], 0
    for row, queries, keys in zip(table_rows.tolist(), query_lens, kv_lens, strict=True):
        prefix = keys - queries
        bias = None
        if prefix:
            bias = make_bias(torch.ones(queries, keys, dtype=torch.bool).tril(prefix), dtype)
        slots = table[row, :keys].long()
        sequences.append(Sequence(start, start + queries, prefix, slots, bias))
        start += queries
    return SequencePlan(sequences)


def _padded_plan(
    table: Tensor,
    table_rows: Tensor,
    num_queries: int,
    kv_lens: list[int],
    dtype: torch.dtype,
    trees: Tensor | None,
) -> PaddedPlan:
    longest = max(kv_lens)
    slots = table[table_rows.long(), :longest].long()
    lens = torch.tensor(kv_lens)[:, None]
    key = torch.arange(longest)
    slots = torch.where(key < lens, slots, slots[:, :1])
    if num_queries == 1 and min(kv_lens) == longest:
        return PaddedPlan(slots, None, 1)
    own = lens - num_queries + torch.arange(num_queries)  # [B, Q] position of each query
    visible = key <= own[:, :, None]
    if trees is not None:
        visible &= key < (lens - num_queries)[:, :, None]
        visible.scatter_(2, own[:, None, :].expand_as(trees), trees)
    return PaddedPlan(slots, make_bias(visible[:, None], dtype), num_queries)
