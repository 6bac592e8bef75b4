"""Other trainers' steps for `bench/train.py`, set up as they ship."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch
from train import System

from eagle3.batch import Batch
from eagle3.drafter import DrafterConfig


def speculators(
    config: DrafterConfig, batches: list[Batch], device: str, step_decay: float
) -> System:
    """speculators' Eagle3DraftModel: packed, compiled as a whole, KL loss, frozen lm_head.

    It pads every batch to the same number of rows and supervises a row wherever its loss mask is 1.
    """
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    llama = LlamaConfig(
        hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads, head_dim=config.head_dim,
        num_key_value_heads=config.num_key_value_heads, vocab_size=config.vocab_size,
        num_hidden_layers=1, rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings, rope_theta=config.rope_theta,
        attention_bias=False, mlp_bias=False, hidden_act="silu", pad_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    # flex attention has no backward on a CPU
    llama._attn_implementation = "simple_flex_attention" if device == "cuda" else "eager"
    speculator = Eagle3SpeculatorConfig(
        transformer_layer_config=llama,
        draft_vocab_size=config.draft_vocab_size,
        norm_before_residual=False,
        eagle_aux_hidden_state_layer_ids=list(range(1, config.num_aux + 1)),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=7)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    inside = torch.zeros(config.vocab_size, dtype=torch.bool)
    inside[torch.randperm(config.vocab_size)[: config.draft_vocab_size]] = True
    d2t = inside.nonzero().flatten() - torch.arange(config.draft_vocab_size)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = Eagle3DraftModel(config=speculator)
    model.load_vocab_mappings(inside.to(device), d2t.to(device))
    model = model.to(device, dtype).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.02)
            else:
                parameter.fill_(1.0)
    rows = max(batch.num_rows for batch in batches)
    inputs = [_inputs(batch, rows) for batch in batches]
    loss = resolve_loss_config("kl_div", "fused" if device == "cuda" else "eager")

    def step(index: int, num_steps: int) -> None:
        _, total, _ = model(
            **inputs[index], ttt_steps=num_steps, ttt_step_loss_decay=step_decay, loss_config=loss
        )
        total.backward()
        model.zero_grad(set_to_none=True)

    name = "speculators" if device == "cuda" else "speculators (eager attention)"
    return System(name=name, version=version("speculators"), step=step)


def _inputs(batch: Batch, rows: int) -> dict[str, Any]:
    """A batch in its form, padded to `rows`."""
    missing = rows - batch.num_rows

    def padded(x: torch.Tensor, value: int = 0) -> torch.Tensor:
        return torch.cat([x, x.new_full((missing, *x.shape[1:]), value)])[None]

    final = batch.final[batch.final_index.clamp(min=0)]
    return {
        "hidden_states": padded(batch.aux),
        "input_ids": padded(batch.input_ids),
        "document_ids": padded(batch.doc_of_row(), -1),
        "loss_mask": padded(batch.loss_mask),
        "position_ids": padded(batch.positions() + 1),
        "verifier_last_hidden_states": padded(final),
    }
