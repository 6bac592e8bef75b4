"""How training speed grows with ranks: `python bench/scaling.py --ranks 1 2 4 --out FILE`.

    python bench/scaling.py --ranks 1 2 4 --deepspeed zero1 zero2 zero3 --out FILE
    python bench/scaling.py --ranks 1 2 --small --out FILE      # tiny shapes, without a GPU

Our trainer, its data loader and optimizer included, on a store of random states with the shapes of
Llama-3.1-8B, at every ZeRO stage named. Every rank has micro-batches of the same size whatever
their number (weak scaling), one a step. Validation and checkpoints are left out. In a row:

- tok_s: tokens of a mean step on all ranks over the median step's time, after steps not timed;
- efficiency: tok_s over `ranks` times that of one rank at the same stage;
- balance: a step's work, mean over ranks over that of the rank with most. Documents are ragged, so
  ranks wait for the fullest one: an efficiency that communication cost nothing would be this;
- peak_gib: GPU memory of the fullest rank, from building the model on; peak_gib_of_ranks: of each;
- data_wait: share of time in which a step waited for data.

A group of ranks trains one stage after the other, to start once. One that has no row within
`--limit` seconds, or that fails, is ended; the stage it was at is recorded with the reason, and the
rest goes on in a new group. The file is written after every row.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import record
from eagle3.manifest import write_json
from eagle3.serving.watch import die_with_parent, end, tail
from extract import SHAPES
from random_store import random_store, target_without_layers
from runs import run_folder

ROOT = Path(__file__).resolve().parents[1]
SMALL: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 2048, "max_position_embeddings": 2048,
}  # fmt: skip
COLUMNS = (
    "ranks", "deepspeed", "tok_s", "tok_s_per_rank", "efficiency", "balance", "peak_gib", "step_ms",
    "data_wait", "start_up_s",
)  # fmt: skip


class Failed(RuntimeError):
    """A group of ranks died or was ended."""


@contextmanager
def group(ranks: int, job: dict[str, Any], logs: Path, env: dict[str, str]) -> Iterator[list[Any]]:
    """Processes of so many ranks; all are gone afterwards."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    processes = []
    try:
        for rank in range(ranks):
            with (logs / f"rank-{rank}.txt").open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(ROOT / "bench" / "scaling_rank.py"), json.dumps(job)],
                        env={**env, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        preexec_fn=die_with_parent,
                    )  # fmt: skip
                )
        yield processes
    finally:
        for process in processes:
            end(process.pid, grace_s=1.0)
            process.wait()


def rows_of(
    ranks: int, runs: dict[str, list[str]], args: argparse.Namespace, work: Path, until: float
) -> Iterator[dict[str, Any]]:
    """What a group of ranks measures, as it comes.

    Raises:
        Failed: a rank died, no row came within the limit, or it is `until` (monotonic seconds).
    """
    logs = Path(tempfile.mkdtemp(prefix=f"ranks-{ranks}-", dir=work))
    rows = logs / "rows.jsonl"
    job = {"runs": runs, "warm_up": args.warm_up, "steps": args.steps, "rows": str(rows)}
    threads = max(1, (os.cpu_count() or 1) // max(args.ranks))
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    seen, last = 0, time.monotonic()
    with group(ranks, job, logs, env) as processes:
        while seen < len(runs):
            # states first: what a rank wrote before it ended is then there to be read
            dead = [i for i, p in enumerate(processes) if p.poll() not in (None, 0)]
            ended = all(p.poll() is not None for p in processes)
            lines = rows.read_text().splitlines() if rows.exists() else []
            for line in lines[seen:]:
                yield json.loads(line)
                seen, last = seen + 1, time.monotonic()
            if seen == len(runs):
                return
            if dead or ended:
                where = dead[0] if dead else 0
                raise Failed(f"rank {where} ended. {tail(logs / f'rank-{where}.txt', 25)}")
            if time.monotonic() - last > args.limit or time.monotonic() > until:
                spent = time.monotonic() - last
                raise Failed(f"no row after {spent:.0f} s. {tail(logs / 'rank-0.txt', 25)}")
            time.sleep(0.2)


def measured(
    ranks: int, runs: dict[str, list[str]], args: argparse.Namespace, work: Path, until: float
) -> Iterator[dict[str, Any]]:
    """A row for every run: its figures, or why there are none."""
    left = dict(runs)
    if torch.cuda.is_available() and torch.cuda.device_count() < ranks:
        reason = f"{torch.cuda.device_count()} GPUs are visible"
        yield from ({"name": name, "error": reason} for name in left)
        return
    while left:
        if time.monotonic() > until:
            yield from ({"name": name, "error": "no time left"} for name in left)
            return
        try:
            for row in rows_of(ranks, left, args, work, until):
                yield row
                left = {name: run for name, run in left.items() if name != row["name"]}
        except Failed as failure:
            name = next(iter(left))
            yield {"name": name, "error": str(failure)}
            del left[name]


def entry(ranks: int, row: dict[str, Any], table: list[dict[str, Any]]) -> dict[str, Any]:
    """A row of the table, with what follows from the earlier ones."""
    figures = {name: value for name, value in row.items() if name != "name"}
    found = {"ranks": ranks, "deepspeed": row["name"], **figures}
    if "tok_s" in found:
        alone = [
            r["tok_s"]
            for r in [*table, found]
            if r["ranks"] == 1 and r["deepspeed"] == found["deepspeed"] and "tok_s" in r
        ]
        found["tok_s_per_rank"] = round(found["tok_s"] / ranks, 1)
        found["efficiency"] = round(found["tok_s"] / ranks / alone[0], 4) if alone else None
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--deepspeed", nargs="+", default=["zero1", "zero2"])
    parser.add_argument(
        "--model",
        type=Path,
        default=ROOT / "tests/assets/tiny-gsm-llama",
        help="folder whose tokenizer files to use; which ones makes no difference",
    )
    parser.add_argument("--tokens-per-batch", type=int, default=16384)
    parser.add_argument("--ttt", type=int, default=7)
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--store-tokens", type=int, default=300_000)
    parser.add_argument("--lengths", type=int, nargs=2, default=(200, 2000))
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before those timed")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--limit", type=float, default=100.0, help="seconds from row to row")
    parser.add_argument("--total-limit", type=float, default=500.0, help="seconds for all")
    parser.add_argument("--small", action="store_true", help="shapes for a CPU")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()  # fmt: skip
    args.shape = SHAPES["llama-3.1-8b"]
    if args.small:
        args.shape, args.draft_vocab, args.ttt = SMALL, 512, 3
        args.tokens_per_batch, args.store_tokens, args.lengths = 512, 20_000, (20, 200)
    return args


def main() -> None:
    args = parse()
    started = time.monotonic()
    until = started + args.total_limit
    table: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        target = target_without_layers(work / "target", args.shape, args.model)
        tokens = random_store(
            work / "store", target, args.codec, args.store_tokens, tuple(args.lengths)
        )
        print_line(f"a store of {tokens} tokens after {time.monotonic() - started:.0f} s")
        facts = {
            "hidden": args.shape["hidden_size"], "draft_vocab": args.draft_vocab, "ttt": args.ttt,
            "tokens_per_batch": args.tokens_per_batch, "codec": args.codec, "store_tokens": tokens,
            "lengths": list(args.lengths), "warm_up": args.warm_up, "steps": args.steps,
            **record.facts(),
        }  # fmt: skip
        common = [
            f"target.path={target.folder}", f"train.tokens_per_batch={args.tokens_per_batch}",
            f"train.ttt_steps={args.ttt}", f"draft.vocab_size={args.draft_vocab}",
            "train.validation_ratio=0", "optimizer=adamw",
        ]  # fmt: skip
        if not torch.cuda.is_available():
            common.append("deepspeed.bf16.enabled=false")  # 70 times slower without its own units
        for ranks in args.ranks:
            runs = {}
            for stage in args.deepspeed:
                folder = run_folder(work, f"{stage}-{ranks}", work / "store")
                runs[stage] = [f"deepspeed={stage}", *folder, *common]
            for row in measured(ranks, runs, args, work, until):
                table.append(entry(ranks, row, table))
                write_json(args.out, [row | facts for row in table])
                print_line(json.dumps(table[-1]))
    print_line(" ".join(f"{name:>14}" for name in COLUMNS))
    for row in table:
        print_line(" ".join(f"{row.get(name, '-')!s:>14}" for name in COLUMNS))


def print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
