"""Fixtures shared by all tests: tiny shapes, random packed batches, the tiny target."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3.batch import Batch, depths, needed_final
from eagle3.drafter import Drafter, DrafterConfig
from eagle3.fast.layout import Layout
from eagle3.target import Target
from eagle3.vocab import DraftVocab

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
if not torch.cuda.is_available():
    # Kernels run in Triton's interpreter. Triton looks when its own and our functions are defined,
    # so they are imported here, before anything else does; servers that tests start look as well.
    os.environ["TRITON_INTERPRET"] = "1"
    import eagle3.fast.step  # noqa: F401

    del os.environ["TRITON_INTERPRET"]

ASSETS = Path(__file__).parent / "assets"
TINY = ASSETS / "tiny-gsm-llama"


@pytest.fixture(scope="session")
def target() -> Target:
    return Target.resolve(str(TINY))


def tiny_config(**changes: object) -> DrafterConfig:
    shape: dict = dict(
        hidden_size=32, num_aux=3, intermediate_size=48, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=97, draft_vocab_size=61,
        max_position_embeddings=512,
    )  # fmt: skip
    return DrafterConfig(**{**shape, **changes})


def tiny_drafter(
    dtype: torch.dtype = torch.float64, **changes: object
) -> tuple[Drafter, torch.Tensor]:
    """A random drafter and its target's lm_head; norms away from their start."""
    config = tiny_config(**changes)
    torch.manual_seed(0)
    lm_head = torch.randn(config.vocab_size, config.hidden_size, dtype=dtype) / 4
    counts = torch.randint(0, 50, (config.vocab_size,))
    vocab = DraftVocab.build(counts, config.draft_vocab_size)
    embeddings = torch.randn(config.vocab_size, config.hidden_size, dtype=dtype)
    drafter = Drafter.fresh(config, vocab, embeddings, lm_head).to(dtype)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name.endswith("norm.weight") or ".fc_norm." in f".{name}":
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return drafter, lm_head


def make_batch(
    masks: list[list[int]], config: DrafterConfig, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Batch:
    """Random documents with these loss masks."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [len(m) for m in masks]
    rows = sum(lengths)
    needed = torch.cat([needed_final(torch.tensor(m)) for m in masks])
    random = torch.randn(rows, (config.num_aux + 1) * config.hidden_size, generator=generator)
    return Batch(
        input_ids=torch.randint(0, config.vocab_size, (rows,), generator=generator),
        loss_mask=torch.tensor(sum(masks, [])).bool(),
        doc_starts=torch.tensor([0, *lengths]).cumsum(0),
        aux=random[:, : -config.hidden_size].to(dtype),
        final=random[needed, -config.hidden_size :].to(dtype),
        final_index=torch.where(needed, needed.cumsum(0) - 1, -1),
    )


def weighted(batch: Batch) -> Batch:
    """The batch with weights from 0.5 to 2, of a document each."""
    own = 0.5 + torch.arange(len(batch.doc_starts) - 1).roll(1) % 4 / 2
    return replace(batch, row_weights=own[batch.doc_of_row()])


def ragged_masks() -> list[list[int]]:
    """Documents of awkward lengths: one token, several turns, masks all 0 and all 1."""
    return [
        [1],
        [0, 1],
        [0, 0, 1, 1, 1, 1],
        [0] * 5,
        [1] * 7,
        [0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 0, 1, 0],
        [0] * 60 + [1] * 67,
        [0] * 40 + [1] * 30 + [0] * 8 + [1] * 50,
        [0] * 100 + [1] * 29,
    ]


def small_masks() -> list[list[int]]:
    """As `ragged_masks`, few enough rows for Triton's interpreter."""
    return [
        [1], [0, 1], [0, 0, 1, 1, 1, 1], [0] * 5, [1] * 7, [0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 0],
    ]  # fmt: skip


def laid_out(batch: Batch) -> Layout:
    """The layout that a batch gets on its way to a GPU."""
    return Layout.of(depths(batch), batch.doc_starts)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton also looks for its interpreter when a kernel is called."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
