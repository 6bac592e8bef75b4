"""Row order of the fast path, worked out on the CPU so that a training step never waits for one.

Queries are sorted by depth, deepest first. Step k supervises the rows deeper than k, so its rows
are the first `sizes[k]` of them, and row i of step k + 1 continues row i of step k. Whatever is
kept of all steps lies end to end in one tensor of sum(sizes) rows, step k from `starts[k]` on.

Attention needs another order: flash attention takes segments of consecutive queries that end where
their keys end. A segment is a piece of one document between two supervised rows; its keys are the
document's rows up to its last one, so a document with two segments has its first keys twice.
Example, 9 rows of one document, MIN_GAP = 3:

    row            0 1 2 3 4 5 6 7 8
    depth          0 2 1 0 0 0 2 1 0    rows 1 2 6 7; the gap 3..5 is wide enough to cut
    segments       queries 1 2, keys 0..2; queries 6 7, keys 0..7
    rows           1 6 2 7              sizes 4 2
    slots          0 2 1 3              place of each in the attention queries [1 2 6 7]
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

MIN_GAP = 64
"""Unsupervised rows between two supervised ones from which a cut saves time: attending with one
more query costs about as much as copying the document's keys for a gap of some forty rows."""

MAX_SEGMENTS = 4
"""Segments of one document, so that keys never take more than four times their room."""


@dataclass(kw_only=True, slots=True)
class Layout:
    """R query rows of a batch of N rows, S attention queries, M attention keys.

    Fields:
        rows: batch row of each query, deepest first [R], int64.
        slots: place of each query among the attention queries [R], int64. Attention queries that
            no row has are rows of a narrow gap, or rows that ended at an earlier step.
        key_rows: batch row of each attention key [M], int64.
        query_starts, key_starts: first query and key of each segment and, last, S and M, int32.
        positions: position of each batch row in its document [N], int64.
        starts: first row of each step in what is kept of all steps, and the total, int64.
        sizes: rows of each step, until there are none.
        num_slots: S. max_queries, max_keys: of any segment. longest: rows of the longest document.
    """

    rows: Tensor
    slots: Tensor
    key_rows: Tensor
    query_starts: Tensor
    key_starts: Tensor
    positions: Tensor
    starts: Tensor
    sizes: tuple[int, ...]
    num_slots: int
    max_queries: int
    max_keys: int
    longest: int

    @classmethod
    def of(cls, depth: Tensor, doc_starts: Tensor) -> Layout:
        """Lay out a batch whose rows are supervised for `depth` steps [N]."""
        depth, doc_starts = depth.cpu(), doc_starts.cpu()
        documents = list(pairwise(doc_starts.tolist()))
        pieces = [piece for doc in documents for piece in _segments(depth[slice(*doc)], doc[0])]
        queries = [torch.arange(first, end) for _, first, end in pieces]
        keys = [torch.arange(doc_start, end) for doc_start, _, end in pieces]
        query_rows, key_rows = _concatenated(queries), _concatenated(keys)
        slot_of_row = torch.empty(depth.numel(), dtype=torch.int64)
        slot_of_row[query_rows] = torch.arange(len(query_rows))
        rows = depth.argsort(descending=True, stable=True)[: int((depth > 0).sum())]
        deeper = (depth.numel() - depth.bincount().cumsum(0))[:-1]  # rows with depth > k
        return cls(
            rows=rows,
            slots=slot_of_row[rows],
            key_rows=key_rows,
            query_starts=_starts([len(q) for q in queries]).int(),
            key_starts=_starts([len(k) for k in keys]).int(),
            positions=_concatenated([torch.arange(end - start) for start, end in documents]),
            starts=_starts(deeper.tolist()),
            sizes=tuple(deeper.tolist()),
            num_slots=len(query_rows),
            max_queries=max(map(len, queries), default=0),
            max_keys=max(map(len, keys), default=0),
            longest=max(end - start for start, end in documents),
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


def _segments(depth: Tensor, doc_start: int) -> list[tuple[int, int, int]]:
    """(document's first row, first query row, end) of each segment of one document."""
    rows = (depth > 0).nonzero().flatten()
    if rows.numel() == 0:
        return []
    gaps = rows.diff() - 1
    widest = gaps.argsort(descending=True)[: MAX_SEGMENTS - 1]
    cuts = widest[gaps[widest] >= MIN_GAP].sort().values
    found = torch.tensor_split(rows + doc_start, cuts + 1)
    return [(doc_start, int(piece[0]), int(piece[-1]) + 1) for piece in found]


def _starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def _concatenated(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
