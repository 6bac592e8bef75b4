"""One rank of `bench/scaling.py`, which starts it and, when its turn comes, sends a line of JSON:

{"runs": {name: overrides}, "warm_up": steps, "steps": steps, "rows": file, "env": {name: value}}

It trains each run in turn, and rank 0 appends a line to the file after each.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  # takes seconds, which would else be part of its turn
import torch
import torch.distributed as dist

from eagle3 import logging as console
from eagle3.config import Config
from gpu import allocated, synchronize
from runs import compose
from training.train import Trainer
from training.world import World, group_left_at_end


def now() -> Any:
    """A moment of the GPU's time, taken without waiting for it; the wall clock without a GPU."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_ms(start: Any, end: Any) -> float:
    return start.elapsed_time(end) if torch.cuda.is_available() else 1000 * (end - start)


def measure(config: Config, world: World, warm_up: int) -> dict[str, Any]:
    """Train all steps of a configuration; the figures of those after `warm_up`, of all ranks."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    held = allocated()
    started = time.perf_counter()
    trainer = Trainer(config, world)
    marks, work = [], []
    with closing(trainer._batches()) as batches:
        while trainer.step < trainer.num_steps:
            if trainer.step == warm_up:
                synchronize()
                start_up_s = time.perf_counter() - started
                trainer.meter.restart()
                marks.append(now())
            window = trainer.meter.take(batches, config.train.accumulation)
            trainer._optimizer_step(window, score=False)
            trainer.step += 1
            if trainer.step > warm_up:
                marks.append(now())
                work.append(sum(loaded.flops or loaded.batch.num_rows for loaded in window))
    synchronize()
    values = trainer.meter.values()
    own = {
        "ms": [elapsed_ms(a, b) for a, b in pairwise(marks)],
        "work": work,
        "tokens": trainer.meter.tokens,
        "peak": torch.cuda.max_memory_allocated() - held if torch.cuda.is_available() else None,
    }
    trainer.metrics.close()
    trainer.engine.destroy()
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, own)
    return {**together(everyone), "data_wait": round(values["train/data_wait"], 4),
            "start_up_s": round(start_up_s, 1)}  # fmt: skip


def together(everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of all ranks' figures; see scaling.py."""
    step_ms = max(statistics.median(own["ms"]) for own in everyone)
    tokens = sum(own["tokens"] for own in everyone) / len(everyone[0]["ms"])
    by_step = list(zip(*(own["work"] for own in everyone), strict=True))
    even = [sum(step) / len(step) / max(step) for step in by_step]
    peaks = [own["peak"] for own in everyone if own["peak"] is not None]
    return {
        "tok_s": round(1000 * tokens / step_ms, 1),
        "step_ms": round(step_ms, 2),
        "steps_ms": [round(ms, 2) for ms in everyone[0]["ms"]],
        "tokens_per_step": round(tokens, 1),
        "balance": round(statistics.median(even), 4),
        "peak_gib": round(max(peaks) / 2**30, 2) if peaks else None,
        "peak_gib_of_ranks": [round(peak / 2**30, 2) for peak in peaks],
    }


def main() -> None:
    job = json.loads(sys.stdin.readline())
    os.environ |= job["env"]
    console.setup()
    world = World.join()
    for name, overrides in job["runs"].items():
        total = job["warm_up"] + job["steps"]
        config = compose([*overrides, f"train.max_steps={total}", "train.epochs=null"])
        row = measure(config, world, job["warm_up"])
        if world.rank == 0:
            with Path(job["rows"]).open("a") as file:
                file.write(json.dumps({"name": name, **row}) + "\n")


if __name__ == "__main__":
    with group_left_at_end():
        main()
