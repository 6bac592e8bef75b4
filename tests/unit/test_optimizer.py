from types import SimpleNamespace

import pytest
import torch

from eagle3.config import Config, OptimizerConfig
from eagle3.errors import UserError
from eagle3.loss import Teacher
from eagle3.ttt import TTTModel
from tests.conftest import tiny_drafter
from training import optimizer, weights
from training.engine import EngineModel
from training.muon import Muon

MUON = OptimizerConfig(name="muon", lr=1e-2, weight_decay=0.1, momentum=0.9)


def set_gradients(drafter: torch.nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in drafter.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)


def steps(drafter: torch.nn.Module, *optimizers: torch.optim.Optimizer, num: int = 4) -> None:
    for seed in range(num):
        set_gradients(drafter, seed)
        for one in optimizers:
            one.step()


def trained(drafter: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in drafter.named_parameters() if p.requires_grad}


def test_muon_steps_the_matrices_and_adamw_the_rest() -> None:
    first, _ = tiny_drafter(torch.float32, fc_norm=True)
    second, _ = tiny_drafter(torch.float32, fc_norm=True)
    before = trained(first)
    steps(first, optimizer.build(first, MUON, None))
    theirs = [
        p
        for n, p in second.named_parameters()
        if n == "fc.weight" or n.endswith("_proj.weight") and p.requires_grad
    ]
    ids = {id(p) for p in theirs}
    others = [p for p in second.parameters() if p.requires_grad and id(p) not in ids]
    assert len(theirs) == 8 and len(others) == 8  # lm_head, four norms, three of fc_norm
    steps(
        second,
        Muon(theirs, lr=1e-2, weight_decay=0.1, momentum=0.9),
        torch.optim.AdamW(others, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1),
    )
    for name, tensor in trained(second).items():
        assert torch.equal(trained(first)[name], tensor), name
        assert not torch.equal(before[name], tensor), name


def test_a_first_muon_step_is_orthogonal_and_of_adamws_size() -> None:
    drafter, _ = tiny_drafter(torch.float32)
    config = OptimizerConfig(name="muon", lr=1e-3)
    before = trained(drafter)
    steps(drafter, optimizer.build(drafter, config, None), num=1)
    for name in ("fc.weight", "midlayer.mlp.down_proj.weight"):
        update = (before[name] - trained(drafter)[name]) / (1e-3 * 0.2)
        singular = torch.linalg.svdvals(update.double()) / max(update.shape) ** 0.5
        assert singular.min() > 0.5 and singular.max() < 1.3, name
    change = (before["norm.weight"] - trained(drafter)["norm.weight"]).abs()
    assert change == pytest.approx(torch.full_like(change, 1e-3), rel=1e-3)  # AdamW's: lr * sign


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_average_follows_its_formula(name: str) -> None:
    drafter, _ = tiny_drafter(torch.float32)
    config = OptimizerConfig(name=name, lr=1e-2)
    built = optimizer.build(drafter, config, 0.8)
    expected: dict[str, torch.Tensor] = {}
    for seed in range(5):
        set_gradients(drafter, seed)
        built.step()
        for key, value in trained(drafter).items():
            now = value.double()
            expected[key] = 0.8 * expected[key] + 0.2 * now if seed else now
    for key, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            found = built.state[parameter]["ema"]
            assert found.dtype == torch.float32
            assert (found.double() - expected[key]).abs().max() < 1e-6, key


def test_evaluation_sees_the_average_and_gives_the_weights_back() -> None:
    drafter, lm_head = tiny_drafter(torch.float32)
    model = TTTModel(drafter, Teacher(lm_head, drafter.vocab), [1.0])
    built = optimizer.build(drafter, OptimizerConfig(lr=1e-2), 0.5)
    steps(drafter, built)
    engine = SimpleNamespace(module=EngineModel(model), optimizer=built)
    before = trained(drafter)
    with pytest.raises(KeyError), weights.for_evaluation(engine, ema=True) as evaluated:
        assert not evaluated.training
        for name, parameter in weights.trainable(engine):
            assert torch.equal(parameter, built.state[parameter]["ema"])
            assert not torch.equal(parameter, before[name])
        raise KeyError
    assert model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in trained(drafter).items())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: setattr(c.optimizer, "name", "sgd"), "optimizer.name=sgd"),
        (lambda c: setattr(c.train, "ema", 1.0), "train.ema=1.0"),
        (lambda c: c.deepspeed.update(zero_optimization={"stage": 1}), "ZeRO stage 1"),
    ],
)
def test_what_cannot_work_is_refused(change, named: str) -> None:
    config = Config(run_name="x", optimizer=OptimizerConfig(name="muon"))
    optimizer.check(config)
    change(config)
    with pytest.raises(UserError, match=named):
        optimizer.check(config)
