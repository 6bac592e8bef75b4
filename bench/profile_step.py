"""Where a training step's time on the GPU goes: `python bench/profile_step.py --out FILE`.

Our step at the shapes of `bench/train.py`, two micro-batches under PyTorch's profiler; milliseconds
a step, by group and by kernel. Profiled steps run on a GPU that is not warm yet: a power limit
makes matrix products slower in a long run. `tok_s` is that of a short one, after the profile.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import record
from eagle3.manifest import write_json
from systems import OURS, build
from train import entry, take_turn, warm_up
from workload import LLAMA_8B, make_batches

GROUPS = {
    "matrix products": ("nvjet", "gemm", "cutlass", "_product_kernel"),
    "attention": ("flash", "attend", "grad_q", "grad_kv", "merge", "add_groups"),
    "loss": ("cross_entropy", "overlap", "teacher"),
}


def group_of(kernel: str) -> str:
    """The first group with a part of the kernel's name; attention before its matrix products."""
    for name in ("attention", "loss", "matrix products"):
        if any(part in kernel for part in GROUPS[name]):
            return name
    return "other"


def profile(step: Any, num_steps: int) -> dict[str, tuple[float, int]]:
    """Milliseconds and launches of each kernel, of one step in mean over two micro-batches."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as found:
        for index in range(2):
            step(index, num_steps)
        torch.cuda.synchronize()
    kernels: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            milliseconds, launches = kernels[event.name]
            kernels[event.name] = milliseconds + event.device_time_total / 1000, launches + 1
    return {name: (ms / 2, launches // 2) for name, (ms, launches) in kernels.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--system", default="eagle3", choices=OURS)
    parser.add_argument("--ttt", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    batches = make_batches(args.tokens, args.batches, LLAMA_8B, "cuda")
    system = build(args.system, LLAMA_8B, batches, "cuda")
    warm_up(system, len(batches), args.ttt, 300.0)
    kernels = profile(system.step, args.ttt)
    take_turn(system, len(batches), args.ttt, 0)
    groups: dict[str, float] = defaultdict(float)
    for name, (milliseconds, _) in kernels.items():
        groups[group_of(name)] += milliseconds
    longest = sorted(kernels.items(), key=lambda item: -item[1][0])[:40]
    result = {
        "kernels_ms": round(sum(groups.values()), 2),
        "groups_ms": {name: round(ms, 2) for name, ms in sorted(groups.items())},
        "kernels": [
            {"name": name[:80], "ms": round(ms, 3), "launches": launches}
            for name, (ms, launches) in longest
        ],
        "tok_s": entry(system, batches, LLAMA_8B, args.ttt, 989.0)["tok_s"],
        "system": system.name,
        "ttt": args.ttt,
        **record.facts(),
    }
    write_json(args.out, result)
    for name, milliseconds in result["groups_ms"].items():
        print(f"{name:20s} {milliseconds:8.2f} ms")  # noqa: T201


if __name__ == "__main__":
    main()
