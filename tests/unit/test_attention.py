import pytest
import torch

from eagle3 import attention
from eagle3.attention import reference, segmented, segments
from eagle3.batch import depths
from tests.conftest import make_batch, ragged_masks, tiny_config


@pytest.mark.parametrize("num_own", [0, 1, 3])
@pytest.mark.parametrize("step", [0, 2])
def test_segmented_equals_reference_with_gradients(num_own: int, step: int) -> None:
    batch = make_batch(ragged_masks(), tiny_config())
    rows = (depths(batch) > step).nonzero().flatten()
    torch.manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    q, keys, values = (
        random(len(rows), 4, 8),
        random(batch.num_rows, 2, 8),
        random(batch.num_rows, 2, 8),
    )
    own_keys = [random(len(rows), 2, 8) for _ in range(num_own)]
    own_values = [random(len(rows), 2, 8) for _ in range(num_own)]
    inputs = [q, keys, values, *own_keys, *own_values]
    expected = reference(q, keys, values, own_keys, own_values, rows, batch.doc_starts)
    pieces = segments(rows, batch.doc_starts)
    found = segmented(q, keys, values, own_keys, own_values, pieces)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad(found, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_segments_never_cross_a_document() -> None:
    starts = torch.tensor([0, 3, 6, 9])
    found = segments(torch.tensor([1, 2, 3, 4, 7]), starts)
    assert [(s.first_row, s.end - s.start, s.doc_start) for s in found] == [
        (1, 2, 0),
        (3, 2, 3),
        (7, 1, 6),
    ]


def test_long_segments_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MOST_ROWS", 2)
    found = segments(torch.tensor([1, 2, 3, 4, 5, 7]), torch.tensor([0, 9]))
    assert [(s.start, s.end, s.first_row) for s in found] == [
        (0, 2, 1), (2, 4, 3), (4, 5, 5), (5, 6, 7),
    ]  # fmt: skip
