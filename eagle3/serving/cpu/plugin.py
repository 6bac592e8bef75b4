"""SGLang plugin `eagle3_cpu`: puts the attention backend of this package in place.

SGLang calls `register` in each of its processes, GPU servers included, so it does nothing unless
the process runs on the CPU engine.

What it changes, and why that is safe:

- The attention backend named "torch_native" becomes `CpuAttnBackend`. Cause: `--attention-backend`
  takes only known names, and the stock backend has no verify or draft-extend step and reads the MLA
  cache as if it held full keys. Safe: it subclasses the stock backend and hands it whatever it does
  not handle itself. SGLang 0.5.14 to 0.5.23.
- `DraftBackendFactory.create_decode_backend` and `.create_draft_extend_backend` return ours. Cause:
  their table of drafting backends has no portable entry. Safe: only a draft on "torch_native" gets
  here, and for it the originals can do nothing but raise. The names are the same in 0.5.14 to
  0.5.23; the CPU engine drafts in the later ones only.
- `init_threads_binding` does nothing. Cause: it gives every rank a NUMA node of its own and refuses
  more ranks than nodes. Safe: the cores it returns go to a compiled kernel only, which this engine
  does not have. A function of `numa_utils` in 0.5.23, a method of `ModelRunner` in 0.5.14.
"""

import os
from collections.abc import Callable
from typing import Any

from eagle3.serving.cpu import ATTENTION_BACKEND, needed

_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory"


def register() -> None:
    """Entry point (group `sglang.srt.plugins`)."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1" or not needed():
        return
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    ATTENTION_BACKENDS[ATTENTION_BACKEND] = _attention_backend
    HookRegistry.register(f"{_FACTORY}.create_decode_backend", _decode, HookType.AROUND)
    HookRegistry.register(f"{_FACTORY}.create_draft_extend_backend", _extend, HookType.AROUND)
    HookRegistry.register(_threads_binding(), _bind_nothing, HookType.REPLACE)


def _threads_binding() -> str:
    """Where this version of SGLang has `init_threads_binding`."""
    from sglang.srt.utils import numa_utils

    if hasattr(numa_utils, "init_threads_binding"):
        return "sglang.srt.utils.numa_utils.init_threads_binding"
    return "sglang.srt.model_executor.model_runner.ModelRunner.init_threads_binding"


def _bind_nothing(*args: Any, **kwargs: Any) -> None:
    """Instead of `init_threads_binding`: any number of ranks shares the cores."""


def _attention_backend(runner: Any) -> Any:
    from eagle3.serving.cpu.attention import CpuAttnBackend

    return CpuAttnBackend(runner)


def _is_ours(factory: Any) -> bool:
    """Whether this draft's attention is ours: its own setting, or else the target's."""
    from eagle3.serving.cpu.attention import CpuAttnBackend

    if factory.draft_attn_backend is not None:
        return factory.draft_attn_backend == ATTENTION_BACKEND
    return isinstance(factory.draft_model_runner.attn_backend, CpuAttnBackend)


def _decode(original: Callable[..., Any], factory: Any) -> Any:
    """Around `create_decode_backend`: one backend a draft step; none when one step is drafted."""
    from eagle3.serving.cpu.attention import CpuMultiStepDraftBackend

    if not _is_ours(factory) or factory.speculative_num_steps <= 1:
        return original(factory)
    return CpuMultiStepDraftBackend(
        factory.draft_model_runner, factory.topk, factory.speculative_num_steps
    )


def _extend(original: Callable[..., Any], factory: Any) -> Any:
    """Around `create_draft_extend_backend`."""
    return (
        _attention_backend(factory.draft_model_runner) if _is_ours(factory) else original(factory)
    )
