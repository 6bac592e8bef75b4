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

A group of ranks trains one stage after the other, to start once, and groups import what they need
before their turn. One that has no row within
`--limit` seconds, or that fails, is ended; the stage it was at is recorded with the reason, and the
rest goes on in a new group. The file is written after every row.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import record
from eagle3.manifest import write_json
from eagle3.serving.watch import die_with_parent, end, tail
from random_store import SHAPES, random_store, target_without_layers
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


Rows = Iterator[dict[str, Any]]


class Failed(RuntimeError):
    """A group of ranks died or was ended."""


class Group:
    """Processes of so many ranks, which wait for their job once they have imported everything."""

    def __init__(self, ranks: int, work: Path, threads: int) -> None:
        self.ranks = ranks
        self.logs = Path(tempfile.mkdtemp(prefix=f"ranks-{ranks}-", dir=work))
        self.processes: list[subprocess.Popen[str]] = []
        sizes = {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": str(threads)}
        for rank in range(ranks):
            with self.log(rank).open("wb") as output:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, str(ROOT / "bench" / "scaling_rank.py")],
                        env={**os.environ, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, text=True,
                        start_new_session=True, preexec_fn=die_with_parent,
                    )
                )  # fmt: skip

    def log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.txt"

    def rows(self, runs: dict[str, list[str]], args: argparse.Namespace, until: float) -> Rows:
        """Do the job; a row for each run, as it comes.

        Raises:
            Failed: a rank ended, no row came within the limit, or it is `until` (monotonic
                seconds).
        """
        rows = self.logs / "rows.jsonl"
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(sock.getsockname()[1])}
        job = {"runs": runs, "warm_up": args.warm_up, "steps": args.steps, "rows": str(rows)}
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended, which is seen below
                process.stdin.write(json.dumps({**job, "env": env}) + "\n")
                process.stdin.flush()
        seen, last = 0, time.monotonic()
        while seen < len(runs):
            # states first: what a rank wrote before it ended is then there to be read
            ended = [rank for rank, p in enumerate(self.processes) if p.poll() is not None]
            for line in (rows.read_text() if rows.exists() else "").splitlines()[seen:]:
                yield json.loads(line)
                seen, last = seen + 1, time.monotonic()
            waited = time.monotonic() - last
            if seen < len(runs) and ended:
                raise Failed(f"rank {ended[0]} ended. {tail(self.log(ended[0]), 25)}")
            if seen < len(runs) and (waited > args.limit or time.monotonic() > until):
                raise Failed(f"no row after {waited:.0f} s. {tail(self.log(0), 25)}")
            time.sleep(0.2)

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                end(process.pid, grace_s=1.0)
                process.wait()


def measured(
    group: Group, runs: dict[str, list[str]], args: argparse.Namespace, until: float
) -> Rows:
    """A row for every run: its figures, or why there are none."""
    left = dict(runs)
    while left:
        try:
            for row in group.rows(left, args, until):
                yield row
                left = {name: run for name, run in left.items() if name != row["name"]}
        except Failed as failure:
            name = next(iter(left))
            yield {"name": name, "error": str(failure)}
            del left[name]
        finally:
            group.end()
        if left and time.monotonic() > until:
            yield from ({"name": name, "error": "no time left"} for name in left)
            return
        if left:
            group = Group(group.ranks, group.logs.parent, args.threads)


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
    visible = torch.cuda.device_count()
    if torch.cuda.is_available() and max(args.ranks) > visible:
        parser.error(f"--ranks {max(args.ranks)}: {visible} GPUs are visible")
    args.threads = max(1, (os.cpu_count() or 1) // max(args.ranks))
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
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        work = Path(scratch)
        groups = {ranks: Group(ranks, work, args.threads) for ranks in args.ranks}
        for group in groups.values():
            stack.callback(group.end)
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
        for ranks, group in groups.items():
            runs = {}
            for stage in args.deepspeed:
                folder = run_folder(work, f"{stage}-{ranks}", work / "store")
                runs[stage] = [f"deepspeed={stage}", *folder, *common]
            for row in measured(group, runs, args, until):
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
