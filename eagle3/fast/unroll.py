"""The drafter over all TTT steps of a batch, and its gradients, written by hand.

Everything kept for the backward pass lies in one tensor for all steps (`layout`), so that the
gradient of each weight is one matrix product over all steps. Letters in shapes: N batch rows, R
rows of a step, T rows of all steps together, H hidden size, I intermediate size, Q width of the
queries, E width of the keys and of the values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.batch import Batch
from eagle3.drafter import Drafter
from eagle3.fast.attention import UnrollAttention
from eagle3.fast.fp8 import Product
from eagle3.fast.fuse import Fuse
from eagle3.fast.gather import add_rows
from eagle3.fast.layout import Layout
from eagle3.fast.norm import add_norm, norm_backward
from eagle3.fast.swiglu import swiglu, swiglu_backward_


class Unroll:
    """One forward and, after it, at most one backward pass."""

    def __init__(
        self, drafter: Drafter, batch: Batch, layout: Layout, num_steps: int, fp8: bool
    ) -> None:
        layer = drafter.midlayer
        attention, mlp = layer.self_attn, layer.mlp
        self.config, self.batch, self.layout = drafter.config, batch, layout
        self.eps = drafter.config.rms_norm_eps
        self.parts = layout.parts(num_steps)
        self.embeddings = drafter.embed_tokens.weight
        self.fuse = Fuse(drafter, fp8)
        self.fp8 = fp8
        projections = [x.weight for x in (attention.q_proj, attention.k_proj, attention.v_proj)]
        self.widths = [len(x) for x in projections]
        # [Q + 2E, H] each: what multiplies the token state and the hidden state
        self.token_qkv, hidden_qkv = torch.cat(projections).chunk(2, dim=1)
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        self.qkv, self.gate_up = Product(hidden_qkv, fp8), Product(gate_up, fp8)
        self.o = Product(attention.o_proj.weight, fp8)
        self.down = Product(mlp.down_proj.weight, fp8)
        assert layer.input_layernorm is not None
        self.token_norm = layer.input_layernorm.weight
        self.hidden_norm = layer.hidden_norm.weight
        self.post_norm = layer.post_attention_layernorm.weight
        self.final_norm = drafter.norm.weight

    def forward(self) -> Tensor:
        """Normed states for the lm_head, of all steps [T, H]."""
        total, size, width = self.parts[-1].stop, self.config.hidden_size, self.widths[0]
        rows = self.layout.rows

        # inputs of all N rows; the token norm's weight goes into the projection
        embedded = F.embedding(self.batch.input_ids, self.embeddings)
        self.tokens = F.rms_norm(embedded, (size,), eps=self.eps)
        token_half = Product(self.token_qkv * self.token_norm, self.fp8)(self.tokens)
        self.fused = self.fuse.forward(self.batch.aux)
        self.fused_normed = torch.empty_like(self.fused)
        self.fused_rstd = add_norm(self.fused, None, self.hidden_norm, self.eps, self.fused_normed)
        key_value = self.qkv(self.fused_normed, outputs=slice(width, None))
        self.attention = UnrollAttention(
            self.config, self.layout, self.parts, token_half, key_value
        )
        del embedded, token_half, key_value

        empty = self.fused.new_empty
        self.inputs = empty(total, size)  # normed hidden states that the attention reads
        self.mixed = empty(total, width)
        self.middle, self.mlp_inputs = empty(total, size), empty(total, size)
        self.gates_ups = empty(total, len(self.gate_up.weight))
        self.activations = empty(total, len(self.gate_up.weight) // 2)
        self.outputs, states = empty(total, size), empty(total, size)
        self.middle_rstd: list[Tensor] = []
        self.output_rstd: list[Tensor] = []
        self.fed: list[Tensor] = []  # with norm_output: what the next step got, and its rstd
        self.fed_rstd: list[Tensor] = []
        hidden = self.fused[rows]
        self.inputs[self.parts[0]] = self.fused_normed[rows]
        for k, part in enumerate(self.parts):
            following = self.inputs[self.parts[k + 1]] if k + 1 < len(self.parts) else None
            together = following is not None and not self.config.norm_output
            projected = self.qkv(self.inputs[part], outputs=slice(width if k == 0 else None))
            self.attention.forward(k, projected, self.mixed[part])
            rstd = add_norm(
                self.o(self.mixed[part]), hidden, self.post_norm, self.eps,
                self.mlp_inputs[part], self.middle[part],
            )  # fmt: skip
            self.middle_rstd.append(rstd)
            self.gate_up(self.mlp_inputs[part], out=self.gates_ups[part])
            swiglu(self.gates_ups[part], self.activations[part])
            rstd = add_norm(
                self.down(self.activations[part]), self.middle[part], self.final_norm,
                self.eps, states[part], self.outputs[part],
                self.hidden_norm if together else None, following if together else None,
            )  # fmt: skip
            self.output_rstd.append(rstd)
            hidden = self.outputs[part]
            if self.config.norm_output and following is not None:
                # a copy: gradients will replace the states
                hidden = states[part][: len(following)].clone()
                self.fed.append(hidden)
                rstd = add_norm(hidden, None, self.hidden_norm, self.eps, following)
                self.fed_rstd.append(rstd)
        return states

    def backward(self, grad_states: Tensor) -> dict[str, Tensor]:
        """Gradient of `forward`'s result [T, H] -> that of every weight, by parameter name."""
        width = self.widths[0]
        empty = torch.empty_like
        grad_outputs, grad_middle = empty(self.outputs), empty(self.middle)
        grad_qkv = self.mixed.new_empty(len(grad_states), sum(self.widths))
        norms = torch.zeros(4, self.config.hidden_size, device=grad_states.device)
        grad_final_norm, grad_post_norm, grad_hidden_norm, grad_token_norm = norms
        self.attention.start_backward()
        grad_inputs = grad_residual = None
        for k in reversed(range(len(self.parts))):
            part = self.parts[k]
            if self.config.norm_output and grad_inputs is not None:
                # all that the next step passes back reaches the normed state
                grad_fed = empty(grad_inputs)
                fed_norm, _ = norm_backward(
                    self.fed[k], self.fed_rstd[k], self.hidden_norm, grad_inputs, grad_fed,
                    grad_residual,
                )  # fmt: skip
                grad_hidden_norm += fed_norm
                grad_states[part][: len(grad_fed)] += grad_fed
                grad_inputs = grad_residual = None
            final, second = norm_backward(
                self.outputs[part], self.output_rstd[k], self.final_norm, grad_states[part],
                grad_outputs[part], grad_residual,
                None if grad_inputs is None else self.hidden_norm, grad_inputs,
            )  # fmt: skip
            grad_final_norm += final
            if second is not None:
                grad_hidden_norm += second
            swiglu_backward_(self.gates_ups[part], self.down.grad_input(grad_outputs[part]))
            post, _ = norm_backward(
                self.middle[part], self.middle_rstd[k], self.post_norm,
                self.gate_up.grad_input(self.gates_ups[part]), grad_middle[part],
                grad_outputs[part],
            )  # fmt: skip
            grad_post_norm += post
            columns = width if k == 0 else sum(self.widths)
            grad_projected = grad_qkv[part, :columns]
            grad_mixed = self.o.grad_input(grad_middle[part])
            self.attention.backward(k, self.mixed[part], grad_mixed, grad_projected)
            grad_inputs = self.qkv.grad_input(grad_projected, slice(columns))
            grad_residual = grad_middle[part]
        assert grad_inputs is not None and grad_residual is not None

        # step 0: keys and values of all N rows, queries and residual of the first step's rows
        grad_key_value, grad_token_half = self.attention.finish_backward()
        grad_normed = self.qkv.grad_input(grad_key_value, slice(width, None))
        add_rows(grad_inputs, self.layout.rows, grad_normed)
        grad_fused = empty(self.fused)
        first, _ = norm_backward(
            self.fused, self.fused_rstd, self.hidden_norm, grad_normed, grad_fused
        )
        grad_hidden_norm += first
        add_rows(grad_residual, self.layout.rows, grad_fused)

        own = slice(self.parts[0].stop, None)  # rows with keys and values of their own
        grad_hidden_qkv = empty(self.qkv.weight, memory_format=torch.contiguous_format)
        torch.mm(grad_qkv[:, :width].T, self.inputs, out=grad_hidden_qkv[:width])
        torch.mm(grad_key_value.T, self.fused_normed, out=grad_hidden_qkv[width:])
        grad_hidden_qkv[width:].addmm_(grad_qkv[own, width:].T, self.inputs[own])
        # with the norm's weight n in the projection W * n: d(W * n) gives both dW and dn
        grad_folded = grad_token_half.to(self.tokens.dtype).T @ self.tokens
        grad_token_norm += (grad_folded.float() * self.token_qkv).sum(dim=0)
        grad_token_qkv = grad_folded * self.token_norm
        grad_projections = torch.cat([grad_token_qkv, grad_hidden_qkv], dim=1)
        q_proj, k_proj, v_proj = grad_projections.split(self.widths)
        gate, up = (self.gates_ups.T @ self.mlp_inputs).chunk(2)
        return {
            **self.fuse.backward(grad_fused),
            "midlayer.hidden_norm.weight": grad_hidden_norm,
            "midlayer.input_layernorm.weight": grad_token_norm,
            "midlayer.post_attention_layernorm.weight": grad_post_norm,
            "midlayer.self_attn.q_proj.weight": q_proj,
            "midlayer.self_attn.k_proj.weight": k_proj,
            "midlayer.self_attn.v_proj.weight": v_proj,
            "midlayer.self_attn.o_proj.weight": grad_middle.T @ self.mixed,
            "midlayer.mlp.gate_proj.weight": gate,
            "midlayer.mlp.up_proj.weight": up,
            "midlayer.mlp.down_proj.weight": grad_outputs.T @ self.activations,
            "norm.weight": grad_final_norm,
        }
