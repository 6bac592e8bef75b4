"""Which rows of an earlier result file `bench/ablation.py` may keep."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from eagle3.manifest import Manifest

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

from ablation import ROWS, Row, identity, random_head

CI = ["experiment=ci"]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    Manifest(kind="store", match={"codec": "fp32"}).save(tmp_path / "store")
    return tmp_path / "store"


def test_a_row_is_known_by_what_it_composes_to(store: Path) -> None:
    """Not by how that is written, nor by where it is trained or what is measured afterwards."""
    same = [*CI, "runs_dir=/else", "train_dir=/there", "eval.max_new_tokens=7"]
    first = identity(Row(), CI, store)
    assert first == identity(Row(), same, store)
    assert first == identity(Row(overrides=("train.step_decay=0.8",)), CI, store)
    others = [
        identity(Row(overrides=("train.step_decay=0.7",)), CI, store),
        identity(Row(), [*CI, "optimizer.warmup_ratio=0.2"], store),
        identity(Row(start=random_head), CI, store),
        identity(Row(peer="speculators"), CI, store),
    ]
    assert len({first, *others}) == 5
    Manifest(kind="store", match={"codec": "int4"}).save(store)
    assert identity(Row(), CI, store) != first


def test_an_override_of_an_experiment_that_changed_is_another_row(store: Path) -> None:
    """As when `ci` came to use Muon: the row says the same, and trains something else."""
    row = ROWS["norm_output"]
    before = identity(row, [*CI, "optimizer=adamw", "draft.norm_before_fc=false"], store)
    assert before != identity(row, CI, store)
