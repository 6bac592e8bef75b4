"""What a run trains, above all one that goes on from an existing drafter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle3 import export, speculators_format
from eagle3.config import Config, DraftConfig, TargetConfig, TrainConfig
from eagle3.errors import UserError
from eagle3.manifest import Manifest
from eagle3.target import Target
from eagle3.vocab import DraftVocab
from tests.unit.test_export import AUX, target_drafter
from training.model import build_model, draft_vocab, init_identity


class Store:
    """All that the draft vocabulary is built from; its counts would give another one."""

    def __init__(self, vocab_size: int) -> None:
        self.counts = torch.arange(vocab_size)

    def generated_counts(self, numbers: list[int]) -> torch.Tensor:
        return self.counts


def run(folder: Path, draft: DraftConfig | None = None, aux: list[int] = AUX) -> Config:
    return Config(
        target=TargetConfig(aux_layers=aux),
        draft=draft or DraftConfig(),
        train=TrainConfig(init_from=str(folder)),
    )


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("form", ["sglang", "speculators"])
def test_weights_shape_and_maps_are_kept(
    target: Target, tmp_path: Path, form: str, num_layers: int
) -> None:
    drafter = target_drafter(target, num_layers=num_layers, intermediate_size=96)
    if form == "sglang":
        manifest = Manifest(kind="drafter", match={})
        export.save_sglang(drafter, tmp_path, target, AUX, torch.float32, manifest)
    else:
        speculators_format.save(drafter, tmp_path, target, AUX, 3)
    config = run(tmp_path)
    vocab, coverage = draft_vocab(config, Store(target.vocab_size), [])  # type: ignore[arg-type]
    assert torch.equal(vocab.target_ids, drafter.vocab.target_ids)
    assert coverage < 0.5
    model = build_model(config, target, vocab)
    assert model.training and model.drafter.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(model.drafter.state_dict()[name], tensor), name
    assert not model.drafter.embed_tokens.weight.requires_grad
    # the teacher speaks the drafter's vocabulary
    assert torch.equal(model.teacher.inside, target.lm_head()[drafter.vocab.target_ids])


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"aux": [1, 2, 3]}, r"reads layers \[1, 3, 4\], the run \[1, 2, 3\]"),
        ({"draft": DraftConfig(num_layers=2)}, "draft.num_layers=2.*has 1"),
        ({"draft": DraftConfig(vocab_size=99)}, "draft.vocab_size=99.*has 256"),
        ({"draft": DraftConfig(fc_norm=True)}, "draft.fc_norm=True"),
    ],
)
def test_what_the_run_asks_for_must_be_what_the_drafter_is(
    target: Target, tmp_path: Path, config: dict, problem: str
) -> None:
    drafter = target_drafter(target)
    manifest = Manifest(kind="drafter", match={})
    export.save_sglang(drafter, tmp_path, target, AUX, torch.float32, manifest)
    with pytest.raises(UserError, match=problem):
        build_model(run(tmp_path, **config), target, drafter.vocab)


@pytest.mark.parametrize("folder", ["x/drafter", "x/drafter/speculators", "x/../x/drafter"])
def test_a_run_does_not_start_from_where_it_exports_to(tmp_path: Path, folder: str) -> None:
    """The first export would change what the run must find again to resume or export."""
    config = Config(run_name="x", runs_dir=str(tmp_path))
    config.train.init_from = str(tmp_path / folder)
    with pytest.raises(UserError, match="copy it elsewhere"):
        init_identity(config)
    config.train.init_from = str(tmp_path / "y" / "drafter")
    with pytest.raises(UserError, match="holds no model.safetensors"):
        init_identity(config)


def test_a_store_without_answers_is_refused(target: Target) -> None:
    store = Store(target.vocab_size)
    store.counts = torch.zeros(target.vocab_size, dtype=torch.int64)
    with pytest.raises(UserError, match="nothing to learn"):
        draft_vocab(Config(run_name="x"), store, [])  # type: ignore[arg-type]


class Wider(Target):
    """A target of other sizes."""

    hidden_size = 256


def test_a_drafter_of_another_target_is_refused(target: Target, tmp_path: Path) -> None:
    drafter = target_drafter(target)
    speculators_format.save(drafter, tmp_path, target, AUX, 3)
    wider = Wider(folder=target.folder)
    with pytest.raises(UserError, match="hidden size 128 and 2048 tokens; .* has 256"):
        build_model(run(tmp_path), wider, drafter.vocab)
    with pytest.raises(UserError, match="2048 target tokens, not 7"):
        draft_vocab(run(tmp_path), Store(7), [])  # type: ignore[arg-type]
    with pytest.raises(UserError, match="holds no drafter"):
        draft_vocab(run(tmp_path / "none"), Store(7), [])  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["mask", "loss"])
def test_an_unknown_rule_or_loss_is_refused(target: Target, key: str) -> None:
    config = Config(train=TrainConfig(**{key: "other"}))
    with pytest.raises(UserError, match=f"train.{key}=other is not one of"):
        build_model(config, target, DraftVocab.build(torch.ones(2048), 64))
