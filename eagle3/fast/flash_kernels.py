"""The kernels of `flash`; letters in shapes as there."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)
"""Below every score, and finite: a difference of two is not NaN."""


@triton.jit
def _load(at, mask, EVEN: tl.constexpr):
    """Everything there is, or zeros where the mask says so."""
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _rows_of_tile(
    first, end, group, GROUPS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Which rows of the tile are queries first..end, and where one value of each head and all of
    its SIZE values lie."""
    row, column = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_SIZE)
    in_tile = (row < BLOCK_ROWS // HEADS * HEADS) & (first + row // HEADS < end)
    at = (row // HEADS) * (GROUPS * HEADS) + group * HEADS + row % HEADS
    base = first.to(tl.int64) * (GROUPS * HEADS)
    inside = in_tile[:, None] & (column[None, :] < SIZE)
    return in_tile, base + at, inside, base * SIZE + at[:, None] * SIZE + column[None, :]


@triton.jit
def _keys_of_tile(
    key_starts, seen_keys, doc, first, end, group, in_tile, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Where the document's keys lie, how many (in whole blocks) all queries first..end see, how
    many some see, and the last one that each row sees."""
    doc_at = (tl.load(key_starts + doc).to(tl.int64) * GROUPS + group) * SIZE
    all_see = (tl.load(seen_keys + first) + 1) // BLOCK_KEYS * BLOCK_KEYS
    some_see = tl.load(seen_keys + end - 1) + 1
    query = first + tl.arange(0, BLOCK_ROWS) // HEADS
    return doc_at, all_see, some_see, tl.load(seen_keys + query, mask=in_tile, other=0)


@triton.jit
def _attend_some(
    query, seen, peak, total, mixed, keys, values, first, end, scale,
    MASKED: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Keys first..end of the document that `keys` and `values` point to; a running softmax."""
    EVEN: tl.constexpr = (not MASKED) and SIZE == BLOCK_SIZE
    column = tl.arange(0, BLOCK_SIZE)
    for start in range(first, end, BLOCK_KEYS):
        key = start + tl.arange(0, BLOCK_KEYS)
        at = key[:, None] * (GROUPS * SIZE) + column[None, :]
        inside = (key[:, None] < end) & (column[None, :] < SIZE)
        k = _load(keys + at, inside, EVEN)
        score = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        if MASKED:
            score = tl.where(key[None, :] <= seen[:, None], score, LOWEST)
        new_peak = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp2(score - new_peak[:, None])
        kept = tl.exp2(peak - new_peak)
        total = total * kept + tl.sum(weight, 1)
        v = _load(values + at, inside, EVEN)
        mixed = tl.dot(weight.to(v.dtype), v, mixed * kept[:, None], input_precision="ieee")
        peak = new_peak
    return peak, total, mixed


@triton.jit
def attend_kernel(
    q, keys, values, docs, firsts, query_starts, key_starts, seen_keys, out, logsumexp, scale,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one document, with all heads of one group."""
    group, piece = tl.program_id(0) % GROUPS, tl.program_id(0) // GROUPS
    doc, first = tl.load(docs + piece), tl.load(firsts + piece)
    end = tl.load(query_starts + doc + 1)
    if first < end:
        end = tl.minimum(first + BLOCK_ROWS // HEADS, end)
        in_tile, head_at, inside, wide_at = _rows_of_tile(
            first, end, group, GROUPS, HEADS, SIZE, BLOCK_ROWS, BLOCK_SIZE
        )
        query = tl.load(q + wide_at, mask=inside, other=0.0)
        doc_at, all_see, some_see, seen = _keys_of_tile(
            key_starts, seen_keys, doc, first, end, group, in_tile, GROUPS, HEADS, SIZE,
            BLOCK_ROWS, BLOCK_KEYS,
        )  # fmt: skip
        peak = tl.full([BLOCK_ROWS], LOWEST, tl.float32)
        total = tl.zeros([BLOCK_ROWS], tl.float32)
        mixed = tl.zeros([BLOCK_ROWS, BLOCK_SIZE], tl.float32)
        peak, total, mixed = _attend_some(
            query, seen, peak, total, mixed, keys + doc_at, values + doc_at, 0, all_see,
            scale * LOG2E, False, GROUPS, SIZE, BLOCK_KEYS, BLOCK_SIZE,
        )  # fmt: skip
        peak, total, mixed = _attend_some(
            query, seen, peak, total, mixed, keys + doc_at, values + doc_at, all_see, some_see,
            scale * LOG2E, True, GROUPS, SIZE, BLOCK_KEYS, BLOCK_SIZE,
        )  # fmt: skip
        mixed /= total[:, None]
        tl.store(out + wide_at, mixed.to(out.dtype.element_ty), mask=inside)
        tl.store(logsumexp + head_at, (peak + tl.log2(total)) / LOG2E, mask=in_tile)


@triton.jit
def _grad_q_some(
    query, grad, lse, delta, seen, grad_q, keys, values, first, end, scale,
    MASKED: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Keys first..end of the document that `keys` and `values` point to."""
    EVEN: tl.constexpr = (not MASKED) and SIZE == BLOCK_SIZE
    column = tl.arange(0, BLOCK_SIZE)
    for start in range(first, end, BLOCK_KEYS):
        key = start + tl.arange(0, BLOCK_KEYS)
        at = key[:, None] * (GROUPS * SIZE) + column[None, :]
        inside = (key[:, None] < end) & (column[None, :] < SIZE)
        k = _load(keys + at, inside, EVEN)
        v = _load(values + at, inside, EVEN)
        score = tl.dot(query, tl.trans(k), input_precision="ieee")
        grad_weight = tl.dot(grad, tl.trans(v), input_precision="ieee")
        weight = tl.exp2(score * scale - lse[:, None])
        if MASKED:
            weight = tl.where(key[None, :] <= seen[:, None], weight, 0.0)
        grad_score = weight * (grad_weight - delta[:, None])
        grad_q = tl.dot(grad_score.to(k.dtype), k, grad_q, input_precision="ieee")
    return grad_q


@triton.jit
def grad_q_kernel(
    q, keys, values, docs, firsts, query_starts, key_starts, seen_keys, grads, logsumexp, deltas,
    grad_q, scale,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """As `attend_kernel`; adds to `grad_q`."""
    group, piece = tl.program_id(0) % GROUPS, tl.program_id(0) // GROUPS
    doc, first = tl.load(docs + piece), tl.load(firsts + piece)
    end = tl.load(query_starts + doc + 1)
    if first < end:
        end = tl.minimum(first + BLOCK_ROWS // HEADS, end)
        in_tile, head_at, inside, wide_at = _rows_of_tile(
            first, end, group, GROUPS, HEADS, SIZE, BLOCK_ROWS, BLOCK_SIZE
        )
        query = tl.load(q + wide_at, mask=inside, other=0.0)
        grad = tl.load(grads + wide_at, mask=inside, other=0.0)
        lse = tl.load(logsumexp + head_at, mask=in_tile, other=float("inf")) * LOG2E
        delta = tl.load(deltas + head_at, mask=in_tile, other=0.0)
        doc_at, all_see, some_see, seen = _keys_of_tile(
            key_starts, seen_keys, doc, first, end, group, in_tile, GROUPS, HEADS, SIZE,
            BLOCK_ROWS, BLOCK_KEYS,
        )  # fmt: skip
        total = tl.zeros([BLOCK_ROWS, BLOCK_SIZE], tl.float32)
        total = _grad_q_some(
            query, grad, lse, delta, seen, total, keys + doc_at, values + doc_at, 0, all_see,
            scale * LOG2E, False, GROUPS, SIZE, BLOCK_KEYS, BLOCK_SIZE,
        )  # fmt: skip
        total = _grad_q_some(
            query, grad, lse, delta, seen, total, keys + doc_at, values + doc_at, all_see,
            some_see, scale * LOG2E, True, GROUPS, SIZE, BLOCK_KEYS, BLOCK_SIZE,
        )  # fmt: skip
        total = total * scale + tl.load(grad_q + wide_at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_q + wide_at, total.to(grad_q.dtype.element_ty), mask=inside)


@triton.jit
def _grad_kv_some(
    k, v, key, grad_k, grad_v, q, grads, logsumexp, deltas, seen_keys, first, end, num_steps,
    num_slots, group, scale, MASKED: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr,
    SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """What queries first..end of all steps add to the gradients of one block of keys."""
    TILE: tl.constexpr = BLOCK_ROWS // HEADS
    row, column = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_SIZE)
    at = (row // HEADS) * (GROUPS * HEADS) + group * HEADS + row % HEADS
    wide_at = at[:, None] * SIZE + column[None, :]
    num_tiles = tl.cdiv(end - first, TILE)
    for i in range(0, num_steps * num_tiles):
        start = first + (i % num_tiles) * TILE
        base = ((i // num_tiles).to(tl.int64) * num_slots + start) * (GROUPS * HEADS)
        in_tile = (row < TILE * HEADS) & (start + row // HEADS < end)
        inside = in_tile[:, None] & (column[None, :] < SIZE)
        query = tl.load(q + base * SIZE + wide_at, mask=inside, other=0.0)
        grad = tl.load(grads + base * SIZE + wide_at, mask=inside, other=0.0)
        lse = tl.load(logsumexp + base + at, mask=in_tile, other=float("inf")) * LOG2E
        delta = tl.load(deltas + base + at, mask=in_tile, other=0.0)
        score = tl.dot(k, tl.trans(query), input_precision="ieee")
        weight = tl.exp2(score * scale - lse[None, :])
        if MASKED:
            seen = tl.load(seen_keys + start + row // HEADS, mask=in_tile, other=0)
            weight = tl.where(key[:, None] <= seen[None, :], weight, 0.0)
        grad_v = tl.dot(weight.to(grad.dtype), grad, grad_v, input_precision="ieee")
        grad_weight = tl.dot(v, tl.trans(grad), input_precision="ieee")
        grad_score = weight * (grad_weight - delta[None, :])
        grad_k = tl.dot(grad_score.to(query.dtype), query, grad_k, input_precision="ieee")
    return grad_k, grad_v


@triton.jit(do_not_specialize=["num_steps", "num_slots"])
def grad_kv_kernel(
    q, keys, values, docs, firsts, query_starts, key_starts, first_queries, seen_keys, grads,
    logsumexp, deltas, grad_keys, grad_values, scale, num_steps, num_slots,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """A block of keys of one document and group."""
    TILE: tl.constexpr = BLOCK_ROWS // HEADS
    group, piece = tl.program_id(0) % GROUPS, tl.program_id(0) // GROUPS
    doc = tl.load(docs + piece)
    doc_row, doc_end = tl.load(key_starts + doc), tl.load(key_starts + doc + 1)
    first_key = tl.load(firsts + piece) - doc_row
    if doc_row + first_key < doc_end:
        key, column = first_key + tl.arange(0, BLOCK_KEYS), tl.arange(0, BLOCK_SIZE)
        inside = (doc_row + key < doc_end)[:, None] & (column < SIZE)[None, :]
        at = (doc_row.to(tl.int64) * GROUPS + group) * SIZE
        at += key[:, None] * (GROUPS * SIZE) + column[None, :]
        k = tl.load(keys + at, mask=inside, other=0.0)
        v = tl.load(values + at, mask=inside, other=0.0)
        grad_k = tl.zeros([BLOCK_KEYS, BLOCK_SIZE], tl.float32)
        grad_v = tl.zeros([BLOCK_KEYS, BLOCK_SIZE], tl.float32)
        last_key = tl.minimum(doc_row + first_key + BLOCK_KEYS, doc_end) - 1
        first = tl.load(first_queries + doc_row + first_key)
        sees_all = tl.load(first_queries + last_key)
        sees_all = first + tl.cdiv(sees_all - first, TILE) * TILE  # whole tiles
        end = tl.load(query_starts + doc + 1)
        grad_k, grad_v = _grad_kv_some(
            k, v, key, grad_k, grad_v, q, grads, logsumexp, deltas, seen_keys, first,
            tl.minimum(sees_all, end), num_steps, num_slots, group, scale * LOG2E, True,
            GROUPS, HEADS, SIZE, BLOCK_ROWS, BLOCK_SIZE,
        )  # fmt: skip
        grad_k, grad_v = _grad_kv_some(
            k, v, key, grad_k, grad_v, q, grads, logsumexp, deltas, seen_keys, sees_all, end,
            num_steps, num_slots, group, scale * LOG2E, False,
            GROUPS, HEADS, SIZE, BLOCK_ROWS, BLOCK_SIZE,
        )  # fmt: skip
        tl.store(grad_keys + at, grad_k * scale, mask=inside)
        tl.store(grad_values + at, grad_v, mask=inside)
