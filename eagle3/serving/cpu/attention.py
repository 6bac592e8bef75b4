"""Attention for SGLang's CPU engine, with drafting, verification and MLA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sgl_kernel import build_draft_decode_metadata_cpu
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor
from torch.nn.functional import pad

from eagle3.serving.cpu import ATTENTION_BACKEND
from eagle3.serving.cpu.plan import PaddedPlan, SequencePlan, make_plan

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class CpuAttnBackend(TorchNativeAttnBackend):
    """SGLang's portable backend, planned once a forward, for every mode of EAGLE and for MLA."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.dtype: torch.dtype = runner.dtype
        self.plan: PaddedPlan | SequencePlan | None = None
        self.is_speculative = False
        if runner.use_mla_backend:
            _always_absorb_mla()

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Length of the requests that attention data parallelism pads a batch with."""
        return 1

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        mode, table = forward_batch.forward_mode, self.req_to_token_pool.req_to_token
        kv_lens, trees = forward_batch.seq_lens.tolist(), None
        self.is_speculative = mode.is_target_verify() or mode.is_draft_extend_v2()
        if mode.is_target_verify():
            spec = forward_batch.spec_info
            num = spec.draft_token_num
            query_lens, kv_lens = [num] * len(kv_lens), [n + num for n in kv_lens]
            if spec.tree_topk != 1 and spec.custom_mask is not None:
                trees = spec.custom_mask[: len(kv_lens) * num * num].view(-1, num, num)
        elif mode.is_decode_or_idle():
            query_lens = [1] * len(kv_lens)
        else:
            query_lens = forward_batch.extend_seq_lens.tolist()
            prefixes = forward_batch.extend_prefix_lens.tolist()
            kv_lens = [p + n for p, n in zip(prefixes, query_lens, strict=True)]
        self.plan = make_plan(
            table, forward_batch.req_pool_indices, query_lens, kv_lens, self.dtype, trees
        )

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **extra: Any,
    ) -> Tensor:
        _refuse(extra)
        if self._is_stock(layer):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **extra: Any,
    ) -> Tensor:
        _refuse(extra)
        if self._is_stock(layer):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def _is_stock(self, layer: RadixAttention) -> bool:
        """Whether the layer is of a kind that the stock backend serves, without speculation."""
        window = layer.sliding_window_size
        stock = (
            layer.is_cross_attention
            or layer.attn_type == AttentionType.ENCODER_ONLY
            or (window is not None and window > -1)
        )
        if stock and self.is_speculative:
            raise NotImplementedError(
                f"layer {layer.layer_id}: speculative decoding on the CPU engine supports neither "
                "sliding windows nor cross or encoder attention; serve this model without a draft"
            )
        return stock

    def _forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
    ) -> Tensor:
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        planned = self.plan.num_rows if self.plan is not None else -1
        # with attention data parallelism, rows after the planned ones are padding
        may_be_padded = forward_batch.global_num_tokens_cpu is not None
        if self.plan is None or planned > len(q) or (planned < len(q) and not may_be_padded):
            raise RuntimeError(f"layer {layer.layer_id}: {len(q)} rows, but planned {planned}")
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None:
            loc = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            pool.set_kv_buffer(layer, loc, k, v)
        k_cache, v_cache = (
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
        )
        new = None
        if k is not None and v is not None and k.dtype == k_cache.dtype == q.dtype:
            new = k.view(-1, *k_cache.shape[1:]), v.view(-1, *v_cache.shape[1:])
        out = self.plan.attend(q[:planned], k_cache, v_cache, new, layer.scaling)
        out = out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)
        return out if planned == len(q) else pad(out, (0, 0, 0, len(q) - planned))


class CpuMultiStepDraftBackend:
    """The backends of the draft's decode steps: step i sees the prefix and i + 1 drafted tokens."""

    def __init__(self, runner: ModelRunner, topk: int, num_steps: int) -> None:
        self.topk, self.num_steps = topk, num_steps
        self.attn_backends = [CpuAttnBackend(runner) for _ in range(num_steps - 1)]
        self.pool = runner.req_to_token_pool

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        lens = forward_batch.seq_lens.repeat_interleave(self.topk).tolist()
        table = build_draft_decode_metadata_cpu(
            self.pool.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            self.topk,
            self.num_steps,
            max(lens, default=0) + self.num_steps,
        )
        rows, one_each = torch.arange(len(lens)), [1] * len(lens)
        for step, backend in enumerate(self.attn_backends, 1):
            backend.is_speculative = True
            kv_lens = [n + step for n in lens]
            backend.plan = make_plan(table, rows, one_each, kv_lens, backend.dtype)


def _refuse(extra: dict[str, Any]) -> None:
    """Refuse what SGLang passes to some models' attention and this backend would ignore."""
    if given := sorted(name for name, value in extra.items() if value is not None):
        raise NotImplementedError(
            f"attention arguments {given} are not supported on the CPU engine"
        )


def _always_absorb_mla() -> None:
    """Make DeepSeek-like models call attention in the absorbed form for every kind of forward.

    Cause: for a prefill SGLang would pick the unabsorbed form, whose keys are not what the MLA
    cache holds. Safe: both forms are the same function up to rounding, and the handler belongs to
    this backend's name only. SGLang 0.5.14 to 0.5.23.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    AttentionBackendRegistry.register(ATTENTION_BACKEND, lambda attn, batch: AttnForwardMethod.MLA)
