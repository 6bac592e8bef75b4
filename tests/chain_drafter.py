"""Drafting one token at a time with a key/value cache: what a server does with the drafter.

The reference for the unrolled form, which training and the offline evaluation use.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3.drafter import Drafter


class ChainDrafter:
    """Drafts chains (top-1, no tree) for one sequence.

    `extend` feeds rows whose target states are known; they stay in the cache. `draft` then
    continues from the last of them with the drafter's own states, and forgets those afterwards.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        config = drafter.config
        empty = drafter.fc.weight.new_zeros(0, config.num_key_value_heads, config.head_dim)
        # keys and values of each layer [rows so far, kv_heads, head_dim]
        self.cache = [(empty, empty)] * config.num_layers
        self.target_ids = drafter.vocab.target_ids
        self.last_state: Tensor | None = None

    @torch.no_grad()
    def extend(self, aux: Tensor, next_ids: Tensor) -> None:
        """Add rows: aux states [R, A * H], each with the token that follows it [R]."""
        positions = torch.arange(next_ids.numel(), device=aux.device) + self.num_rows
        fused = self.drafter.fuse(aux)
        output = self._layers(fused, next_ids, positions)
        self.last_state = output[-1:]

    @torch.no_grad()
    def draft(self, num_steps: int) -> list[int]:
        """Target ids of the next `num_steps` drafts after the last extended row."""
        if self.last_state is None:
            raise ValueError("extend() before draft()")
        kept = self.num_rows
        state, drafts = self.last_state, []
        for step in range(num_steps):
            normed, fed = self.drafter.outputs(state)
            token = self.target_ids[self.drafter.lm_head(normed).argmax()]
            drafts.append(int(token))
            if step + 1 < num_steps:
                position = torch.tensor([kept + step], device=state.device)
                state = self._layers(fed, token.view(1), position)
        self.cache = [(keys[:kept], values[:kept]) for keys, values in self.cache]
        return drafts

    def logits(self) -> Tensor:
        """Draft-vocabulary logits of the last extended row [V]."""
        if self.last_state is None:
            raise ValueError("extend() before logits()")
        return self.drafter.lm_head(self.drafter.outputs(self.last_state)[0])[0]

    @property
    def num_rows(self) -> int:
        """Rows in the cache."""
        return self.cache[0][0].shape[0]

    def _layers(self, hidden: Tensor, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Run the layers on rows that follow the cached ones, and cache their keys and values."""
        tokens = self.drafter.token_states(token_ids)
        for number, layer in enumerate(self.drafter.decoder_layers):
            inputs = layer.inputs(tokens, hidden)
            new = layer.self_attn.keys_values(inputs, positions)
            keys, values = (
                torch.cat([old, x]) for old, x in zip(self.cache[number], new, strict=True)
            )
            self.cache[number] = keys, values
            q = layer.self_attn.queries(inputs, positions)
            count, total = q.shape[0], keys.shape[0]
            mask = torch.ones(count, total, dtype=torch.bool, device=q.device).tril(total - count)
            mixed = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1),
                attn_mask=mask, enable_gqa=True,
            )  # fmt: skip
            hidden = layer.finish(mixed.transpose(0, 1), hidden)
        return hidden
