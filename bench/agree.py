"""Do other trainers compute what we compute? `python bench/agree.py --out FILE`.

All get the same weights and documents, in float32 on a CPU. Their losses are compared, step by step
and for the gradient of every trained weight, with a reference that sums our cross-entropy over the
rows that each of them supervises (see peers.py), adds what its definition adds, and divides as it
divides. So a difference here is a difference in the model, the attention mask, the teacher or the
alignment; which rows count, and how they are averaged, is theirs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

import record
from eagle3.batch import Batch
from eagle3.drafter import Drafter, DrafterConfig
from eagle3.manifest import write_json
from eagle3.ttt import unroll
from eagle3.vocab import DraftVocab
from peers import SpecForge, Speculators, documents, use_specforge
from workload import document_masks, make_batch

DECAY = 0.8
SYSTEMS: dict[str, dict[str, Any]] = {
    "speculators": {},
    "specforge": {"batch_size": 1},
    "specforge-b4": {"batch_size": 4, "compact_teacher": True},
}


def make_drafter(config: DrafterConfig, seed: int) -> tuple[Drafter, Tensor]:
    """A random drafter and the target's lm_head; no tensor is left at a default."""
    torch.manual_seed(seed)
    lm_head = torch.randn(config.vocab_size, config.hidden_size) * config.hidden_size**-0.5
    vocab = DraftVocab.build(torch.rand(config.vocab_size), config.draft_vocab_size)
    embeddings = torch.randn(config.vocab_size, config.hidden_size)
    drafter = Drafter.fresh(config, vocab, embeddings, lm_head)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
        drafter.lm_head.weight.add_(torch.randn_like(drafter.lm_head.weight) * 0.02)
    return drafter, lm_head


def row_losses(
    drafter: Drafter, lm_head: Tensor, batch: Batch, num_steps: int, entropy: bool
) -> list[list[Tensor]]:
    """Cross-entropy of every row of every document at each step, [docs][steps] of [T - 2 - k].

    A row is left out only where its label would lie outside the document. With `entropy` it is the
    KL divergence.
    """
    found = []
    for doc in documents(batch):
        length = len(doc["ids"])
        whole = Batch(
            input_ids=doc["ids"], loss_mask=torch.ones(length, dtype=torch.bool),
            doc_starts=torch.tensor([0, length]), aux=doc["h"], final=doc["y"],
            final_index=torch.arange(length),
        )  # fmt: skip
        steps = []
        for k, step in enumerate(unroll(drafter, whole, num_steps)):
            teacher = doc["y"][step.rows + 1 + k] @ lm_head[drafter.vocab.target_ids].T
            p, log_p = teacher.softmax(dim=-1), teacher.log_softmax(dim=-1)
            loss = -(p * drafter.lm_head(step.states).log_softmax(dim=-1)).sum(dim=-1)
            steps.append(loss + (p * log_p).sum(dim=-1) if entropy else loss)
        found.append(steps)
    return found


def speculators_reference(
    drafter: Drafter, lm_head: Tensor, batch: Batch, num_steps: int
) -> list[Tensor]:
    """Its loss of each step, by its rule, from our rows."""
    docs = documents(batch)
    losses = row_losses(drafter, lm_head, batch, num_steps, entropy=True)
    found = []
    for k in range(num_steps):
        total, rows = torch.zeros(()), 0
        for doc, steps in zip(docs, losses, strict=True):
            mask = (doc["mask"] & doc["taught"])[1 + k : len(doc["ids"]) - 1]
            total = total + (steps[k] * mask).sum()
            rows += int(mask.sum())
        found.append(total / rows)
    return found


def specforge_reference(
    drafter: Drafter, lm_head: Tensor, batch: Batch, num_steps: int, batch_size: int
) -> list[Tensor]:
    """Its loss of each step summed over its padded groups, by its rule, from our rows."""
    docs = documents(batch)
    losses = row_losses(drafter, lm_head, batch, num_steps, entropy=False)
    inside = drafter.vocab.t2d
    found = []
    for k in range(num_steps):
        total = torch.zeros(())
        for start in range(0, len(docs), batch_size):
            group = range(start, min(start + batch_size, len(docs)))
            positions = len(group) * max(len(docs[i]["ids"]) for i in group)
            for i in group:
                doc = docs[i]
                choices = inside[(doc["y"] @ lm_head.T).argmax(dim=-1)]
                ahead = slice(1 + k, len(doc["ids"]) - 1)
                mask = doc["mask"][k : len(doc["ids"]) - 2] & (doc["taught"] & choices)[ahead]
                total = total + (losses[i][k] * mask).sum() / positions
        found.append(total)
    return found


def agree(peer: Any, reference: list[Tensor], drafter: Drafter, batch: Batch) -> dict[str, float]:
    """Largest relative difference of a step's loss and of a weight's gradient."""
    num_steps = len(reference)
    sums = torch.zeros(num_steps)
    for part in peer.inputs(batch):
        loss, metrics = peer.loss(part, num_steps, DECAY)
        loss.backward()
        if isinstance(peer, Speculators):
            steps = [metrics[f"loss_{k}_sum"] / DECAY**k for k in range(num_steps)]
        else:
            steps = metrics["losses"]
        sums += torch.stack([s.detach() for s in steps])
    torch.stack([DECAY**k * loss for k, loss in enumerate(reference)]).sum().backward()
    names = {n: p.grad for n, p in drafter.named_parameters() if p.grad is not None}
    model = peer.model if isinstance(peer, Speculators) else peer.model.draft_model
    worst = 0.0
    compared = 0
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        ours = names[name.replace("layers.0.", "midlayer.")]
        worst = max(worst, float((parameter.grad - ours).norm() / ours.norm()))
        compared += 1
    drafter.zero_grad(set_to_none=True)
    expected = torch.stack([loss.detach() for loss in reference])
    return {
        "loss_difference": float(((sums - expected) / expected).abs().max()),
        "gradient_difference": worst,
        "weights_compared": compared,
    }


def compare(num_steps: int, tokens: int, seed: int, systems: Sequence[str]) -> list[dict[str, Any]]:
    """The named peers on one random batch."""
    config = DrafterConfig(
        hidden_size=64, num_aux=3, intermediate_size=160, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=300, draft_vocab_size=200,
        max_position_embeddings=2048,
    )  # fmt: skip
    drafter, lm_head = make_drafter(config, seed)
    masks = document_masks(tokens, np.random.default_rng(seed))
    batch = make_batch(masks, config, "cpu", seed)
    entries = []
    # compiled kernels round differently; the definition is what is compared here
    with torch.compiler.set_stance("force_eager"):
        for name in systems:
            options: dict[str, Any] = SYSTEMS[name]
            size = options.get("batch_size")
            if size is None:
                peer: Any = Speculators(drafter, lm_head)
                reference = speculators_reference(drafter, lm_head, batch, num_steps)
            else:
                peer = SpecForge(drafter, lm_head, **options)
                reference = specforge_reference(drafter, lm_head, batch, num_steps, size)
            found = agree(peer, reference, drafter, batch)
            entries.append({"system": name, "version": peer.version, **found, "ttt": num_steps})
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--ttt", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=768)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--specforge-path", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    use_specforge(arguments.specforge_path)
    facts = {"dtype": "float32", **record.facts()}
    found = compare(arguments.ttt, arguments.tokens, arguments.seed, arguments.systems)
    entries = [{**entry, **facts} for entry in found]
    write_json(arguments.out, entries)
    for entry in entries:
        sys.stdout.write(f"{ {k: entry[k] for k in list(entry)[:6]} }\n")


if __name__ == "__main__":
    main()
