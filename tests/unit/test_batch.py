import pytest
import torch

from eagle3.batch import depths, needed_final, supervised_by
from tests.conftest import make_batch, ragged_masks, tiny_config
from tests.unit.naive import supervised


def test_depths_of_the_worked_example() -> None:
    batch = make_batch([[0, 0, 1, 1, 1]], tiny_config())
    assert depths(batch).tolist() == [0, 2, 1, 0, 0]


@pytest.mark.parametrize("seed", range(5))
def test_depths_follow_the_rule_on_random_masks(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    masks = [
        (torch.rand(int(n), generator=generator) < 0.7).int().tolist()
        for n in torch.randint(1, 30, (12,), generator=generator)
    ]
    batch = make_batch(masks + ragged_masks(), tiny_config())
    depth = depths(batch)
    for step in range(6):
        assert (depth > step).nonzero().flatten().tolist() == supervised(batch, step)


def test_every_teacher_row_has_its_final_state() -> None:
    batch = make_batch(ragged_masks(), tiny_config())
    for step in range(5):
        rows = torch.tensor(supervised(batch, step))
        assert (batch.final_index[rows + 1 + step] >= 0).all()


def test_needed_final_keeps_the_rows_before_generated_tokens() -> None:
    assert needed_final(torch.tensor([0, 1, 1, 0, 0, 1])).tolist() == [1, 1, 0, 0, 1, 0]


def test_needed_final_of_documents_end_to_end_is_that_of_each() -> None:
    masks = [[0, 1, 1], [1], [1, 0], [0, 0], [1, 1, 0, 1]]
    ends = torch.tensor([0, *(len(m) for m in masks)]).cumsum(0)
    found = needed_final(torch.tensor([x for m in masks for x in m]), ends)
    assert found.tolist() == [x for m in masks for x in needed_final(torch.tensor(m)).tolist()]


def test_the_token_rule_drops_rows_whose_own_token_is_not_generated() -> None:
    """Against the rule in words, row by row, on several turns in several documents."""
    batch = make_batch(ragged_masks(), tiny_config())
    depth = depths(supervised_by("token", batch))
    for step in range(6):
        expected = [t for t in supervised(batch, step) if batch.loss_mask[t]]
        assert (depth > step).nonzero().flatten().tolist() == expected
    dropped = set(supervised(batch, 0)) - set((depth > 0).nonzero().flatten().tolist())
    first = [t for t in supervised(batch, 0) if not batch.loss_mask[t]]
    assert sorted(dropped) == first and len(first) > 5
    assert torch.equal(depths(supervised_by("serving", batch)), depths(batch))
