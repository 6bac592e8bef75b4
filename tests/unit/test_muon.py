import pytest
import torch
from torch import nn

from training.muon import Muon, orthogonal


@pytest.mark.parametrize("shape", [(24, 24), (8, 40), (40, 8)])
def test_updates_are_nearly_orthogonal_whatever_the_scale(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    for scale in (1e-6, 1.0, 1e4):
        matrix = torch.randn(shape) * scale
        found = orthogonal(matrix)
        values = torch.linalg.svdvals(found)
        assert found.dtype == torch.float32 and values.max() < 1.3
        assert values.quantile(0.1) > 0.6  # the smallest of a square matrix may take more steps
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        assert torch.nn.functional.cosine_similarity(found.flatten(), (u @ v).flatten(), 0) > 0.95


def test_zero_gradients_change_nothing() -> None:
    weight = nn.Parameter(torch.randn(4, 6))
    before = weight.detach().clone()
    weight.grad = torch.zeros_like(weight)
    Muon([weight], lr=0.1, momentum=0.9, weight_decay=0.0).step()
    assert torch.equal(weight, before)


def test_steps_are_those_of_torch_up_to_its_bfloat16() -> None:
    torch.manual_seed(0)
    start = [torch.randn(12, 30) / 5, torch.randn(30, 12) / 5]
    ours, theirs = ([nn.Parameter(w.clone()) for w in start] for _ in range(2))
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    mine = Muon(ours, **settings)
    torchs = torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **settings)
    for _ in range(6):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        mine.step()
        torchs.step()
    for a, b, w in zip(ours, theirs, start, strict=True):
        assert (a - b).norm() < 0.02 * (a - w).norm()
