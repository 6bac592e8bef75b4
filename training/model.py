"""What a run trains: its store, its draft vocabulary, and the drafter it starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from eagle3 import export as formats
from eagle3 import provenance
from eagle3.config import Config
from eagle3.drafter import Drafter, DrafterConfig
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
    """The draft vocabulary, and the share of the training labels it covers.

    Built from the training labels; a drafter to start from keeps its own.
    """
    counts = reader.label_counts(train_samples)
    if config.train.init_from is None:
        vocab = DraftVocab.build(counts, config.draft.vocab_size)
    else:
        vocab = formats.load_vocab(Path(config.train.init_from), len(counts))
    return vocab, vocab.coverage(counts)


def init_identity(config: Config) -> str | None:
    """Hash of the weights the run starts from, None for a fresh drafter."""
    if config.train.init_from is None:
        return None
    return provenance.hash_file(Path(config.train.init_from) / "model.safetensors")


def build_model(config: Config, target: Target, vocab: DraftVocab) -> TTTModel:
    """Drafter and teacher of a run: fresh from the seed, or the drafter of `train.init_from`.

    Raises:
        UserError: an unknown loss, or a drafter that does not fit the run.
    """
    if config.train.loss not in LOSSES:
        raise UserError(f"train.loss={config.train.loss} is not one of {sorted(LOSSES)}")
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
        drafter, found = formats.load_sglang(Path(config.train.init_from), target)
        drafter.train()
        if found != aux_layers:
            raise UserError(
                f"train.init_from={config.train.init_from} reads layers {found}, the run "
                f"{aux_layers}: set target.aux_layers and extract again"
            )
    weights = [config.train.step_decay**k for k in range(config.train.ttt_steps)]
    return TTTModel(drafter, Teacher(lm_head, vocab), weights, config.train.loss)
