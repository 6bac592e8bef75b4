"""The whole road on one GPU, from prompts to the live comparison, timed.

    python bench/story.py --experiment smollm2_h200 --greedy gsm8k_train.jsonl,arena_hard.jsonl \
      --sampled instructions.jsonl --benchmark gsm8k=gsm8k_test.jsonl,mt_bench=question.jsonl \
      --out bench/results/h200_story.json

The target answers every --greedy prompt greedily and every --sampled prompt --samples times with
--temperature, on `server.replicas` servers. All answers are captured into one store. One drafter is
trained for each --variant (overrides, side by side on the GPUs); the one with the best validation
accept length is exported and measured. The first plain server that answers is also the plain side
of the comparison. At last `parity` looks whether the server drafted what was trained. Everything
resumes.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import subprocess
import sys
import time
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

import record
from eagle3.manifest import Manifest, write_json
from eagle3.serving.from_config import get_servers
from eagle3.store.reader import StoreReader
from eagle3.target import Target
from extraction.capture import default_spools, server_args
from extraction.spool import Spool, environment
from runs import compose
from training.train import KIND as TRAINING


class Story:
    """A run of the commands, with the seconds each took."""

    def __init__(self, overrides: list[str], logs: Path) -> None:
        self.overrides, self.logs = overrides, logs
        self.seconds: dict[str, float] = {}
        logs.mkdir(parents=True, exist_ok=True)

    def start(
        self, name: str, module: str, *more: str, gpu: str | None = None
    ) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", module, *self.overrides, *more]
        env = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
        with (self.logs / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=env)

    def wait(
        self,
        name: str,
        *processes: subprocess.Popen[bytes],
        since: float,
        all_of_them: bool = True,
    ) -> None:
        """Until they end; ends the story if one failed, or all did."""
        failed = [process.wait() != 0 for process in processes]
        if any(failed):
            say(f"{name}: {sum(failed)} of {len(failed)} failed, see {self.logs}/{name}*.log")
        if all(failed) or (all_of_them and any(failed)):
            raise SystemExit(1)
        self.seconds[name] = round(time.monotonic() - since, 1)
        say(f"{name}: {self.seconds[name]:.0f} s")

    def run(self, name: str, module: str, *more: str) -> None:
        since = time.monotonic()
        self.wait(name, self.start(name, module, *more), since=since)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def joined(files: str, copies: int, out: Path) -> Path:
    """Rows of several JSON Lines files, each so many times, under ids that say where from."""
    with out.open("w", encoding="utf-8") as file:
        for source in map(Path, files.split(",")):
            for number, line in enumerate(source.open(encoding="utf-8")):
                row = json.loads(line)
                for copy in range(copies):
                    row["id"] = f"{source.parent.name}/{source.stem}/{number}/{copy}"
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return out


def gpus() -> list[str | None]:
    """The GPUs at hand, the last first: servers hold the first."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given:
        return [*given.split(",")][::-1]
    return [str(n) for n in reversed(range(torch.cuda.device_count()))] or [None]


def best(folders: dict[str, Path]) -> tuple[str, dict[str, Any]]:
    """The variant with the best last validation, and the last validation of all that finished."""
    manifests = {name: Manifest.load(folder, TRAINING) for name, folder in folders.items()}
    last = {name: m.facts["last"] for name, m in manifests.items() if m.facts.get("complete")}
    return max(last, key=lambda name: last[name]["accept_length"]), last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--experiment", default="smollm2_h200")
    parser.add_argument("--greedy", required=True)
    parser.add_argument("--sampled", required=True)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument(
        "--benchmark", default="", help="local files of the experiment's: name=file"
    )
    parser.add_argument("--variant", action="append", default=[], help="name:overrides for train")
    parser.add_argument("--override", action="append", default=[])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    overrides = [f"experiment={arguments.experiment}", "logger=jsonl", *arguments.override]
    config = compose(overrides)
    target = Target.from_config(config.target)
    layers = target.aux_layers(config.target.aux_layers)
    run = config.run_dir
    run.mkdir(parents=True, exist_ok=True)
    story = Story(overrides, run / "logs")
    greedy = joined(arguments.greedy, 1, run / "greedy.jsonl")
    sampled = joined(arguments.sampled, arguments.samples, run / "sampled.jsonl")
    spools = [Spool.create(folder) for folder in default_spools(config)]
    for spool in spools:
        atexit.register(spool.remove)
    since = time.monotonic()
    # the plain side of the comparison; the others help it answer
    plain = get_servers(
        config.server, target.folder, run / "logs" / "plain.log",
        args={"disable_radix_cache": True}, envs=[{}] * config.server.replicas,
    )  # fmt: skip
    capturing = get_servers(
        config.server, target.folder, run / "logs" / "capture.log", args=server_args(),
        envs=[environment(spool.folder, layers) for spool in spools], plugins=["eagle3_capture"],
    )  # fmt: skip
    with plain as answering:
        story.seconds["servers"] = round(time.monotonic() - since, 1)
        say(f"servers: {story.seconds['servers']:.0f} s")
        urls = f"server.urls=[{','.join(server.url for server in answering)}]"
        other = f"{config.run_name}_sampled"
        since = time.monotonic()
        answers = [
            story.start("respond", "extraction.respond", urls, f"data.prompts={greedy}"),
            story.start(
                "respond_sampled", "extraction.respond", urls, f"run_name={other}",
                f"data.prompts={sampled}", f"respond.temperature={arguments.temperature}",
            ),
        ]  # fmt: skip
        with capturing as servers:
            story.wait("respond", *answers, since=since)
            story.run(
                "extract", "extraction.extract",
                f"server.urls=[{','.join(server.url for server in servers)}]",
                f"extract.spools=[{','.join(str(spool.folder) for spool in spools)}]",
                f"data.conversations=[{Path(config.runs_dir) / other}/responses/responses.jsonl]",
            )  # fmt: skip
        variants = dict(v.split(":", 1) for v in arguments.variant) or {"as_configured": ""}
        folders = {name: run / f"train_{name}" for name in variants}
        since = time.monotonic()
        trainings = [
            story.start(
                f"train_{name}", "training.train", f"train_dir={folders[name]}", *v.split(),
                gpu=gpu,
            )
            for (name, v), gpu in zip(variants.items(), cycle(gpus()), strict=False)
        ]  # fmt: skip
        story.wait("train", *trainings, since=since, all_of_them=False)
        chosen, validation = best(folders)
        say(f"chosen: {chosen}")
        chosen_overrides = [f"train_dir={folders[chosen]}", *variants[chosen].split()]
        story.run("export", "training.export", *chosen_overrides)
        sets = dict(pair.split("=") for pair in filter(None, arguments.benchmark.split(",")))
        files = [f"benchmark.{name}.path={path}" for name, path in sets.items()]
        story.run(
            "eval", "eval.live", f"eval.plain_url={answering[0].url}", *files, *chosen_overrides
        )
    story.run("capture_answers", "extraction.extract", "extract.of_eval=true")
    since = time.monotonic()
    story.start("parity", "eval.parity").wait()  # 1: they differ, which is a result as well
    story.seconds["parity"] = round(time.monotonic() - since, 1)
    parity = json.loads((config.eval_dir / "parity.json").read_text())
    store = StoreReader(config.store_dir)
    labels = int(store.generated_counts(range(len(store))).sum())
    results = json.loads((config.eval_dir / "results.json").read_text())
    write_json(
        arguments.out,
        {
            **results["benchmarks"],
            "offline": results["offline"],
            "parity": {k: v for k, v in parity.items() if k not in record.facts()},
            "data": {
                "samples": len(store),
                "tokens": int(store.lengths.sum()),
                "answer_tokens": labels,
                "extract": {
                    k: store.manifest.facts[k] for k in ("tokens_per_s", "rejected", "servers")
                },
            },
            "training": {"chosen": chosen, "validation": validation, "variants": variants},
            "seconds": story.seconds,
            **record.facts(),
        },
    )
    say(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
