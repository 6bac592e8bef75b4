"""Planned attention on the CPU against a query-by-query reference in float64."""

import pytest
import torch

from eagle3.serving.cpu.plan import PaddedPlan, SequencePlan, make_plan

HEADS, KV_HEADS, DIM, V_DIM, SCALE = 6, 2, 8, 5, 0.3


def reference(q, k_cache, v_cache, slots, visible):
    """One sequence: q [Q, N, D], slots [L], visible [Q, L] -> [Q, N, Dv]."""
    keys, values = k_cache[slots].double(), v_cache[slots].double()
    out = torch.empty(q.shape[0], HEADS, values.shape[-1], dtype=torch.float64)
    for i in range(q.shape[0]):
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            scores = keys[:, kv_head] @ q[i, head].double() * SCALE
            weights = scores[visible[i]].softmax(0)
            out[i, head] = weights @ values[visible[i]][:, kv_head]
    return out


UNIFORM = [
    ([1, 1, 1], [5, 9, 2], PaddedPlan),  # decode
    ([1, 1], [4, 4], PaddedPlan),  # decode, nothing to mask
    ([4, 4, 4], [4, 11, 7], PaddedPlan),  # verify, draft extend
]
RAGGED = [
    ([5, 2, 7], [5, 6, 20], SequencePlan),  # prefill: no prefix, and chunks after a prefix
    ([1, 1, 1, 1, 1, 1], [90, 2, 2, 2, 2, 2], SequencePlan),  # too much padding
    ([70], [70], SequencePlan),
]


@pytest.mark.parametrize("pass_new_rows", [False, True])
@pytest.mark.parametrize(
    ("query_lens", "kv_lens", "kind", "with_trees"),
    [(*case, False) for case in UNIFORM + RAGGED] + [(*case, True) for case in UNIFORM],
)
def test_plan_equals_reference(query_lens, kv_lens, kind, pass_new_rows, with_trees):
    torch.manual_seed(0)
    batch, size = len(kv_lens), sum(kv_lens) + 1
    k_cache, v_cache = torch.randn(size, KV_HEADS, DIM), torch.randn(size, KV_HEADS, V_DIM)
    k_cache[0], v_cache[0] = torch.nan, torch.nan  # a free slot, which no padding may touch
    slots = (torch.randperm(size - 1) + 1).split(kv_lens)
    rows = torch.randperm(batch + 2)[:batch]
    table = torch.zeros(batch + 2, max(kv_lens) + 3, dtype=torch.int32)
    for row, own in zip(rows.tolist(), slots, strict=True):
        table[row, : len(own)] = own.int()
    trees = None
    if with_trees:
        trees = torch.rand(batch, query_lens[0], query_lens[0]) < 0.5
        trees |= torch.eye(query_lens[0], dtype=torch.bool)

    plan = make_plan(table, rows, query_lens, kv_lens, torch.float32, trees)
    assert isinstance(plan, kind)
    assert plan.num_rows == sum(query_lens)
    q = torch.randn(sum(query_lens), HEADS, DIM)
    own = torch.cat([s[len(s) - n :] for s, n in zip(slots, query_lens, strict=True)])
    new = (k_cache[own], v_cache[own]) if pass_new_rows else None
    out = plan.attend(q, k_cache, v_cache, new, SCALE)

    start = 0
    for b, (queries, keys) in enumerate(zip(query_lens, kv_lens, strict=True)):
        visible = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        if with_trees:
            visible[:, keys - queries :] = trees[b]
        expected = reference(q[start : start + queries], k_cache, v_cache, slots[b], visible)
        torch.testing.assert_close(
            out[start : start + queries].double(), expected, rtol=1e-5, atol=1e-5
        )
        start += queries
