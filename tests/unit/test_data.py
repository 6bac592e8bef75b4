from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3.batch import depths, supervised_by
from eagle3.errors import UserError
from eagle3.store import codecs
from eagle3.store.reader import Packed
from tests.conftest import make_batch, ragged_masks, tiny_config
from training.data import BatchPlan, Split, pack, prefetch

LENGTHS = np.random.default_rng(0).integers(1, 60, size=200)


@pytest.mark.parametrize("num_samples", [2, 3, 10, 99])
@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.3, 0.5])
def test_splits_are_disjoint_and_complete(num_samples: int, ratio: float) -> None:
    each = np.arange(num_samples)
    split = Split.make(each, each, ratio, seed=1)
    assert sorted(split.train + split.validation) == list(range(num_samples))
    assert split.train and bool(split.validation) == (ratio > 0) and split.left_out == []
    assert split == Split.make(each, each, ratio, seed=1)


@pytest.mark.parametrize("seed", range(5))
def test_no_answer_to_a_held_out_prompt_is_trained_on(seed: int) -> None:
    openings = np.arange(90) // 3  # three answers to each prompt
    split = Split.make(openings, np.arange(90), 0.1, seed)
    assert sorted(split.train + split.validation + split.left_out) == list(range(90))
    assert len(split.validation) == 9 and 6 <= len(split.left_out) <= 18
    assert not set(openings[split.train]) & set(openings[split.validation])
    assert set(openings[split.left_out]) <= set(openings[split.validation])


def test_too_few_samples_to_split() -> None:
    with pytest.raises(UserError, match="validation_ratio"):
        Split.make(np.arange(1), np.arange(1), 0.05, seed=0)
    with pytest.raises(UserError, match="without answers to held-out prompts"):
        Split.make(np.zeros(9), np.arange(9), 0.05, seed=0)
    with pytest.raises(UserError, match="1 conversations cannot be split"):
        Split.make(np.arange(9), np.zeros(9), 0.05, seed=0)


@pytest.mark.parametrize("seed", range(20))
def test_all_turns_of_a_conversation_are_on_one_side(seed: int) -> None:
    """Also of one that opens as a held-out one, and so is left out."""
    rng = np.random.default_rng(seed)
    turns = rng.integers(1, 5, size=60)
    conversations = np.repeat(turns.cumsum() - turns, turns)  # each one's first sample
    openings = np.arange(len(conversations))
    openings[conversations[rng.integers(0, len(openings), 20)]] = 0  # one prompt, many times
    split = Split.make(openings, conversations, 0.1, seed)
    sides = [set(conversations[part]) for part in (split.train, split.validation, split.left_out)]
    assert sum(map(len, sides)) == len(set().union(*sides)) == 60 and len(sides[1]) == 6
    assert not set(openings[split.train]) & set(openings[split.validation])
    told = set(openings[split.validation])
    assert all(told & set(openings[conversations == one]) for one in sides[2])
    everything = split.train + split.validation + split.left_out
    assert sorted(everything) == list(range(len(openings)))


@pytest.mark.parametrize("seed", range(5))
def test_single_samples_are_split_as_before_conversations_counted(seed: int) -> None:
    """Trainings from then resume. Numbers of rejected samples are missing among theirs."""
    openings = np.random.default_rng(seed).integers(0, 70, size=80)
    numbers = np.delete(np.arange(90), np.arange(0, 90, 9))
    order = np.random.default_rng([seed, 0x5911]).permutation(80)
    validation, others = np.sort(order[:8]), np.sort(order[8:])
    told = np.isin(openings[others], openings[validation])
    assert Split.make(openings, numbers, 0.1, seed) == Split(
        train=others[~told].tolist(),
        validation=validation.tolist(),
        left_out=others[told].tolist(),
    )


def test_a_training_does_not_go_on_with_another_split() -> None:
    split, root = Split(train=[0], validation=[1], left_out=[3]), Path("runs/x/train")
    assert split.facts == {"validation_samples": [1], "left_out_samples": [3]}
    split.require_same({**split.facts, "coverage": 1.0}, root)
    Split(train=[0], validation=[1], left_out=[]).require_same({"validation_samples": [1]}, root)
    for other in ({"validation_samples": [2]}, {"left_out_samples": [3, 4]}):
        with pytest.raises(UserError, match="x/train was trained with another split"):
            split.require_same(split.facts | other, root)


def plan(seed: int = 0) -> BatchPlan:
    return BatchPlan(lengths=LENGTHS, numbers=range(200), tokens_per_batch=128, seed=seed)


def test_every_epoch_has_every_sample_once_in_a_new_order() -> None:
    epochs = [sum(plan().epoch(e), []) for e in range(3)]
    assert all(sorted(e) == list(range(200)) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_batches_stay_within_the_token_budget() -> None:
    for batch in plan().epoch(0):
        assert 0 < sum(LENGTHS[n] for n in batch) <= 128


def test_the_stream_is_a_pure_function_of_seed_and_index() -> None:
    first = [plan().micro_batch(i) for i in range(150)]
    asked_backwards = plan()
    assert [asked_backwards.micro_batch(i) for i in reversed(range(150))] == first[::-1]
    assert [plan(seed=1).micro_batch(i) for i in range(20)] != first[:20]


def test_number_of_batches() -> None:
    p = plan()
    per_epoch = [len(p.epoch(e)) for e in range(3)]
    assert p.num_batches(2) == per_epoch[0] + per_epoch[1]
    assert p.num_batches(0.5) == round(per_epoch[0] / 2)
    assert p.num_batches(2.5) == per_epoch[0] + per_epoch[1] + round(per_epoch[2] / 2)


def test_a_sample_longer_than_a_batch_is_a_users_mistake() -> None:
    with pytest.raises(UserError, match="tokens_per_batch=20"):
        BatchPlan(lengths=LENGTHS, numbers=range(200), tokens_per_batch=20, seed=0)


def test_pack_keeps_the_order() -> None:
    assert pack([2, 0, 1], np.array([3, 3, 4]), 7) == [[2, 0], [1]]


def test_prefetch_applies_the_rule_of_what_is_supervised() -> None:
    class Reader:
        def pack(self, numbers: list[int], mask: str, pinned: bool) -> Packed:
            batch = make_batch(ragged_masks(), tiny_config())
            states = {"aux.values": batch.aux, "final.values": batch.final}
            tokens = supervised_by(mask, batch)
            return Packed(tokens=tokens, states=states, codec=codecs.get("fp32"))

    def rows(mask: str) -> int:
        (found,) = prefetch(
            Reader(), [[0]], torch.device("cpu"), torch.float32, mask=mask  # type: ignore[arg-type]
        )  # fmt: skip
        return int((depths(found.batch) > 0).sum())

    assert rows("serving") > rows("token") > 0
