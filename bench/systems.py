"""The systems that `bench/train.py` times, each set up from the same weights and batches."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import eagle3
from eagle3 import fast
from eagle3.batch import Batch
from eagle3.drafter import Drafter, DrafterConfig
from eagle3.loss import Teacher
from eagle3.ttt import TTTModel, supervised_rows
from eagle3.vocab import DraftVocab
from gpu import allocated
from peers import SpecForge, Speculators, whole_blocks

STEP_DECAY = 0.8
OURS = ("eagle3", "eagle3-fp8", "eagle3-frozen", "eagle3-frozen-fp8", "plain")
NAMES = (*OURS, "speculators", "specforge", "specforge-b4")


@dataclass(kw_only=True, slots=True)
class System:
    """Something that can run a step.

    step: takes the micro-batch's number and the number of TTT steps.
    resident: bytes that its weights and its form of the batches hold on the GPU.
    own_batches: whether it has its own form of the batches.
    """

    name: str
    version: str
    settings: str
    step: Callable[[int, int], None]
    own_batches: bool = True
    resident: int = 0
    first_step_s: float = 0.0
    peak: int = 0
    times: list[list[float]] = field(default_factory=list)


def weights(config: DrafterConfig, device: str) -> tuple[Drafter, Tensor]:
    """A random drafter and the target's lm_head."""
    with torch.device(device):
        torch.manual_seed(0)
        lm_head = torch.randn(config.vocab_size, config.hidden_size) * config.hidden_size**-0.5
        vocab = DraftVocab.build(torch.rand(config.vocab_size), config.draft_vocab_size)
        embeddings = torch.randn(config.vocab_size, config.hidden_size)
        drafter = Drafter.fresh(config, vocab, embeddings, lm_head)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return drafter.to(dtype), lm_head.to(dtype)


def ours(variant: str, drafter: Drafter, lm_head: Tensor, batches: list[Batch]) -> System:
    """Our training step.

    Args:
        variant: a name of OURS; `plain` is the definition that runs everywhere, `frozen` leaves
            lm_head as it is, as speculators does.
    """
    plain, fp8, frozen = variant == "plain", "fp8" in variant, "frozen" in variant
    drafter.lm_head.weight.requires_grad_(not frozen)
    model = TTTModel(drafter, Teacher(lm_head, drafter.vocab), [], fp8=fp8)

    def step(index: int, num_steps: int) -> None:
        batch = batches[index]
        model.step_weights = [STEP_DECAY**k for k in range(num_steps)]
        scale = 1.0 / supervised_rows(batch, num_steps).clamp(min=1)
        layout = batch.layout
        batch.layout = None if plain else layout
        model(batch, scale, score=False).loss.backward()
        batch.layout = layout
        model.zero_grad(set_to_none=True)

    on_gpu = fast.supported(model.drafter, batches[0])
    name = "eagle3" if on_gpu and not plain else "eagle3 (plain path)"
    head = "frozen" if frozen else "trained"
    settings = f"packed, supervised rows only, lm_head {head}"
    if frozen:
        name = f"{name}, lm_head frozen"
    if fp8:
        name = f"{name}, fp8"
        settings = f"{settings}, fc and the layer in fp8, their weight gradients not"
    return System(
        name=name, version=eagle3.__version__, settings=settings, step=step, own_batches=False
    )


def theirs(peer: Any, batches: list[Batch], name: str, settings: str) -> System:
    """A peer's step: as many forward and backward passes as its form of the batch needs."""
    rows = whole_blocks(max(batch.num_rows for batch in batches))
    inputs = [peer.inputs(batch, rows) for batch in batches]

    def step(index: int, num_steps: int) -> None:
        for part in inputs[index]:
            loss, _ = peer.loss(part, num_steps, STEP_DECAY)
            loss.backward()
        peer.model.zero_grad(set_to_none=True)

    settings = f"{settings}, {peer.attention} attention"
    return System(name=name, version=peer.version, settings=settings, step=step)


def build(name: str, config: DrafterConfig, batches: list[Batch], device: str) -> System:
    """A system by the name it has on the command line."""
    before = allocated()
    drafter, lm_head = weights(config, device)
    if name in OURS:
        system = ours(name, drafter, lm_head, batches)
    elif name == "speculators":
        peer: Any = Speculators(drafter, lm_head)
        system = theirs(peer, batches, name, "packed, lm_head frozen, whole step compiled on a GPU")
    elif name == "specforge":
        peer = SpecForge(drafter, lm_head)
        system = theirs(peer, batches, name, "batch 1 (its default), lm_head trained")
    else:
        peer = SpecForge(drafter, lm_head, batch_size=4, compact_teacher=True)
        system = theirs(peer, batches, name, "batch 4 padded, compact teacher, lm_head trained")
    del drafter, lm_head
    gc.collect()
    system.resident = allocated() - before
    return system
