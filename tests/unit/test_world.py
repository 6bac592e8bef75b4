"""A rank's share of the machine, and how it leaves the others."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from training import world
from training.world import group_left_at_end, use_threads

SIZES = ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE")


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine of 64 cores, of which nothing says how many ranks share it."""
    before = torch.get_num_threads()
    for name in SIZES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(world, "ALONE", 64)
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
    cores.setattr(world, "ALONE", torch.get_num_threads())
    calls: list[int] = []
    with cores.context() as inside:
        inside.setattr(torch, "set_num_threads", calls.append)
        use_threads(host_works=True)
    assert calls == []


def test_joining_takes_the_share() -> None:
    """On a CPU, of 6 threads: two ranks' launcher is pretended, so that one process will do."""
    script = (
        "import torch; torch.set_num_threads(6)\n"
        "from training.world import World\n"
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
        "from training.world import World, group_left_at_end\n"
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
