from itertools import pairwise

import torch

from eagle3.batch import depths
from eagle3.fast.layout import Layout
from eagle3.ttt import supervised_rows
from tests.conftest import laid_out, make_batch, ragged_masks, tiny_config


def test_the_worked_example_of_the_layout() -> None:
    found = Layout.of(torch.tensor([0, 2, 1, 0, 0, 0, 2, 1, 0]), torch.tensor([0, 9]))
    assert found.rows.tolist() == [1, 6, 2, 7] and found.sizes == (4, 2)
    assert found.slots.tolist() == [0, 2, 1, 3] and found.seen.tolist() == [1, 2, 6, 7]
    assert found.query_starts.tolist() == [0, 4] and found.key_starts.tolist() == [0, 9]
    assert found.first_queries.tolist() == [0, 0, 1, 2, 2, 2, 2, 3, 4]
    assert found.starts.tolist() == [0, 4, 6] and found.parts(5) == [slice(0, 4), slice(4, 6)]
    assert found.counts(3).tolist() == [4, 2, 0]


def test_every_layout_holds_each_supervised_row_once() -> None:
    batch = make_batch(ragged_masks(), tiny_config())
    depth, found = depths(batch), laid_out(batch)
    for k, size in enumerate(found.sizes):
        assert sorted(found.rows[:size].tolist()) == (depth > k).nonzero().flatten().tolist()
    assert found.counts(300).tolist() == supervised_rows(batch, 300).tolist()
    assert torch.equal(found.positions, batch.positions())
    in_order = torch.empty_like(found.rows)
    in_order[found.slots] = found.rows
    assert in_order.tolist() == (depth > 0).nonzero().flatten().tolist()
    assert torch.equal(found.seen, found.positions[in_order].int())
    docs = batch.doc_of_row()
    bounds = found.query_starts.tolist()
    for doc, (start, end) in enumerate(pairwise(bounds)):
        assert (docs[in_order[start:end]] == doc).all()
        for row in (docs == doc).nonzero().flatten().tolist():
            seeing = (in_order[start:end] >= row).nonzero().flatten().tolist()
            assert found.first_queries[row] == (start + seeing[0] if seeing else end)


def test_nothing_supervised() -> None:
    found = laid_out(make_batch([[0, 0], [1]], tiny_config()))
    assert found.sizes == () and found.parts(3) == [] and found.counts(2).tolist() == [0, 0]
