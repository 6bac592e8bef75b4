"""The extract command against real servers: killed clients, dying servers, bounded memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

from chaos_extract import LAYERS, Place, Supervised, Trial, hit_client, kill_point
from eagle3.target import Target
from extraction.spool import KEPT
from tests.integration.conftest import AUX_LAYERS, CaptureServer

pytestmark = pytest.mark.server
SAMPLES = 120
GROWTH_MB = 60
"""Allocators keep some of what they once had; a leak of samples would be ten times that."""


@pytest.fixture(scope="module")
def place(capture_server: CaptureServer) -> Place:
    assert LAYERS == AUX_LAYERS
    return Place(capture_server.server.url, capture_server.spool.folder)


@pytest.fixture(scope="module")
def trial(target: Target, place: Place, tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """Extractions of the same samples; the one called `undisturbed` is done."""
    trial = Trial(target, tmp_path_factory.mktemp("trial"), SAMPLES)
    assert trial.finish("undisturbed", [place]) == 1
    return trial


def require_same(trial: Trial, name: str, places: list[Place]) -> None:
    assert trial.bytes_of(name) == trial.bytes_of("undisturbed")
    assert {f.name for p in places for f in p.spool.iterdir()} <= KEPT


@pytest.mark.parametrize("moment", [0.0, 0.35])
def test_a_killed_client_loses_nothing(trial: Trial, place: Place, moment: float) -> None:
    """The rest, with the server killed as well, is bench/chaos_extract.py."""
    name = f"killed-{moment}"
    point = kill_point(trial, name, "client", moment, [place], None)
    assert point["hit"] or moment, "killed too late to prove anything"
    require_same(trial, name, [place])


@pytest.mark.slow
def test_killing_anything_twenty_times_changes_nothing(tmp_path: Path) -> None:
    """Client, server or both, at seeded random moments; about ten minutes."""
    out = tmp_path / "chaos.json"
    command = [sys.executable, "bench/chaos_extract.py", "--kill-points", "20", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert result["identical"] == result["kill_points"] == 20
    assert result["hit_while_running"] >= 15


def test_before_its_first_shard_as_well(trial: Trial, place: Place) -> None:
    client = trial.start("early", [place])
    while not (trial.folder / "early" / "store" / "manifest.json").exists():
        assert client.poll() is None
        time.sleep(0.005)
    hit_client(client)
    trial.finish("early", [place])
    require_same(trial, "early", [place])


def test_the_others_take_over_from_a_server_that_dies(
    trial: Trial, place: Place, target: Target, tmp_path: Path
) -> None:
    second = Supervised(target, tmp_path / "second")
    places = [place, Place(second.server.url, second.spool.folder)]
    try:
        client = trial.start("taken-over", places)
        while not trial.committed("taken-over"):
            assert client.poll() is None
            time.sleep(0.005)
        second.kill()
        assert client.wait() == 0
    finally:
        second.stop()
    require_same(trial, "taken-over", places)


def verify(trial: Trial, place: Place, *more: str) -> subprocess.CompletedProcess[str]:
    command = trial.command("extraction.verify", "undisturbed", [place])
    return subprocess.run([*command, *more], capture_output=True, text=True, check=False)


def test_recapturing_a_sample_gives_the_same_bytes(trial: Trial, place: Place) -> None:
    done = verify(trial, place, "verify.recapture=7", "verify.min_agreement=0")  # random tokens
    assert done.returncode == 0, done.stderr[-3000:]
    assert "captured 7 again: 7 identical, largest difference 0.0e+00" in done.stdout


def test_random_text_is_not_what_the_target_says(trial: Trial, place: Place) -> None:
    done = verify(trial, place, "verify.min_agreement=0.5")
    assert done.returncode == 1 and "of another text?" in done.stdout


def test_memory_does_not_grow_with_the_number_of_samples(
    target: Target, place: Place, capture_server: CaptureServer, tmp_path: Path
) -> None:
    """Ten times the samples and shards: client and server need about as much as before."""
    process = capture_server.server.process
    assert process is not None
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    clients, servers = [], []
    for samples in (SAMPLES, 10 * SAMPLES):
        folder = tmp_path / str(samples)
        folder.mkdir()
        client = Trial(target, folder, samples).start("run", [place])
        _, status, usage = os.wait4(client.pid, 0)
        assert status == 0
        clients.append(usage.ru_maxrss / 1e3)
        servers.append(sum(p.memory_info().rss for p in family) / 1e6)
    assert clients[1] - clients[0] < GROWTH_MB, clients
    assert servers[1] - servers[0] < GROWTH_MB, servers


def test_the_budget_is_told_without_anything_running(trial: Trial, place: Place) -> None:
    command = trial.command("extraction.plan", "planned", [place])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{SAMPLES} samples" in done.stdout and "-> int6" in done.stdout
    refused = subprocess.run(
        [*command, "extract.tokens_per_s=1", "extract.max_hours=0.01"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert refused.returncode == 2 and "over extract.max_hours=0.01" in refused.stderr


def test_a_rate_that_is_too_slow_ends_the_run_and_keeps_what_is_there(
    trial: Trial, place: Place
) -> None:
    command = trial.command("extraction.extract", "slow", [place])
    done = subprocess.run(
        [*command, "extract.max_hours=1e-6"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "over extract.max_hours" in done.stderr
    assert trial.committed("slow") > 0
    trial.finish("slow", [place])
    require_same(trial, "slow", [place])
