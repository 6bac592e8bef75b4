"""Serve small targets with SGLang on a machine that has no GPU.

SGLang has a CPU engine, but its compiled kernels do not load without libcuda, and its portable
attention backend knows nothing of speculative decoding. Three pieces close the gap:

- `kernels/sgl_kernel`: the kernels that engine calls, in plain torch (on PYTHONPATH of the server);
- `attention.py`: an attention backend with draft, verify and MLA support;
- `plugin.py`: the entry point that puts the backend in place inside each server process.

The launcher adds `environment()` and `server_args()` to the command when `needed()`. Plain serving
works with SGLang 0.5.14 to 0.5.23 on x86-64; EAGLE-3 needs a version whose CPU engine has
speculative decoding (0.5.23 does, 0.5.14 does not). This module imports no SGLang.
"""

import os
from pathlib import Path

import torch

KERNELS_DIR = Path(__file__).parent / "kernels"
"""Goes on PYTHONPATH of server processes; not a package itself."""

THREADS_VARIABLE = "EAGLE3_CPU_THREADS"
"""Environment variable with the number of OpenMP threads of a server process (default 1)."""

ATTENTION_BACKEND = "torch_native"
"""The backend name that `plugin.py` takes over: SGLang accepts only names that it knows."""


def needed() -> bool:
    """Whether servers on this machine must use the CPU engine."""
    return not torch.cuda.is_available()


def environment() -> dict[str, str]:
    """Environment variables to set for a server process, on top of the inherited ones."""
    inherited = os.environ.get("PYTHONPATH", "")
    python_path = os.pathsep.join(p for p in (str(KERNELS_DIR), inherited) if p)
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": python_path,
        "OMP_NUM_THREADS": os.environ.get(THREADS_VARIABLE, "1"),
        # Waiting threads sleep: when they spin on cores that others use, a 2-thread matrix product
        # was measured to run 4 to 30 times slower.
        "OMP_WAIT_POLICY": "PASSIVE",
        # SGLang decorates small functions with torch.compile, which costs more than it saves here.
        "TORCHDYNAMO_DISABLE": "1",
        # With several ranks SGLang looks for NCCL even where it will not use it; without the file
        # it goes on with gloo alone.
        "SGLANG_NCCL_SO_PATH": "none.so",
    }


def server_args() -> list[str]:
    """Arguments that every server on the CPU engine needs; later ones on the command line win."""
    return [
        "--device", "cpu", "--attention-backend", ATTENTION_BACKEND, "--dtype", "float32",
        "--disable-custom-all-reduce", "--sleep-on-idle",
    ]  # fmt: skip
