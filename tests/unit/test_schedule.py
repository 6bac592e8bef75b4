import math

import pytest

from eagle3.config import OptimizerConfig
from eagle3.errors import UserError
from training.schedule import check, learning_rate


def rates(num_steps: int, **settings: object) -> list[float]:
    config = OptimizerConfig(lr=1.0, warmup_ratio=0.1, min_lr_ratio=0.2, **settings)
    check(config)
    return [learning_rate(step, num_steps, config) for step in range(num_steps)]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warm_up_is_linear_and_ends_at_lr(schedule: str) -> None:
    assert rates(100, schedule=schedule)[:10] == pytest.approx([k / 10 for k in range(1, 11)])


def test_cosine_follows_its_formula() -> None:
    found = rates(100, schedule="cosine")
    for step in (10, 37, 99):
        wave = math.cos(math.pi * (step - 10) / 90)
        assert found[step] == pytest.approx(0.2 + 0.8 * (1 + wave) / 2)


def test_wsd_is_flat_and_then_falls_linearly() -> None:
    found = rates(100, schedule="wsd", decay_ratio=0.3)
    assert found[9:71] == [1.0] * 62
    drops = [a - b for a, b in zip(found[70:], found[71:], strict=False)]
    assert drops == pytest.approx([0.8 / 30] * 29)
    assert found[-1] == pytest.approx(0.2 + 0.8 / 30)


def test_wsd_without_decay_is_constant() -> None:
    assert rates(40, schedule="wsd", decay_ratio=0.0) == rates(40, schedule="constant")
    assert rates(40, schedule="constant")[4:] == [1.0] * 36


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_short_runs_have_a_rate(schedule: str, num_steps: int) -> None:
    assert all(0 < rate <= 1 for rate in rates(num_steps, schedule=schedule, decay_ratio=0.9))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"schedule": "linear"}, "optimizer.schedule=linear"),
        ({"decay_ratio": 1.5}, "optimizer.decay_ratio=1.5"),
        ({"schedule": "wsd", "decay_ratio": 0.95}, "their sum"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(settings: dict, named: str) -> None:
    with pytest.raises(UserError, match=named):
        rates(100, **settings)
