"""What DeepSpeed is told, and what is refused before it could go wrong."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from eagle3.config import Config
from eagle3.errors import UserError
from training import engine, optimizer
from training.engine import deepspeed_config, group_left_at_end, offloads_optimizer, use_threads

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
    assert not offloads_optimizer(empty) and not engine.uses_bf16(empty)
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


SIZES = ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE")


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine of 64 cores, of which nothing says how many ranks share it."""
    before = torch.get_num_threads()
    for name in SIZES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(engine, "ALONE", 64)
    yield monkeypatch
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("environment", "host_works", "expected"),
    [
        ({"WORLD_SIZE": "1"}, False, 8),
        ({"WORLD_SIZE": "1"}, True, 64),
        ({"WORLD_SIZE": "4"}, False, 8),
        ({"WORLD_SIZE": "4"}, True, 16),
        ({"WORLD_SIZE": "64", "LOCAL_WORLD_SIZE": "16"}, False, 4),
        ({"WORLD_SIZE": "64", "LOCAL_SIZE": "16"}, True, 4),
        ({"WORLD_SIZE": "100"}, True, 1),
    ],
)
def test_ranks_of_a_machine_share_its_cores(
    cores: pytest.MonkeyPatch, environment: dict[str, str], host_works: bool, expected: int
) -> None:
    for name, value in environment.items():
        cores.setenv(name, value)
    found = []
    for _ in range(2):  # a sweep's trainings join again
        use_threads(host_works)
        other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert torch.get_num_threads() == expected
    assert found == [expected, expected]  # the loader's thread too


def test_a_host_that_steps_the_optimizer_gets_its_threads_back(cores: pytest.MonkeyPatch) -> None:
    cores.setenv("WORLD_SIZE", "2")
    use_threads(host_works=False)
    use_threads(host_works=True)
    assert torch.get_num_threads() == 32
    offloaded = config(zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}})
    assert offloads_optimizer(offloaded)
    assert not offloads_optimizer(config(zero_optimization={"stage": 2}))
    assert not offloads_optimizer(config())


@pytest.mark.parametrize("host_works", [False, True])
def test_a_number_of_threads_in_the_environment_is_kept(
    cores: pytest.MonkeyPatch, host_works: bool
) -> None:
    cores.setenv("WORLD_SIZE", "1")
    cores.setenv("OMP_NUM_THREADS", "3")
    torch.set_num_threads(3)
    use_threads(host_works)
    assert torch.get_num_threads() == 3


def test_one_rank_on_a_cpu_keeps_what_it_has(cores: pytest.MonkeyPatch) -> None:
    """Setting even the same number would tell MKL to choose threads by another rule."""
    cores.setenv("WORLD_SIZE", "1")
    cores.setattr(engine, "ALONE", torch.get_num_threads())
    calls: list[int] = []
    with cores.context() as inside:
        inside.setattr(torch, "set_num_threads", calls.append)
        use_threads(host_works=True)
    assert calls == []


def test_joining_takes_the_share() -> None:
    """On a CPU, of 6 threads: two ranks' launcher is pretended, so that one process will do."""
    script = (
        "import torch; torch.set_num_threads(6)\n"
        "from training.engine import World\n"
        "World.join(); print('threads', torch.get_num_threads())"
    )
    kept = {k: v for k, v in os.environ.items() if k not in (*SIZES, "RANK", "LOCAL_RANK")}
    for ranks, expected in (("1", 6), ("2", 3)):
        env = {**kept, "CUDA_VISIBLE_DEVICES": "", "LOCAL_WORLD_SIZE": ranks}
        done = subprocess.run(
            [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
        )
        assert f"threads {expected}" in done.stdout


@pytest.mark.parametrize(
    ("end", "status", "left"),
    [
        ("pass", 0, True),
        ("sys.exit(2)", 2, True),
        ("sys.exit(143)", 143, False),
        ("1 / 0", 1, False),
    ],
)
def test_a_program_leaves_its_group(end: str, status: int, left: bool) -> None:
    """At its end and at a user's mistake; after anything else the group is left alone."""
    script = (
        "import atexit, sys\n"
        "import torch.distributed as dist\n"
        "from training.engine import World, group_left_at_end\n"
        "atexit.register(lambda: print('left', not dist.is_initialized(), flush=True))\n"
        f"with group_left_at_end():\n    World.join()\n    {end}\n"
    )
    kept = {k: v for k, v in os.environ.items() if k not in (*SIZES, "RANK", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, "-c", script], env={**kept, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert f"left {left}" in done.stdout
    assert done.returncode == status or not left  # what is not left may abort the process


def test_a_program_without_a_group_ends() -> None:
    with group_left_at_end():
        pass
