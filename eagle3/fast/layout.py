"""Row order of the fast path, worked out on the CPU so that a training step never waits for one.

Queries are sorted by depth, deepest first. Step k supervises the rows deeper than k, so its rows
are the first `sizes[k]` of them, and row i of step k + 1 continues row i of step k. Whatever is
kept of all steps lies end to end in one tensor of sum(sizes) rows, step k from `starts[k]` on.

Attention takes them in the order of the batch: consecutive queries of a document then see
nearly the same keys. Example, 9 rows of one document:

    row            0 1 2 3 4 5 6 7 8
    depth          0 2 1 0 0 0 2 1 0    rows 1 2 6 7
    rows           1 6 2 7              sizes 4 2
    slots          0 2 1 3              place of each among the attention queries 1 2 6 7
    first_queries  0 0 1 2 2 2 2 3 4    of those, the first one that sees each row
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass(kw_only=True, slots=True)
class Layout:
    """R query rows of a batch of N rows in D documents.

    Fields:
        rows: batch row of each query, deepest first [R], int64.
        slots: place of each query among the attention queries [R], int64.
        seen: position of each attention query's row in its document, the last key that it sees [R],
            int32.
        query_starts, key_starts: first attention query and batch row of each document and, last,
            R and N [D + 1], int32.
        first_queries: first attention query that sees each batch row [N], int32; for the rows that
            none sees, the first one of the next documents.
        positions: position of each batch row in its document [N], int64.
        starts: first row of each step in what is kept of all steps, and the total, int64.
        sizes: rows of each step, until there are none.
        longest: rows of the longest document.
    """

    rows: Tensor
    slots: Tensor
    seen: Tensor
    query_starts: Tensor
    key_starts: Tensor
    first_queries: Tensor
    positions: Tensor
    starts: Tensor
    sizes: tuple[int, ...]
    longest: int

    @classmethod
    def of(cls, depth: Tensor, doc_starts: Tensor) -> Layout:
        """Lay out a batch whose rows are supervised for `depth` steps [N]."""
        depth, doc_starts = depth.cpu(), doc_starts.cpu()
        rows = depth.argsort(descending=True, stable=True)[: int((depth > 0).sum())]
        in_order, slots = rows.sort()
        deeper = (depth.numel() - depth.bincount().cumsum(0))[:-1]  # rows with depth > k
        lengths = doc_starts.diff()
        positions = torch.arange(depth.numel()) - doc_starts[:-1].repeat_interleave(lengths)
        before = _starts((depth > 0).long())  # supervised rows before each row
        return cls(
            rows=rows,
            slots=slots.argsort(),
            seen=positions[in_order].int(),
            query_starts=before[doc_starts].int(),
            key_starts=doc_starts.int(),
            first_queries=before[:-1].int(),
            positions=positions,
            starts=_starts(deeper),
            sizes=tuple(deeper.tolist()),
            longest=int(lengths.max()),
        )

    def to(self, device: torch.device | str) -> Layout:
        """Move the tensors to a device."""
        moved: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                value = value.to(device, non_blocking=True)
            moved[item.name] = value
        return Layout(**moved)

    @property
    def num_docs(self) -> int:
        return self.key_starts.numel() - 1

    def parts(self, num_steps: int) -> list[slice]:
        """Rows of each of the first steps in what is kept of all steps; no empty ones."""
        bounds = [0]
        for size in self.sizes[:num_steps]:
            bounds.append(bounds[-1] + size)
        return [slice(start, end) for start, end in pairwise(bounds)]

    def counts(self, num_steps: int) -> Tensor:
        """Rows of each step [num_steps], int64, on the layout's device."""
        found = self.starts.diff()[:num_steps]
        return torch.nn.functional.pad(found, (0, num_steps - found.numel()))


def _starts(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
