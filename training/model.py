"""What a run trains: its store, its draft vocabulary, and the drafter it starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from eagle3 import export as formats
from eagle3 import provenance, speculators_format
from eagle3.batch import MASKS
from eagle3.config import Config, DraftConfig
from eagle3.drafter import Drafter, DrafterConfig
from eagle3.drafter_folder import WEIGHTS
from eagle3.errors import UserError
from eagle3.loss import LOSSES, Teacher
from eagle3.manifest import require_match
from eagle3.store.reader import StoreReader
from eagle3.target import Target
from eagle3.ttt import TTTModel
from eagle3.vocab import DraftVocab


def open_store(config: Config, target: Target) -> StoreReader:
    """The run's store, refused unless it was captured from this target at these layers."""
    reader = StoreReader(config.store_dir)
    wanted = {
        "target": target.identity(),
        "aux_layers": target.aux_layers(config.target.aux_layers),
        "final": "post-norm",
    }
    remedy = "Point `target` at the model the store was captured from, or extract again."
    require_match(wanted, reader.manifest.match, f"the store in {config.store_dir}", remedy)
    return reader


def draft_vocab(
    config: Config, reader: StoreReader, train_samples: Sequence[int]
) -> tuple[DraftVocab, float]:
    """The draft vocabulary, and the share of the generated tokens it covers.

    Built from the training labels; a drafter to start from keeps its own.

    Raises:
        UserError: there is no label, or no such drafter.
    """
    counts = reader.generated_counts(train_samples)
    if not counts.any():
        raise UserError(
            f"no training sample in {config.store_dir} has a token that the target generated, so "
            "there is nothing to learn: check the roles in data.conversations and extract again"
        )
    if config.train.init_from is None:
        vocab = DraftVocab.build(counts, config.draft.vocab_size)
    else:
        folder = Path(config.train.init_from)
        load_vocab = (
            speculators_format.load_vocab
            if speculators_format.recognised(folder)
            else formats.load_vocab
        )
        vocab = load_vocab(folder, len(counts))
    return vocab, vocab.coverage(counts)


def init_identity(config: Config) -> str | None:
    """Hash of the weights the run starts from, None for a fresh drafter.

    Raises:
        UserError: they are not there, or would not stay.
    """
    if config.train.init_from is None:
        return None
    folder = Path(config.train.init_from)
    if config.drafter_dir.resolve() in (folder.resolve(), folder.resolve().parent):
        raise UserError(
            f"train.init_from={folder} is where export writes this run's drafter; neither training "
            "nor export could go on then: copy it elsewhere"
        )
    weights = folder / WEIGHTS
    if not weights.exists():
        raise UserError(f"train.init_from={folder} holds no {weights.name}")
    return provenance.hash_file(weights)


def build_model(config: Config, target: Target, vocab: DraftVocab) -> TTTModel:
    """Drafter and teacher of a run: fresh from the seed, or the drafter of `train.init_from`.

    Raises:
        UserError: an unknown loss or mask, or a drafter that does not fit the run.
    """
    if config.train.loss not in LOSSES:
        raise UserError(f"train.loss={config.train.loss} is not one of {sorted(LOSSES)}")
    if config.train.mask not in MASKS:
        raise UserError(f"train.mask={config.train.mask} is not one of {list(MASKS)}")
    torch.manual_seed(config.seed)
    aux_layers = target.aux_layers(config.target.aux_layers)
    lm_head = target.lm_head().float()
    if config.train.init_from is None:
        draft = asdict(config.draft)
        shape = DrafterConfig.for_target(
            target.config, len(aux_layers), draft_vocab_size=draft.pop("vocab_size"), **draft
        )
        drafter = Drafter.fresh(shape, vocab, target.embeddings().float(), lm_head)
    else:
        drafter = existing_drafter(config, target, aux_layers)
    weights = [config.train.step_decay**k for k in range(config.train.ttt_steps)]
    return TTTModel(drafter, Teacher(lm_head, vocab), weights, config.train.loss, config.train.fp8)


def existing_drafter(config: Config, target: Target, aux_layers: list[int]) -> Drafter:
    """The drafter of `train.init_from`, in SGLang's or speculators' format.

    Its shape and draft vocabulary are kept. The target may be another than it was made for, a
    fine-tuned one for example, as long as the sizes are the same.

    Raises:
        UserError: it does not fit the target, its aux layers, or what `draft` asks for.
    """
    folder = Path(config.train.init_from or "")
    load = speculators_format.load if speculators_format.recognised(folder) else formats.load_sglang
    drafter, found = load(folder, target)
    if found != aux_layers:
        raise UserError(
            f"train.init_from={folder} reads layers {found}, the run {aux_layers}: set "
            "target.aux_layers and extract again"
        )
    default = asdict(DraftConfig())
    for key, wanted in asdict(config.draft).items():
        has = getattr(drafter.config, "draft_vocab_size" if key == "vocab_size" else key)
        if wanted not in (default[key], has):
            raise UserError(
                f"draft.{key}={wanted}, but train.init_from={folder} has {has}, which is kept: "
                f"set draft.{key}={has}"
            )
    return drafter.train()
