"""The arithmetic of `bench/scaling.py`, and the store and target that it trains on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from eagle3.store.reader import StoreReader
from tests.conftest import TINY

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

from random_store import random_store, target_without_layers
from scaling import SMALL, entry
from scaling_rank import together


def test_a_row_of_two_ranks() -> None:
    """300 tokens a step; its time is the median of the slower rank, not a mean."""
    found = together(
        [
            {"ms": [10.0, 20.0, 90.0], "work": [6, 2, 4], "tokens": 600, "peak": 3 << 30},
            {"ms": [11.0, 19.0, 80.0], "work": [2, 6, 2], "tokens": 300, "peak": 2 << 30},
        ]
    )
    assert found["step_ms"] == 20.0 and found["steps_ms"] == [10.0, 20.0, 90.0]
    assert found["tokens_per_step"] == 300.0 and found["tok_s"] == 15000.0
    assert found["balance"] == pytest.approx(4 / 6, abs=1e-4)  # of 4/6, 4/6 and 3/4
    assert found["peak_gib"] == 3.0 and found["peak_gib_of_ranks"] == [3.0, 2.0]


def test_efficiency_is_against_one_rank_at_the_same_stage() -> None:
    table = [entry(1, {"name": "zero1", "tok_s": 100.0}, [])]
    table.append(entry(1, {"name": "zero2", "tok_s": 80.0}, table))
    assert [row["efficiency"] for row in table] == [1.0, 1.0]
    two = entry(2, {"name": "zero2", "tok_s": 120.0}, table)
    assert two["efficiency"] == 0.75 and two["tok_s_per_rank"] == 60.0
    assert entry(2, {"name": "zero3", "tok_s": 120.0}, table)["efficiency"] is None
    failed = entry(2, {"name": "zero1", "error": "why"}, table)
    assert failed == {"ranks": 2, "deepspeed": "zero1", "error": "why"}


def test_the_store_fits_the_target_and_is_what_it_says(tmp_path: Path) -> None:
    target = target_without_layers(tmp_path / "target", SMALL, TINY)
    tokens = random_store(tmp_path / "store", target, "int4", 5000, (200, 400))
    reader = StoreReader(tmp_path / "store")
    assert reader.lengths.sum() == tokens >= 5000
    assert reader.lengths.min() >= 200 and reader.lengths.max() <= 400
    labels = torch.cat([torch.as_tensor(reader.tokens(n)[1]) for n in range(len(reader))]).float()
    assert float(labels.mean()) == pytest.approx(0.58, abs=0.005)
    assert reader.manifest.match["target"] == target.identity()
    assert target.lm_head().shape == target.embeddings().shape == (2048, 128)
