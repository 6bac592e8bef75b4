"""Attention over the step-0 keys of a document, with the logsumexp, and its gradients.

Query heads of a group share their keys, so a program takes all heads of some consecutive queries
with the key/value head they share: keys are never repeated, and a tile covers few positions, which
leaves little masked. The same keys serve every TTT step, so their gradients are made once, from the
queries of all steps. A logsumexp into which further keys were merged (`diagonal`) is right here
too: the weight of a key is exp(score - logsumexp), whichever keys went into it.

Letters in shapes: K steps, S queries of a step in the order of `layout.slots`, N batch rows, Q
query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import triton
from torch import Tensor

from eagle3.fast.flash_kernels import attend_kernel, grad_kv_kernel, grad_q_kernel
from eagle3.fast.layout import Layout

TILES = {
    "attend": ((64, 64, 4, 3), (64, 32, 4, 2)),
    "grad_q": ((64, 32, 4, 3), (32, 32, 4, 2)),
    "grad_kv": ((32, 64, 4, 3), (32, 32, 4, 2)),
}
"""Rows (queries times heads) and keys of a program's tiles, its warps and stages, for heads of up
to 128 and of up to 256: the fastest of those tried on one H200, if they fit in every GPU's shared
memory. At least as many rows as `WIDEST_GROUP`."""


class Flash:
    """Attention over the step-0 keys of a batch, for all steps, and its gradients.

    Args:
        num_heads, num_groups, size: Q, G and D.
    """

    def __init__(self, layout: Layout, num_heads: int, num_groups: int, size: int) -> None:
        self.layout, self.groups = layout, num_groups
        self.scale = size**-0.5
        self.constants = {name: _constants(name, num_heads, num_groups, size) for name in TILES}
        # what each program works on, told by tables: documents differ too much for a plain grid
        num_queries, num_keys = len(layout.rows), len(layout.positions)
        self.pieces: dict[str, tuple[Tensor, Tensor]] = {}
        made: dict[int, tuple[Tensor, Tensor]] = {}
        for name in ("attend", "grad_q"):
            tile = self.constants[name]["BLOCK_ROWS"] // (num_heads // num_groups)
            if tile not in made:
                docs, firsts = _cut(
                    layout.query_starts, tile, num_queries // tile + layout.num_docs
                )
                last = (firsts + tile - 1).clamp(max=num_queries - 1)
                made[tile] = _by_work(docs, firsts, layout.seen[last])
            self.pieces[name] = made[tile]
        block = self.constants["grad_kv"]["BLOCK_KEYS"]
        docs, firsts = _cut(layout.key_starts, block, num_keys // block + layout.num_docs)
        first_query = layout.first_queries[firsts.clamp(max=num_keys - 1)]
        self.pieces["grad_kv"] = _by_work(docs, firsts, layout.query_starts[docs + 1] - first_query)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, logsumexp: Tensor) -> Tensor:
        """Attention of one step's queries [S, Q, D] over keys and values [N, G, D] -> [S, Q, D].

        Args:
            logsumexp: where that of the scaled scores goes [S, Q], float32.
        """
        layout, out = self.layout, torch.empty_like(q)
        attend_kernel[self._grid("attend")](
            q, keys, values, *self.pieces["attend"], layout.query_starts, layout.key_starts,
            layout.seen, out, logsumexp, self.scale, **self.constants["attend"],
        )  # fmt: skip
        return out

    def add_grad_q(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        grad_out: Tensor,
        logsumexp: Tensor,
        delta: Tensor,
        grad_q: Tensor,
    ) -> None:
        """Add one step's gradient through these keys to that of the queries, `grad_q` [S, Q, D].

        Args:
            grad_out: gradient of the output [S, Q, D]. delta: sum over D of it times the output
                [S, Q]. logsumexp: [S, Q]. Output and logsumexp may be those over these keys and
                others.
        """
        layout = self.layout
        grad_q_kernel[self._grid("grad_q")](
            q, keys, values, *self.pieces["grad_q"], layout.query_starts, layout.key_starts,
            layout.seen, grad_out, logsumexp, delta, grad_q, self.scale, **self.constants["grad_q"],
        )  # fmt: skip

    def grad_keys_values(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        grad_out: Tensor,
        logsumexp: Tensor,
        delta: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Gradients of keys and values [N, G, D], float32, from the queries of all steps.

        Args:
            q, grad_out: [K, S, Q, D]; where a step has no query, grad_out and delta are 0.
            logsumexp, delta: [K, S, Q], as in `add_grad_q`.
        """
        layout = self.layout
        grads = [torch.empty_like(keys, dtype=torch.float32) for _ in range(2)]
        grad_kv_kernel[self._grid("grad_kv")](
            q, keys, values, *self.pieces["grad_kv"], layout.query_starts, layout.key_starts,
            layout.first_queries, layout.seen, grad_out, logsumexp, delta, *grads, self.scale,
            *q.shape[:2], **self.constants["grad_kv"],
        )  # fmt: skip
        return grads[0], grads[1]

    def _grid(self, kernel: str) -> tuple[int]:
        # along one axis, groups of a piece side by side: the other axes end at 65,535 programs
        return (self.groups * len(self.pieces[kernel][0]),)


def _cut(starts: Tensor, size: int, bound: int) -> tuple[Tensor, Tensor]:
    """Every document cut into pieces of up to `size`: document and first index of each [bound].

    There are at most `bound`; what is left over begins behind everything. Nothing waits for a GPU.
    """
    pieces = (starts.diff() + size - 1) // size
    ends = pieces.cumsum(0)
    index = torch.arange(bound, device=starts.device)
    docs = torch.searchsorted(ends, index, right=True)
    some = docs.clamp(max=len(pieces) - 1)
    firsts = starts[some] + (index - (ends - pieces)[some]) * size
    return some.int(), torch.where(docs < len(pieces), firsts, 2**30).int()


def _by_work(docs: Tensor, firsts: Tensor, work: Tensor) -> tuple[Tensor, Tensor]:
    """The pieces in the order in which they start: those with most work first."""
    order = work.argsort(descending=True)
    return docs[order], firsts[order]


def attend_reference(
    q: Tensor, keys: Tensor, values: Tensor, layout: Layout
) -> tuple[Tensor, Tensor]:
    """What `attend` returns and its logsumexp, document by document."""
    out, logsumexp = torch.empty_like(q), q.new_empty(q.shape[:2])
    repeats = q.shape[1] // keys.shape[1]
    bounds = [list(pairwise(x.tolist())) for x in (layout.query_starts, layout.key_starts)]
    for queries, rows in ((slice(*a), slice(*b)) for a, b in zip(*bounds, strict=True)):
        k, v = (x[rows].repeat_interleave(repeats, dim=1) for x in (keys, values))
        scores = torch.einsum("sqd,mqd->qsm", q[queries], k) * q.shape[-1] ** -0.5
        hidden = torch.arange(len(k), device=q.device) > layout.seen[queries, None]
        scores = scores.masked_fill(hidden, float("-inf"))
        logsumexp[queries] = scores.logsumexp(dim=-1).T
        out[queries] = torch.einsum("qsm,mqd->sqd", scores.softmax(dim=-1), v)
    return out, logsumexp


def _constants(kernel: str, num_heads: int, num_groups: int, size: int) -> dict[str, int]:
    heads = num_heads // num_groups
    rows, block_keys, num_warps, num_stages = TILES[kernel][size > 128]
    return {
        "GROUPS": num_groups,
        "HEADS": heads,
        "SIZE": size,
        "BLOCK_ROWS": rows,
        "BLOCK_KEYS": block_keys,
        "BLOCK_SIZE": max(16, triton.next_power_of_2(size)),
        "num_warps": num_warps,
        "num_stages": num_stages,
    }
