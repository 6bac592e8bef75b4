"""Does the loader keep up with the training step? `python bench/loader.py --out FILE`.

Our training on a store of random states: its steps with the loader, the same steps with batches
that are on the device already, and the loader alone. A loader faster than the step still costs
what its thread keeps the step's from (Python's lock, memory bandwidth): the difference of the
first two.

    step_ms    a step with the loader; waited_ms of it, the batch was not there yet
    kept_ms    a step without one
    loader_ms  a batch with no training beside it
    pack_ms    of that, joining its samples in memory
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  # takes seconds, which would else be part of the first step

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import record
from eagle3.manifest import write_json
from gpu import synchronize
from random_store import SHAPES, random_store, target_without_layers
from runs import compose, run_folder
from training.data import Loaded
from training.train import Trainer
from training.world import World, group_left_at_end

ROOT = Path(__file__).resolve().parents[1]


def steps(trainer: Trainer, batches: Iterator[Loaded], count: int) -> tuple[float, float]:
    """Milliseconds of a step, and of waiting for its batch, in mean over `count`."""
    synchronize()
    trainer.meter.restart()
    started = time.perf_counter()
    for _ in range(count):
        trainer._optimizer_step(trainer.meter.take(batches, 1), score=False)
        trainer.step += 1
    synchronize()
    return 1000 * (time.perf_counter() - started) / count, 1000 * trainer.meter.waited_s / count


def each_ms(work: Iterator[Any], count: int) -> float:
    """Milliseconds of the next `count` of an iterator, in mean."""
    started = time.perf_counter()
    for _ in itertools.islice(work, count):
        pass
    synchronize()
    return 1000 * (time.perf_counter() - started) / count


def measure(trainer: Trainer, warm_up: int, count: int) -> dict[str, float]:
    pinned = trainer.world.device.type == "cuda"
    with closing(trainer._batches()) as batches:
        steps(trainer, batches, warm_up)
        step_ms, waited_ms = steps(trainer, batches, count)
        kept = [next(batches) for _ in range(min(8, count))]
    kept_ms, _ = steps(trainer, itertools.cycle(kept), count)
    del kept
    with closing(trainer._batches()) as batches:
        each_ms(batches, 4)  # what the thread read ahead
        loader_ms = each_ms(batches, count)
    packed = (trainer.reader.pack(n, pinned=pinned) for n in trainer._my_batches(0))
    each_ms(packed, 4)
    found = {
        "step_ms": step_ms, "waited_ms": waited_ms, "kept_ms": kept_ms, "loader_ms": loader_ms,
        "pack_ms": each_ms(packed, count),
    }  # fmt: skip
    return {name: round(ms, 2) for name, ms in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--experiment", default="smollm2_h200")
    parser.add_argument("--override", nargs="*", default=[], help="of the experiment")
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument(
        "--model", type=Path, default=ROOT / "tests/assets/tiny-gsm-llama",
        help="folder whose tokenizer files to use; which ones makes no difference",
    )  # fmt: skip
    parser.add_argument("--codec", default="bf16")
    parser.add_argument("--store-tokens", type=int, default=2_000_000)
    parser.add_argument("--lengths", type=int, nargs=2, default=(80, 700))
    parser.add_argument("--warm-up", type=int, default=40, help="steps before those timed")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    world = World.join()
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        target = target_without_layers(work / "target", SHAPES[args.shape], args.model)
        random_store(work / "store", target, args.codec, args.store_tokens, tuple(args.lengths))
        trainer = Trainer(
            compose([
                f"experiment={args.experiment}", f"target.path={target.folder}",
                *run_folder(work, "run", work / "store"), "train.validation_ratio=0",
                "target.aux_layers=null", "train.epochs=null", "train.max_steps=1000000",
                *args.override,
            ]),
            world,
        )  # fmt: skip
        figures = measure(trainer, args.warm_up, args.steps)
        trainer.metrics.close()
    write_json(args.out, {"shape": args.shape, "codec": args.codec, **figures, **record.facts()})
    sys.stdout.write(f"{figures}\n")


if __name__ == "__main__":
    with group_left_at_end():
        main()
