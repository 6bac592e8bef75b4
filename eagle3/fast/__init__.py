"""The training step on a GPU: forward and backward written by hand, exact, without torch.compile.

`eagle3.ttt` is the definition and runs everywhere; this package computes the same loss and
gradients unless there is an `obstacle`, several times faster. What it does differently:

    layout.py         rows sorted so that each step's are the first ones; no step asks the GPU
    unroll.py         the drafter over all steps, and its gradients: one matrix product per weight
    fuse.py           aux states to hidden states, with their optional norms
    attention.py      step-0 keys by flash attention, a row's own later keys merged in
    flash.py          flash attention over a document's step-0 keys, with the logsumexp;
                      flash_kernels.py
    diagonal.py       the merge, and its gradients
    rope.py           hidden and token half of a projection added and rotated
    gather.py         rows added to others
    norm.py           residual sum and RMS norms in one pass
    swiglu.py         SwiGLU
    fp8.py            matrix products, if asked for in fp8
    loss.py           lm_head and loss in row chunks; the gradients made while logits exist
    step.py           all of it behind one autograd function

Kernels are Triton; beside each stands the same in plain PyTorch, which the tests compare with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from eagle3.fast.layout import Layout

if TYPE_CHECKING:
    from eagle3.batch import Batch
    from eagle3.drafter import Drafter

__all__ = ["Layout", "obstacle", "supported"]

WIDEST_GROUP = 32
"""Query heads of a key/value head: all are rows of one tile of `flash`, and tiles of more rows than
its TILES say need more shared memory than some GPUs have."""


def obstacle(drafter: Drafter, batch: Batch, fp8: bool = False) -> str | None:
    """Why `step.fast_ttt` cannot train this drafter on this batch; None if it can.

    The answer must not depend on what is supervised: gradients come from the same graph on every
    rank.
    """
    config, weight = drafter.config, drafter.fc.weight
    if not batch.aux.is_cuda:
        return "no GPU"
    if not weight.dtype == batch.aux.dtype == torch.bfloat16:
        return f"weights are {weight.dtype} and states {batch.aux.dtype}, not both bfloat16"
    if torch.cuda.get_device_capability(batch.aux.device) < (8, 0):
        return "flash attention needs a GPU of compute capability 8.0"
    if config.num_layers > 1:
        return f"draft.num_layers={config.num_layers}, not 1"
    if config.head_dim % 8 or config.head_dim > 256:
        return f"draft.head_dim={config.head_dim} is not a multiple of 8 up to 256"
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads > WIDEST_GROUP * kv_heads:
        return (
            f"draft.num_attention_heads={heads} is more than {WIDEST_GROUP} times "
            f"draft.num_key_value_heads={kv_heads}"
        )
    if fp8:
        if torch.cuda.get_device_capability(batch.aux.device) < (8, 9):
            return "fp8 needs a GPU of compute capability 8.9"
        if any(width % 16 for width in _widths(drafter)):
            return f"fp8 needs sizes that are multiples of 16, not {_widths(drafter)}"
    if batch.layout is None:
        return "the batch has no layout: it did not come to the GPU with Batch.to"
    return None


def _widths(drafter: Drafter) -> list[int]:
    config = drafter.config
    heads = (config.num_attention_heads, config.num_key_value_heads)
    return [config.hidden_size, config.intermediate_size, *(n * config.head_dim for n in heads)]


def supported(drafter: Drafter, batch: Batch) -> bool:
    """Whether `step.fast_ttt` can train this drafter on this batch."""
    return obstacle(drafter, batch) is None
