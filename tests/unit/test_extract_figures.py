"""The arithmetic of `bench/extract.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

import extract_figures
from extract_figures import Round, disk_mb_s, row_of


def test_a_row_has_the_medians_of_its_rounds() -> None:
    """1,000 tokens a round of 20 bytes each; finishing counts in one speed, not in the other."""
    times = [(2.0, 0.5, 450.0), (4.0, 1.0, 500.0), (5.0, 5.0, 800.0)]
    rounds = [
        Round(tokens=1000, plain_tok_s=plain, captured_s=captured, finish_s=finish, size=20_000)
        for captured, finish, plain in times
    ]
    row = row_of("int6", rounds, 700.0, None)
    assert (row.plain_tok_s, row.capture_tok_s, row.captured_tok_s) == (500.0, 200.0, 250.0)
    assert row.finish_s == 1.0 and row.ratio == 0.4
    assert row.bytes_per_token == 20.0 and row.spool_gb_s == 20 * 200 / 1e9
    assert row.codec == "int6" and row.disk_mb_s == 700.0 and row.gpu_gib is None


def test_the_disk_is_measured_by_a_whole_file_that_is_synced_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, synced = iter([10.0, 12.0]), []

    def fsync(handle: int) -> None:
        with safe_open(Path(f"/proc/self/fd/{handle}").resolve(), "pt") as file:
            synced.append(file.get_slice("data").get_shape())

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(extract_figures.time, "perf_counter", lambda: next(clock))
    assert disk_mb_s(tmp_path, 3_000_000) == 1.5
    assert synced == [[3_000_000]] and not list(tmp_path.iterdir())
