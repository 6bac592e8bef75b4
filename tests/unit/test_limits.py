"""Numbers that no training can have are told by their key, before anything starts."""

import pytest

from eagle3.errors import UserError
from tests.unit.test_config import EXPERIMENTS, load
from training.limits import LIMITS, check


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_is_within_them(experiment: str) -> None:
    check(load(f"experiment={experiment}"))


@pytest.mark.parametrize("key", [key for _, _, keys in LIMITS for key in keys])
def test_a_number_outside_is_refused(key: str) -> None:
    config = load("experiment=ci", f"{key}=-1")
    with pytest.raises(UserError, match=f"{key}=-1.* must be "):
        check(config)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.save_every=0", "at least 1"),
        ("train.keep_checkpoints=0", "at least 1"),  # would keep all
        ("train.epochs=0", "above 0"),
        ("optimizer.lr=0", "above 0"),
        ("optimizer.lr=nan", "above 0"),
        ("train.validation_ratio=1", "below 1"),
        ("optimizer.beta2=1", "below 1"),
    ],
)
def test_the_edges(override: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check(load("experiment=ci", override))


def test_what_is_at_the_edge_and_can_be() -> None:
    edges = ["train.simulate_samples=0", "train.validation_ratio=0", "train.step_decay=0", "seed=0"]
    check(load("experiment=ci", *edges))
