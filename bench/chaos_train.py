"""Kill training again and again, and compare: `python bench/chaos_train.py --out FILE`.

Needs a store of the ci experiment (`make respond extract EXP=ci`). One run is left alone. A second
one is killed with SIGKILL at seeded random moments and started again each time, until it has been
killed `--kills` times and is then left to finish. Kills come in turn soon after the first step of a
start, while a checkpoint is being written, and soon after one. Both runs must end with the same
bytes in every checkpoint file, and with the same metrics but for those that measure time. They use
Muon and AdamW, a moving average and wsd, so that all of a checkpoint is put to the test.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle3 import provenance
from eagle3.manifest import write_json
from training.meter import TIMED

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = [
    "experiment=ci", "logger=jsonl", "optimizer=muon", "optimizer.lr=1e-3",
    "optimizer.schedule=wsd", "train.ema=0.99", "train.epochs=null", "train.tokens_per_batch=512",
    "train.simulate_samples=4", "train.log_every=1", "train.validate_every=25",
    "train.save_every=3",
]  # fmt: skip
WHEN = ("early", "save", "late")
LONGEST_WAIT_S = 2.0
"""Between a first step or checkpoint and the kill."""
LONGEST_SAVE_S = 0.03
"""Between a checkpoint's first file and a kill while it is being written."""


def start(folder: Path, runs: Path, steps: int) -> subprocess.Popen[bytes]:
    places = [f"runs_dir={runs}", f"train_dir={folder}", f"train.max_steps={steps}"]
    return subprocess.Popen(
        [sys.executable, "-m", "training.train", *SETTINGS, *places],
        cwd=ROOT,
        stderr=(folder.parent / f"{folder.name}.log").open("w"),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(process: subprocess.Popen[bytes], folder: Path) -> None:
    if process.wait() != 0:
        raise SystemExit((folder.parent / f"{folder.name}.log").read_text()[-3000:])


def lines(folder: Path) -> list[dict[str, Any]]:
    """Whole lines of metrics.jsonl."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def being_saved(folder: Path) -> bool:
    return any(folder.glob(".step-*.tmp"))


def newest(folder: Path) -> int:
    """Step of the last checkpoint, 0 without one."""
    return max((int(f.name[5:]) for f in folder.glob("step-*")), default=0)


def kill_once(
    process: subprocess.Popen[bytes], folder: Path, when: str, rng: random.Random
) -> dict[str, Any] | None:
    """Kill a started run; None if it ended before.

    when: "early", soon after its first step; "late", soon after its first checkpoint; "save", while
    it writes a later checkpoint.
    """
    before = newest(folder)
    logged = len(lines(folder))
    if when == "early":
        wait(process, lambda: len(lines(folder)) != logged and newest(folder) == before)
    else:
        wait(process, lambda: newest(folder) > before)
    if when == "save":
        wait(process, lambda: being_saved(folder))
        time.sleep(rng.random() * LONGEST_SAVE_S)
    else:
        time.sleep(rng.random() * LONGEST_WAIT_S)
    if process.poll() is not None:
        return None
    process.kill()
    process.wait()
    return {
        "when": when,
        "logged_step": max((line["step"] for line in lines(folder)), default=0),
        "last_checkpoint": newest(folder),
        "left_unfinished_checkpoint": being_saved(folder),
    }


def wait(process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    while process.poll() is None and not condition():
        time.sleep(0.002)


def without_times(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in TIMED} for line in lines(folder)]


def differing_files(one: Path, other: Path) -> list[str]:
    """Checkpoint files of either folder that the other lacks or has with other bytes."""
    names = {f.relative_to(d).as_posix() for d in (one, other) for f in d.glob("step-*/*")}
    return sorted(
        name
        for name in names
        if not ((one / name).exists() and (other / name).exists())
        or (one / name).read_bytes() != (other / name).read_bytes()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="has ci/store")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    runs, rng, kills = args.runs.resolve(), random.Random(args.seed), []
    with tempfile.TemporaryDirectory() as work:
        whole, chaos = Path(work) / "whole", Path(work) / "chaos"
        finish(start(whole, runs, args.steps), whole)
        while len(kills) < args.kills:
            found = kill_once(
                start(chaos, runs, args.steps), chaos, WHEN[len(kills) % len(WHEN)], rng
            )
            if found is None:
                raise SystemExit(f"it ended after {len(kills)} kills: give more --steps")
            kills.append(found)
            print(json.dumps({"kill": len(kills), **found}), flush=True)  # noqa: T201
        finish(start(chaos, runs, args.steps), chaos)
        files, same_metrics = differing_files(whole, chaos), lines(whole) != []
        same_metrics &= without_times(whole) == without_times(chaos)
    result = {
        "kill_points": len(kills),
        "identical": not files and same_metrics,
        "differing_files": files,
        "identical_metrics": same_metrics,
        "killed_while_saving": sum(k["left_unfinished_checkpoint"] for k in kills),
        "steps": args.steps,
        "seed": args.seed,
        "kills": kills,
        "settings": SETTINGS,
        "machine": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "versions": provenance.versions(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": shlex.join(["python", *sys.argv]),
    }
    write_json(args.out, result)
    print(json.dumps({k: result[k] for k in ("kill_points", "identical")}))  # noqa: T201
    raise SystemExit(0 if result["identical"] else 1)


if __name__ == "__main__":
    main()
