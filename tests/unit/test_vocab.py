import pytest
import torch

from eagle3.errors import UserError
from eagle3.vocab import DraftVocab


def test_most_frequent_tokens_in_ascending_order() -> None:
    counts = torch.tensor([0, 5, 1, 9, 0, 1])
    vocab = DraftVocab.build(counts, 3)
    assert vocab.target_ids.tolist() == [1, 2, 3]  # the tie between 2 and 5 goes to the lower id
    assert vocab.coverage(counts) == pytest.approx(15 / 16)


def test_fewer_distinct_tokens_than_the_vocabulary_are_padded_with_unique_ids() -> None:
    vocab = DraftVocab.build(torch.tensor([0, 0, 0, 7, 0, 0]), 4)
    assert vocab.target_ids.tolist() == [0, 1, 2, 3]


def test_maps_are_consistent() -> None:
    vocab = DraftVocab.build(torch.randint(0, 9, (100,)), 40)
    assert torch.equal(vocab.d2t + torch.arange(40), vocab.target_ids)
    assert vocab.t2d.sum() == 40 and vocab.t2d[vocab.target_ids].all()
    assert torch.equal(vocab.draft_index[vocab.target_ids], torch.arange(40))
    assert (vocab.draft_index[~vocab.t2d] == -1).all()
    assert torch.equal(DraftVocab.from_d2t(vocab.d2t, 100).target_ids, vocab.target_ids)


@pytest.mark.parametrize("size", [0, 7])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(UserError, match="draft.vocab_size"):
        DraftVocab.build(torch.ones(6), size)


def test_absolute_ids_are_not_taken_for_offsets() -> None:
    with pytest.raises(UserError, match="offsets"):
        DraftVocab.from_d2t(torch.tensor([3, 50, 90]), 91)
