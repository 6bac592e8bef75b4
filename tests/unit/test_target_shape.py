"""What is known of a target before its weights are there."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import huggingface_hub
import pytest

from eagle3 import layers, target_shape
from eagle3.config import TargetConfig, TargetShape
from eagle3.errors import UserError
from eagle3.store import budget, codecs
from eagle3.store.budget import Workload
from eagle3.target import Target
from tests.conftest import TINY
from tests.unit.test_config import load

TINY_SHAPE = TargetShape(
    architecture="LlamaForCausalLM", hidden_size=128, num_layers=6, vocab_size=2048
)


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A hub with an empty cache that never answers; the list says which calls were online."""
    online: list[bool] = []

    def unreachable(*args: object, local_files_only: bool, **kwargs: object) -> str:
        online.append(not local_files_only)
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    return online


def test_a_folders_config_json_gives_the_shape() -> None:
    assert target_shape.known(TargetConfig(path=str(TINY))) == TINY_SHAPE


def test_multi_modal_targets_nest_it(tmp_path: Path) -> None:
    text = {"hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 163840}
    data = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(data))
    kimi = load("experiment=kimi_k25", f"target.path={tmp_path}").target
    assert target_shape.known(kimi) == kimi.shape


@pytest.mark.parametrize("name", ["kimi_k25", "llama31_8b"])
def test_experiments_of_large_targets_are_planned_without_hub_or_weights(
    name: str, no_hub: list[bool]
) -> None:
    target = load(f"experiment={name}").target
    shape = target_shape.known(target)
    assert asdict(shape) == asdict(target.shape) and not any(no_hub)
    ids = layers.resolve(target.aux_layers, shape.num_layers, shape.architecture)
    assert ids == target.aux_layers


def test_the_storys_run_comes_to_its_bytes(tmp_path: Path, no_hub: list[bool]) -> None:
    """17.3 M tokens of 4 states of 7168 bf16 values: 924 GiB."""
    shape = target_shape.known(load("experiment=kimi_k25").target)
    work = Workload(num_samples=10_000, num_tokens=17_300_000, num_final=17_300_000)
    planned = budget.plan(
        tmp_path, codecs.get("bf16"), work, num_aux=3, hidden_size=shape.hidden_size
    )
    assert round(planned.store_bytes / 2**30) == 924


def test_a_shape_that_is_not_the_targets_is_refused_with_both_values() -> None:
    wrong = TargetShape(
        architecture="LlamaForCausalLM", hidden_size=4096, num_layers=6, vocab_size=2048
    )
    config = TargetConfig(path=str(TINY), shape=wrong)
    for look in (target_shape.known, Target.from_config):
        with pytest.raises(UserError, match=r"target\.shape\.hidden_size=4096.*has 128"):
            look(config)
    assert Target.from_config(TargetConfig(path=str(TINY), shape=TINY_SHAPE)).hidden_size == 128


def test_nothing_known_names_the_remedy(no_hub: list[bool]) -> None:
    with pytest.raises(UserError, match=r"set target\.shape"):
        target_shape.known(TargetConfig(path="somebody/some-model"))
    assert no_hub == [False, True]
