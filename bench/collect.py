"""Keep what a run measured: `python bench/collect.py runs/demo --out bench/results/demo_cpu.json`.

Takes eval/results.json, the cost of each stage, the store's size and rate, and the learning curve
from a run folder, and adds the command and the date.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

from eagle3.manifest import Manifest, write_json

CURVE = ("validation/acceptance_0", "validation/accept_length", "validation/loss")


def collect(run: Path, command: str) -> dict[str, Any]:
    """Everything worth keeping of a run folder."""
    lines = [json.loads(x) for x in (run / "train" / "metrics.jsonl").read_text().splitlines()]
    speeds = [x["train/tokens_per_s"] for x in lines if "train/tokens_per_s" in x]
    return {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "stages": json.loads((run / "usage.json").read_text()),
        "store": Manifest.load(run / "store", "store").facts,
        "train_tokens_per_s": sorted(speeds)[len(speeds) // 2],
        "learning_curve": [
            {"step": x["step"], **{k.split("/")[1]: x[k] for k in CURVE}}
            for x in lines
            if CURVE[0] in x
        ],
        **json.loads((run / "eval" / "results.json").read_text()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--command", default="make demo")
    arguments = parser.parse_args()
    write_json(arguments.out, collect(arguments.run, arguments.command))


if __name__ == "__main__":
    main()
