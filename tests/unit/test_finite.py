from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eagle3.errors import UserError
from training.finite import require
from training.world import World

WORLD = World(rank=0, size=1, device=torch.device("cpu"))


def reader(damaged: int | None) -> SimpleNamespace:
    def states(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        final = torch.ones(2, 3)
        if number == damaged:
            final[1, 1] = float("-inf")
        return torch.ones(4, 3), final

    return SimpleNamespace(ids=["a", "b", "c"], states=states, folder=Path("runs/x/store"))


def test_what_is_finite_passes() -> None:
    require(torch.tensor(True), [0, 1], reader(damaged=1), WORLD, "the loss")


def test_a_damaged_sample_is_named() -> None:
    with pytest.raises(UserError, match=r"runs/x/store: b \(number 1\)\. Nothing was trained"):
        require(torch.tensor(False), [0, 1, 2], reader(damaged=1), WORLD, "the loss")


def test_divergence_is_no_samples_fault() -> None:
    with pytest.raises(RuntimeError, match="the loss of step 7 is not finite although") as caught:
        require(torch.tensor(False), [0, 2], reader(damaged=1), WORLD, "the loss of step 7")
    assert not isinstance(caught.value, UserError)
