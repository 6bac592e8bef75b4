"""The EAGLE-3 drafter: a few Llama decoder layers, mostly one, on the target's aux hidden states.

Parameter names are those of the checkpoint that SGLang loads (with `midlayer` for the first layer),
so that export is a matter of writing them down. Letters in shapes: R rows, H hidden size, A aux
states, W width of a layer's attention input.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3.errors import UserError
from eagle3.vocab import DraftVocab

NORMS = ("norm_before_fc", "fc_norm", "norm_output")
"""Switches of `DrafterConfig`, named as SGLang and speculators name them."""


@dataclass(kw_only=True, slots=True)
class DrafterConfig:
    """Shape of a drafter; the fields mean what they mean in a Hugging Face Llama config.

    `norm_before_fc` norms the concatenated aux states, `fc_norm` each of them; `norm_output` feeds
    the next TTT step the normed state. All three as SGLang loads them.
    """

    hidden_size: int
    num_aux: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int
    num_layers: int = 1
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if item.type == "int" and not (whole and value > 0):
                raise UserError(f"the drafter's {item.name} is {value!r}, not a number of them")
            if item.type == "float" and not (isinstance(value, int | float) and value > 0):
                raise UserError(f"the drafter's {item.name} is {value!r}, not a number above 0")
        if self.head_dim % 2:
            raise UserError(f"draft.head_dim={self.head_dim} must be even: positions rotate pairs")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"draft.num_key_value_heads={self.num_key_value_heads} must divide "
                f"draft.num_attention_heads={self.num_attention_heads}"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise UserError(
                f"draft.vocab_size={self.draft_vocab_size} exceeds the target's {self.vocab_size}"
            )
        if self.norm_before_fc and self.fc_norm:
            raise UserError("draft.norm_before_fc and draft.fc_norm exclude each other")

    @classmethod
    def for_target(cls, target: dict[str, Any], num_aux: int, **overrides: Any) -> DrafterConfig:
        """A drafter whose layers are shaped like the target's (its config.json), with overrides.

        An MLA target has no usable head shape: heads of 128 are taken then, and of any target whose
        heads do not divide its hidden size as many as do. Overrides that are None are ignored.

        Raises:
            UserError: config.json lacks a size, or the overrides cannot be.
        """
        mla = "kv_lora_rank" in target
        if not (mla or target.get("num_attention_heads")):
            raise UserError("the target's config.json has no num_attention_heads")
        heads = max(1, target["hidden_size"] // 128) if mla else target["num_attention_heads"]
        kv_heads = max(1, heads // 7) if mla else target.get("num_key_value_heads") or heads
        head_dim = 128 if mla else target.get("head_dim") or target["hidden_size"] // heads
        if target["hidden_size"] % heads:  # GLM-4.5: 96 heads of 128, hidden size 5120
            heads = max(1, target["hidden_size"] // head_dim)
        while target["hidden_size"] % heads:
            heads -= 1
        kv_heads = min(kv_heads, heads)
        while heads % kv_heads:
            kv_heads -= 1
        rope = target.get("rope_parameters") or {}
        shape: dict[str, Any] = {
            "hidden_size": target["hidden_size"],
            "num_aux": num_aux,
            "intermediate_size": target.get("intermediate_size"),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": target["vocab_size"],
            "max_position_embeddings": target.get("max_position_embeddings"),
            "rms_norm_eps": target.get("rms_norm_eps", 1e-5),
            "rope_theta": rope.get("rope_theta") or target.get("rope_theta", 10000.0),
        }
        found = cls(**{**shape, **{k: v for k, v in overrides.items() if v is not None}})
        if found.hidden_size % found.num_attention_heads:
            raise UserError(
                f"draft.num_attention_heads={found.num_attention_heads} must divide the target's "
                f"hidden size {found.hidden_size}: a server does not read config.json otherwise"
            )
        return found


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32 at least."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight


class Attention(nn.Module):
    """Projections and rotary positions of a layer's attention, which reads rows of width W."""

    def __init__(self, config: DrafterConfig, input_width: int) -> None:
        super().__init__()
        self.config = config
        width, kv_width = (
            n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.q_proj = nn.Linear(input_width, width, bias=False)
        self.k_proj = nn.Linear(input_width, kv_width, bias=False)
        self.v_proj = nn.Linear(input_width, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """[R, W] at positions [R] -> rotated queries [R, heads, head_dim]."""
        q = self.q_proj(x).unflatten(-1, (self.config.num_attention_heads, -1))
        return rotate(q, positions, self.config.rope_theta)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[R, W] at positions [R] -> rotated keys and values [R, kv_heads, head_dim] each."""
        k = self.k_proj(x).unflatten(-1, (self.config.num_key_value_heads, -1))
        v = self.v_proj(x).unflatten(-1, (self.config.num_key_value_heads, -1))
        return rotate(k, positions, self.config.rope_theta), v


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A Llama decoder layer; the first one's attention also reads the token.

    Its input is [normed token embedding, normed hidden state], W = 2H. The layers above read the
    normed hidden state alone, W = H, and have no `input_layernorm`.
    """

    def __init__(self, config: DrafterConfig, first: bool) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.hidden_norm = RMSNorm(size, eps)
        self.input_layernorm = RMSNorm(size, eps) if first else None
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.self_attn = Attention(config, 2 * size if first else size)
        self.mlp = MLP(config)

    def inputs(self, token_states: Tensor, hidden: Tensor) -> Tensor:
        """Normed embeddings [R, H] and raw hidden states [R, H] -> attention input [R, W]."""
        normed = self.hidden_norm(hidden)
        return normed if self.input_layernorm is None else torch.cat([token_states, normed], dim=-1)

    def finish(self, mixed: Tensor, hidden: Tensor) -> Tensor:
        """Attention output [R, heads, head_dim], layer input [R, H] -> layer output [R, H]."""
        hidden = hidden + self.self_attn.o_proj(mixed.flatten(1))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Drafter(nn.Module):
    """Parameters and the pieces of a step; `ttt` unrolls it."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.embed_tokens.weight.requires_grad_(False)
        self.fc = nn.Linear(config.num_aux * size, size, bias=False)
        self.input_norm = RMSNorm(config.num_aux * size, eps) if config.norm_before_fc else None
        norms = [RMSNorm(size, eps) for _ in range(config.num_aux)]
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.midlayer = DecoderLayer(config, first=True)
        # the layers above, by their number in the checkpoint
        above = {str(i): DecoderLayer(config, first=False) for i in range(1, config.num_layers)}
        self.layers = nn.ModuleDict(above)
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.d2t: Tensor
        self.t2d: Tensor

    @classmethod
    def fresh(
        cls, config: DrafterConfig, vocab: DraftVocab, embeddings: Tensor, lm_head: Tensor
    ) -> Drafter:
        """A drafter to train: the target's embeddings, lm_head started from the target's rows.

        Args:
            embeddings, lm_head: the target's [vocab_size, H].
        """
        drafter = cls(config)
        with torch.no_grad():
            for module in drafter.modules():
                if isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=module.in_features**-0.5)
            for layer in drafter.decoder_layers:
                layer.self_attn.o_proj.weight.mul_(0.5)
                layer.mlp.down_proj.weight.mul_(0.5)
            drafter.embed_tokens.weight.copy_(embeddings)
            drafter.lm_head.weight.copy_(lm_head[vocab.target_ids])
            drafter.d2t.copy_(vocab.d2t)
            drafter.t2d.copy_(vocab.t2d)
        return drafter

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        """The first layer, then those above."""
        return [self.midlayer, *cast(Iterable[DecoderLayer], self.layers.values())]

    @property
    def vocab(self) -> DraftVocab:
        return DraftVocab.from_d2t(self.d2t, self.config.vocab_size)

    def fuse(self, aux: Tensor) -> Tensor:
        """Concatenated aux states [R, A * H] -> the drafter's first hidden states [R, H]."""
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            parts = aux.chunk(self.config.num_aux, dim=-1)
            aux = torch.cat([n(p) for n, p in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(aux)

    def token_states(self, input_ids: Tensor) -> Tensor:
        """Token ids [R] -> normed embeddings [R, H]."""
        assert self.midlayer.input_layernorm is not None
        return self.midlayer.input_layernorm(self.embed_tokens(input_ids))

    def outputs(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Last layer's output [R, H] -> states for the lm_head and for the next step [R, H]."""
        normed = self.norm(hidden)
        return normed, normed if self.config.norm_output else hidden


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding, half-split as in Llama: [R, heads, D] at positions [R]."""
    half = x.shape[-1] // 2
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    exponent = torch.arange(half, device=x.device, dtype=wide) / half
    angles = positions.to(wide)[:, None, None] * theta**-exponent
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half].to(wide), x[..., half:].to(wide)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
