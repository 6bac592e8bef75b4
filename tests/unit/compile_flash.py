"""Compile flash attention's kernels for several GPUs, none of which has to be there.

Prints [compute capability, head size, kernel, bytes of shared memory] of each as JSON.
"""

from __future__ import annotations

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from eagle3.fast import flash

KERNELS = {
    "attend": flash.attend_kernel,
    "grad_q": flash.grad_q_kernel,
    "grad_kv": flash.grad_kv_kernel,
}
TYPES = {
    "*bf16": {"q", "keys", "values", "grads", "grad_q", "out"},
    "*fp32": {"logsumexp", "deltas", "grad_keys", "grad_values"},
    "*i32": {"docs", "firsts", "query_starts", "key_starts", "seen_keys", "first_queries"},
    "i32": {"num_steps", "num_slots"},
    "fp32": {"scale"},
}


def shared_bytes(capability: int, size: int, name: str) -> int:
    """Of one program, for heads of `size` in groups of four."""
    kernel = KERNELS[name]
    constants = flash._constants(name, 8, 2, size)
    options = {k: constants.pop(k) for k in ("num_warps", "num_stages")}
    signature = dict.fromkeys(constants, "constexpr")
    signature |= {n: t for t, names in TYPES.items() for n in names & {*kernel.arg_names}}
    pointers = [i for i, n in enumerate(kernel.arg_names) if signature[n].startswith("*")]
    source = ASTSource(
        fn=kernel,
        signature={n: signature[n] for n in kernel.arg_names},
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in pointers},
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=options).metadata.shared


if __name__ == "__main__":
    rows = [
        [capability, size, name, shared_bytes(capability, size, name)]
        for capability in (80, 89, 90)
        for size in (64, 128, 256)
        for name in KERNELS
    ]
    print(json.dumps(rows))  # noqa: T201
