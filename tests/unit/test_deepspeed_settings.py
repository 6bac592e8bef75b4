"""What DeepSpeed is told, and what is refused before it could go wrong."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3.config import Config
from eagle3.errors import UserError
from training import optimizer
from training.deepspeed_settings import deepspeed_config, offloads_optimizer, uses_bf16

ROOT = Path(__file__).resolve().parents[2]


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


def test_a_section_that_is_null_is_as_if_absent() -> None:
    empty = config(zero_optimization=None, bf16=None, data_types=None)
    assert deepspeed_config(empty)["zero_optimization"] == {}
    assert not offloads_optimizer(empty) and not uses_bf16(empty)
    optimizer.check(empty)


@pytest.mark.parametrize(
    "key",
    [
        "activation_checkpointing", "aio", "autotuning", "checkpoint", "comms_logger", "compile",
        "data_efficiency", "flops_profiler", "pipeline", "tensorboard", "timers",
    ],
)  # fmt: skip
def test_sections_that_deepspeed_knows_go_through(key: str) -> None:
    assert deepspeed_config(config(**{key: {}}))[key] == {}


@pytest.mark.parametrize("file", sorted((ROOT / "conf" / "deepspeed").glob("*.yaml")))
def test_our_own_files_hold_nothing_that_deepspeed_does_not_read(file: Path) -> None:
    data = yaml.safe_load(file.read_text())
    assert data.items() <= (deepspeed_config(config(**data)) | data).items()


@pytest.mark.parametrize(
    ("misspelt", "near"),
    [
        ("zero_optimizaton", "to zero_optimization"),
        ("gradient_cliping", "to gradient_clipping"),
        ("prescale_gradient", "to prescale_gradients"),
        ("bf_16", "to bf16"), ("data_type", "to data_types"), ("optimiser", ""),
        ("x", "remove it"),
    ],
)  # fmt: skip
def test_a_key_that_deepspeed_would_pass_over_is_refused(misspelt: str, near: str) -> None:
    with pytest.raises(UserError, match=rf"deepspeed.{misspelt} is nothing .*{near}"):
        deepspeed_config(config(**{misspelt: {"stage": 1}}))


@pytest.mark.parametrize(
    ("deepspeed", "named"),
    [
        ({"zero_optimization": {"stage": 7}}, "DeepSpeed refuses"),
        ({"zero_optimization": {"stage": "x"}}, "DeepSpeed refuses"),
        ({"zero_optimization": {"stage": "1"}}, "stage='1' must be a number"),
        ({"zero_optimization": {"stge": 1}}, "(?s)DeepSpeed refuses.*stge"),
        ({"zero_optimization": 3}, "DeepSpeed refuses"),
        ({"zero_optimization": {"offload_optimizer": 3}}, "(?s)DeepSpeed refuses.*offload_optimi"),
        ({"bf16": True}, "DeepSpeed refuses"),
        ({"bf16": {"enabled": "maybe"}}, "(?s)DeepSpeed refuses.*enabled"),
        ({"data_types": 5}, "DeepSpeed refuses"),
        ({"gradient_clipping": "big"}, "gradient_clipping=big must be at least 0"),
    ],
)
def test_a_value_of_another_form_is_told(deepspeed: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        deepspeed_config(config(**deepspeed))


def test_zero_3_keeps_every_parameter_whole() -> None:
    found = deepspeed_config(config(zero_optimization={"stage": 3}))
    assert found["zero_optimization"]["stage3_param_persistence_threshold"] > 1e11


@pytest.mark.parametrize(
    ("deepspeed", "named"),
    [
        ({"optimizer": {"type": "Adam"}}, "deepspeed.optimizer"),
        ({"fp16": {"enabled": True}}, "deepspeed.fp16"),
        ({"bfloat16": {"enabled": True}}, "deepspeed.bf16"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op"),
        ({"managed_gradient_accumulation": False}, "train.accumulation"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "below ZeRO stage 1"),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "below ZeRO stage 3",
        ),
        ({"gradient_clipping": -1.0}, "gradient_clipping=-1.0"),
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


def test_an_optimizer_on_the_host_is_told() -> None:
    offloaded = config(zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}})
    assert offloads_optimizer(offloaded)
    assert not offloads_optimizer(config(zero_optimization={"stage": 2}))
    assert not offloads_optimizer(config())
