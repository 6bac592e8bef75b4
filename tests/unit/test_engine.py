"""What DeepSpeed is told, and what is refused before it could go wrong."""

from typing import Any

import pytest

from eagle3.config import Config
from eagle3.errors import UserError
from training.engine import deepspeed_config


def config(accumulation: int = 2, **deepspeed: Any) -> Config:
    found = Config(run_name="x", deepspeed=deepspeed)
    found.train.accumulation = accumulation
    return found


def test_the_users_settings_go_through_and_ours_are_added() -> None:
    found = deepspeed_config(
        config(zero_optimization={"stage": 1, "reduce_bucket_size": 7}, gradient_clipping=0.5)
    )
    assert found["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 7}
    assert found["gradient_clipping"] == 0.5 and found["gradient_accumulation_steps"] == 2


def test_zero_3_keeps_every_parameter_whole() -> None:
    found = deepspeed_config(config(zero_optimization={"stage": 3}))
    assert found["zero_optimization"]["stage3_param_persistence_threshold"] > 1e11


@pytest.mark.parametrize(
    ("deepspeed", "named"),
    [
        ({"optimizer": {"type": "Adam"}}, "deepspeed.optimizer"),
        ({"fp16": {"enabled": True}}, "deepspeed.fp16"),
        (
            {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
            "stage3_param_persistence_threshold",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            "offload_optimizer.device",
        ),
        (
            {
                "zero_optimization": {"stage": 0},
                "bf16": {"enabled": True},
                "data_types": {"grad_accum_dtype": "fp32"},
            },
            "grad_accum_dtype",
        ),
    ],
)
def test_what_would_go_wrong_is_refused(deepspeed: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        deepspeed_config(config(**deepspeed))
