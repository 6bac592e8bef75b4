"""What capturing costs: prefill throughput with and without it, on the same prompts.

    python bench/extract.py --model FOLDER --out bench/results/extract_cpu.json
    python bench/extract.py --shape llama-3.1-8b --out bench/results/h200_extract.json

Two servers of the same target run side by side, one plain, one with the capture plugin; only one at
a time has work. A round sends the same prompts to both; capturing goes the whole way, through
spool, verification and shards on disk, until the store is finished (`capture_tok_s`). What is left
to do after the last capture has arrived, `finish_s`, is at most two shards to write and sync: it
weighs the less the more tokens a round has, so `captured_tok_s` gives the speed without it. A
`spool_gb_s` (bytes per token times `capture_tok_s`) near `disk_mb_s`, what the disk takes of one
synced file, means that the disk was the limit. `--shape` makes a target of random weights with a
real model's shape.
`--offline` adds the way without a server: Hugging Face's forward, one prompt at a time, and a
torch.save each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import record
from eagle3.config import Config, TargetConfig
from eagle3.manifest import Manifest, write_json
from eagle3.serving.client import in_order
from eagle3.serving.server import Launch, Server, launch
from eagle3.store import codecs
from eagle3.store.sample import Encoded
from eagle3.store.writer import KIND, StoreWriter
from eagle3.target import Target
from extract_figures import Round, Row, disk_mb_s, row_of
from extraction.capture import extractor, server_args
from extraction.samples import TokenSample
from extraction.spool import Spool, environment
from random_store import SHAPES


def random_target(folder: Path, shape: dict[str, Any], tokenizer: Path) -> Path:
    """A Llama of random bf16 weights and some tokenizer's files, on disk."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False))
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder, max_shard_size="4GB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    return folder


def prompts(target: Target, tokens: int, shortest: int, longest: int) -> list[TokenSample]:
    """Random documents of ragged lengths, about `tokens` in all; the second half is answer."""
    samples: list[TokenSample] = []
    rng, taken = random.Random(0), 0
    while taken < tokens:
        length = rng.randint(shortest, longest)
        ids = [rng.randrange(3, target.vocab_size) for _ in range(length)]
        mask = [0] * (length // 2) + [1] * (length - length // 2)
        samples.append(TokenSample.of(str(len(samples)), ids, mask))
        taken += length
    return samples


def plain(server: Server, samples: list[TokenSample], concurrency: int) -> float:
    """Tokens per second of prefilling, nothing captured."""

    def work(sample: TokenSample) -> None:
        sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
        server.client.generate(sample.input_ids.tolist(), sampling)

    start = time.perf_counter()
    for _ in in_order(work, samples, concurrency):
        pass
    return sum(len(s.input_ids) for s in samples) / (time.perf_counter() - start)


def captured(
    config: Config, target: Target, layers: list[int], codec: str, samples: list[TokenSample]
) -> tuple[float, float, int]:
    """Capture into a store: seconds to the last capture, from there to the end, and its bytes."""
    with (
        tempfile.TemporaryDirectory(dir=config.runs_dir) as folder,
        extractor(config, target, layers, codecs.get(codec), longest=1) as servers,
    ):
        torch.set_num_threads(1)  # as the extract command does
        manifest = Manifest(kind=KIND, match={"codec": codec})
        writer = StoreWriter(Path(folder) / "store", manifest, config.extract.shard_bytes)

        def work(number: int) -> Encoded:
            found = servers.capture(number, samples[number])
            assert isinstance(found, Encoded), found
            _ = found.sha256
            return found

        size, start = 0, time.perf_counter()
        arrived = start
        for number, sample in enumerate(in_order(work, range(len(samples)), servers.workers)):
            arrived = time.perf_counter()
            size += sample.nbytes
            writer.append(number, sample)
        writer.finish({})
        return arrived - start, time.perf_counter() - arrived, size


@torch.no_grad()
def offline(target: Target, layers: list[int], samples: list[TokenSample], folder: Path) -> float:
    """Tokens per second of Hugging Face's forward and a torch.save for each prompt."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(target.folder, dtype=dtype).eval().to(device)

    def forward(sample: TokenSample) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(sample.input_ids).long().to(device)[None]
        states = model(ids, output_hidden_states=True, logits_to_keep=1).hidden_states
        aux = torch.cat([states[k][0] for k in layers], dim=-1)
        return {"aux": aux.cpu(), "final": states[-1][0].cpu()}

    forward(samples[0])
    start = time.perf_counter()
    for number, sample in enumerate(samples):
        torch.save(forward(sample), folder / f"{number % 64}.pt")
    return sum(len(s.input_ids) for s in samples) / (time.perf_counter() - start)


@contextlib.contextmanager
def both(args: dict[str, Any], target: Target, layers: list[int]) -> Iterator[tuple[Any, ...]]:
    """A plain and a capturing server of the same target, and the latter's spool."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        spool = Spool.create(Path(scratch) / "spool")
        args = {**args, **server_args()}
        plain = Launch(model=target.folder, log=Path(scratch) / "plain.log", args=args)
        capture = Launch(
            model=target.folder,
            log=Path(scratch) / "capture.log",
            args=args,
            env=environment(spool.folder, layers),
            plugins=["eagle3_capture"],
        )
        with launch(plain, capture) as (bare, capturing):
            yield bare, capturing, spool


def gpu_gib() -> float | None:
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="target, or the tokenizer's files with --shape")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--layers", type=int, nargs="+", help="default: 2, n / 2, n - 3")
    parser.add_argument("--codecs", nargs="+", default=["bf16", "fp8", "int6", "int4"])
    parser.add_argument("--tokens", type=int, default=200_000, help="of one round")
    parser.add_argument("--lengths", type=int, nargs=2, default=(200, 2000))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--server", default="{}", help="more SGLang arguments, as JSON")
    parser.add_argument("--offline", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.model
        if arguments.shape:
            shape = SHAPES[arguments.shape]
            folder = random_target(Path(scratch) / arguments.shape, shape, arguments.model)
        target = Target(folder=folder)
        layers = target.aux_layers(arguments.layers)
        samples = prompts(target, arguments.tokens, *arguments.lengths)
        config = Config(
            run_name="bench",
            runs_dir=scratch,
            target=TargetConfig(path=str(folder)),
        )
        config.extract.concurrency = arguments.concurrency
        table: list[Row] = []
        disk = disk_mb_s(Path(scratch))
        with both(json.loads(arguments.server), target, layers) as (bare, capturing, spool):
            config.server.urls = [capturing.url]
            config.extract.spools = [str(spool.folder)]
            plain(bare, samples[:8], 8), plain(capturing, samples[:8], 8)  # warm both up
            sys.stdout.write("both servers are warm\n")
            sys.stdout.flush()
            for codec in arguments.codecs:
                rounds: list[Round] = []
                for _ in range(arguments.rounds):
                    speed = plain(bare, samples, arguments.concurrency)
                    captured_s, finish_s, size = captured(config, target, layers, codec, samples)
                    rounds.append(
                        Round(
                            tokens=sum(len(s.input_ids) for s in samples),
                            plain_tok_s=speed,
                            captured_s=captured_s,
                            finish_s=finish_s,
                            size=size,
                        )
                    )
                table.append(row_of(codec, rounds, disk, gpu_gib()))
                sys.stdout.write(json.dumps(asdict(table[-1])) + "\n")
                sys.stdout.flush()
                save(arguments, target, samples, table, {})
        if arguments.offline:
            speed = offline(target, layers, samples, Path(scratch))
            sys.stdout.write(f"offline forward and torch.save: {speed:.0f} tok/s\n")
            save(arguments, target, samples, table, {"offline_tok_s": speed})


def save(
    arguments: argparse.Namespace,
    target: Target,
    samples: list[TokenSample],
    table: list[Row],
    more: dict[str, Any],
) -> None:
    """Write the rows, each with what it takes to measure it again."""
    facts = {
        "target": arguments.shape or arguments.model.name,
        "hidden_size": target.hidden_size,
        "tokens": sum(len(s.input_ids) for s in samples),
        "lengths": list(arguments.lengths),
        "concurrency": arguments.concurrency,
        "rounds": arguments.rounds,
        **record.facts(),
    }
    write_json(arguments.out, [asdict(row) | more | facts for row in table])


if __name__ == "__main__":
    main()
