"""The comparison with other trainers: same model, same rows, and a check that would notice."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

import agree
import peers
from eagle3.errors import UserError
from peer_training import SpeculatorsRecipe, recipe_of
from runs import Clock, groups_for, sample_groups
from training.data import BatchPlan


@pytest.mark.parametrize("system", list(agree.SYSTEMS))
def test_peers_compute_our_losses_and_gradients(system: str) -> None:
    pytest.importorskip("specforge" if system.startswith("specforge") else "speculators")
    (found,) = agree.compare(3, 400, seed=1, systems=[system])
    assert found["loss_difference"] < 1e-5
    assert found["gradient_difference"] < 1e-4
    assert found["weights_compared"] == (12 if system == "speculators" else 13)


def test_a_wrong_alignment_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row t with the token before the one that belongs to it."""
    right = peers.Speculators.inputs

    def wrong(self: peers.Speculators, *arguments: object) -> list:
        (packed,) = right(self, *arguments)
        return [{**packed, "input_ids": packed["input_ids"].roll(1, dims=1)}]

    monkeypatch.setattr(peers.Speculators, "inputs", wrong)
    (found,) = agree.compare(3, 400, seed=1, systems=["speculators"])
    assert found["loss_difference"] > 1e-3


def test_recipes_are_parsed_and_checked() -> None:
    recipe = recipe_of("speculators:lr=0.002,ttt_steps=5,norm_output=false")
    assert recipe == SpeculatorsRecipe(lr=0.002, ttt_steps=5, norm_output=False)
    with pytest.raises(UserError, match="no setting steps"):
        recipe_of("speculators:steps=5")
    with pytest.raises(UserError, match="not one of"):
        recipe_of("others")
    with pytest.raises(UserError, match="lr=fast"):
        recipe_of("speculators:lr=fast")
    with pytest.raises(UserError, match="norm_output=1"):
        recipe_of("speculators:norm_output=1")


def test_groups_hold_every_sample_of_an_epoch_once() -> None:
    import numpy as np

    lengths = np.array([5, 7, 3, 9, 4, 6])
    plan = BatchPlan(lengths=lengths, numbers=range(6), tokens_per_batch=12, seed=0)
    groups = sample_groups(plan, 2)
    assert sorted(n for _ in range(3) for n in next(groups)) == list(range(6))
    assert groups_for(plan, 2, 34) == 3 and groups_for(plan, 2, 35) == 4


def test_start_up_is_what_steady_steps_do_not_explain() -> None:
    clock = Clock(ends=[10.0, 11.0, 12.0, 13.0, 14.0, 15.0])
    assert clock.steady_s() == 1.0 and clock.start_up_s() == 9.0
    assert not clock.over(14.0)  # too few steps to tell a steady one
    clock = Clock(ends=[10.0 + step for step in range(20)])
    assert clock.over(28.0) and not clock.over(None) and not clock.over(29.0)
