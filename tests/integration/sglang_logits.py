"""What SGLang's own EAGLE-3 draft model computes from drafter folders, without a server.

`python -m tests.integration.sglang_logits <inputs.safetensors> <folder> ...` writes `logits` [T, V]
(of rows that see each other causally) to <folder>/logits.safetensors, and the names of parameters
that SGLang found no tensor for to <folder>/unset.json. A process of its own, since SGLang keeps its
state in globals.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sglang.srt import runtime_context
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
from transformers import LlamaConfig


def attend(
    self: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    """Causal attention among the rows given, in place of SGLang's over its cache."""
    heads = (self.tp_q_head_num, self.tp_k_head_num, self.tp_v_head_num)
    q, k, v = (
        x.view(-1, n, self.head_dim).transpose(0, 1) for x, n in zip((q, k, v), heads, strict=True)
    )
    attention = torch.nn.functional.scaled_dot_product_attention
    mixed = attention(q, k, v, is_causal=True, enable_gqa=True, scale=self.scaling)
    return mixed.transpose(0, 1).flatten(1)


@torch.no_grad()
def run(folder: Path, inputs: dict[str, torch.Tensor]) -> None:
    model = LlamaForCausalLMEagle3(LlamaConfig.from_pretrained(folder))
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    model.load_weights(iter(load_file(folder / "model.safetensors").items()))
    model.model.embed_tokens.weight.copy_(inputs["embeddings"])
    unset = [name for name, p in model.named_parameters() if p.isnan().any()]
    (folder / "unset.json").write_text(json.dumps(unset))
    batch = SimpleNamespace(
        mm_input_embeds=None,
        forward_mode=SimpleNamespace(is_extend=lambda: False),
        spec_info=SimpleNamespace(hidden_states=inputs["aux"]),
    )
    tokens = inputs["tokens"]
    states, _ = model.model(tokens, torch.arange(len(tokens)), batch)
    logits = states @ model.lm_head.weight.T
    save_file({"logits": logits.contiguous()}, folder / "logits.safetensors")


if __name__ == "__main__":
    runtime_context.get_context().override_server_args(device="cpu").install()
    rendezvous = f"file://{sys.argv[1]}.rendezvous"
    init_distributed_environment(1, 0, rendezvous, 0, "gloo")
    initialize_model_parallel(backend="gloo")
    RadixAttention.forward = attend
    with runtime_context.get_parallel().override(tp_rank=0, attn_tp_rank=0):
        for name in sys.argv[2:]:
            run(Path(name), load_file(sys.argv[1]))
