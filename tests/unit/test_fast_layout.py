import pytest
import torch

from eagle3.batch import depths
from eagle3.fast import layout as layouts
from eagle3.fast.layout import Layout
from eagle3.ttt import supervised_rows
from tests.conftest import laid_out, make_batch, ragged_masks, tiny_config


def test_the_worked_example_of_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "MIN_GAP", 3)
    found = Layout.of(torch.tensor([0, 2, 1, 0, 0, 0, 2, 1, 0]), torch.tensor([0, 9]))
    assert found.rows.tolist() == [1, 6, 2, 7] and found.sizes == (4, 2)
    assert found.slots.tolist() == [0, 2, 1, 3] and found.num_slots == 4
    assert found.query_starts.tolist() == [0, 2, 4] and found.key_starts.tolist() == [0, 3, 11]
    assert found.key_rows.tolist() == [*range(3), *range(8)]
    assert found.starts.tolist() == [0, 4, 6] and found.parts(5) == [slice(0, 4), slice(4, 6)]
    assert found.counts(3).tolist() == [4, 2, 0]


@pytest.mark.parametrize("min_gap", [1, 4, 64])
def test_every_layout_holds_each_supervised_row_once(
    min_gap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "MIN_GAP", min_gap)
    batch = make_batch(ragged_masks(), tiny_config())
    depth, found = depths(batch), laid_out(batch)
    for k, size in enumerate(found.sizes):
        assert sorted(found.rows[:size].tolist()) == (depth > k).nonzero().flatten().tolist()
    assert found.counts(300).tolist() == supervised_rows(batch, 300).tolist()
    assert torch.equal(found.positions, batch.positions())
    assert len(found.slots.unique()) == len(found.slots)
    docs = batch.doc_of_row()
    ends = found.query_starts[1:].tolist()
    for row, slot in zip(found.rows.tolist(), found.slots.tolist(), strict=True):
        segment = next(i for i, end in enumerate(ends) if slot < end)
        keys = found.key_rows[found.key_starts[segment] : found.key_starts[segment + 1]]
        seen = keys[: len(keys) - (ends[segment] - 1 - slot)]
        assert seen.tolist() == [r for r in range(row + 1) if docs[r] == docs[row]]


def test_a_document_of_many_turns_has_few_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "MIN_GAP", 1)
    batch = make_batch([([0] * 9 + [1] * 4) * 30], tiny_config())
    assert len(laid_out(batch).query_starts) - 1 == layouts.MAX_SEGMENTS


def test_nothing_supervised() -> None:
    found = laid_out(make_batch([[0, 0], [1]], tiny_config()))
    assert found.sizes == () and found.parts(3) == [] and found.counts(2).tolist() == [0, 0]
