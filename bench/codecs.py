"""What a codec costs in acceptance.

    python bench/codecs.py runs/ci/store --out bench/results/codecs.json

Re-encodes a float32 store with every codec, measures size, speed and error, and trains the
experiment on each with the same seeds (a seed fixes split, order and initial weights, so runs are
compared in pairs). Intervals are of the mean over seeds (Student's t).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import record
from eagle3.batch import needed_final
from eagle3.manifest import Manifest, write_json
from eagle3.store import budget
from eagle3.store.codecs import CODECS, get
from eagle3.store.reader import StoreReader
from eagle3.store.sample import Sample
from eagle3.store.writer import StoreWriter
from intervals import interval

KIMI_HIDDEN, KIMI_AUX = 7168, 3


@dataclass(kw_only=True, slots=True)
class Encoded:
    """Size, error and speed of a re-encoded store."""

    bytes_per_token: float
    final_share: float
    relative_error: float
    encode_mb_s: float
    decode_mb_s: float


def reencode(source: StoreReader, folder: Path, name: str) -> Encoded:
    """Write the store again with another codec; speeds are of the float32 bytes, on one thread."""
    match = {**source.manifest.match, "codec": name}
    writer = StoreWriter(folder, Manifest(kind="store", match=match), 1 << 30)
    codec = writer.codec
    rows = finals = stored = plain = 0
    error = norm = encode_s = decode_s = 0.0
    for number in range(len(source)):
        ids, mask = source.tokens(number)
        aux, final = source.states(number)
        whole = torch.zeros(len(ids), final.shape[1])
        whole[needed_final(mask)] = final
        sample = Sample(
            id=source.ids[number], input_ids=ids, loss_mask=mask, aux=aux, final=whole,
            weight=float(source.weights[number]),
        )  # fmt: skip
        kept = sample.encode(codec)
        writer.append(number, kept)
        start = time.perf_counter()
        encoded = codec.encode(aux=aux)
        middle = time.perf_counter()
        decoded = codec.decode("aux", encoded).float()
        decode_s += time.perf_counter() - middle
        encode_s += middle - start
        error += float((decoded - aux).square().sum())
        norm += float(aux.square().sum())
        rows, finals, plain = rows + len(ids), finals + len(final), plain + aux.nbytes
        stored += kept.nbytes
    writer.finish({})
    return Encoded(
        bytes_per_token=stored / rows,
        final_share=finals / rows,
        relative_error=(error / norm) ** 0.5,
        encode_mb_s=plain / encode_s / 1e6,
        decode_mb_s=plain / decode_s / 1e6,
    )


def train(runs: Path, experiment: str, seed: int) -> float:
    """Validation step-0 acceptance of the experiment trained on the store under `runs`."""
    folder = runs / f"seed{seed}"
    command = [sys.executable, "-m", "training.train", f"experiment={experiment}", "logger=jsonl"]
    command += [f"runs_dir={runs}", "run_name=codec", f"train_dir={folder}", f"seed={seed}"]
    subprocess.run(command, check=True, capture_output=True)
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    return [x for x in lines if "validation/acceptance_0" in x][-1]["validation/acceptance_0"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("--experiment", default="ci")
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), help="besides bf16")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    source = StoreReader(arguments.store)
    table: list[dict[str, Any]] = []
    scores: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for codec in ("bf16", *(c for c in arguments.codecs if c != "bf16")):
            runs = Path(scratch) / codec
            encoded = reencode(source, runs / "codec" / "store", codec)
            scores[codec] = [train(runs, arguments.experiment, s) for s in range(arguments.seeds)]
            pairs = zip(scores[codec], scores["bf16"], strict=True)
            deltas = [a - b for a, b in pairs]
            row, final_row = get(codec).bytes_per_row(KIMI_AUX, KIMI_HIDDEN)
            kimi = row + encoded.final_share * final_row + budget.TOKEN_BYTES
            table.append(
                {
                    "codec": codec,
                    "bytes_per_token": encoded.bytes_per_token,
                    "bytes_per_token_kimi": kimi,
                    "final_share": encoded.final_share,
                    "relative_error": encoded.relative_error,
                    "encode_mb_s": encoded.encode_mb_s,
                    "decode_mb_s": encoded.decode_mb_s,
                    "step0_acceptance": statistics.mean(scores[codec]),
                    "ci95": interval(scores[codec]),
                    "delta_vs_bf16": statistics.mean(deltas),
                    "delta_ci95": interval(deltas) if codec != "bf16" else [0.0, 0.0],
                    "seeds": arguments.seeds,
                    "experiment": arguments.experiment,
                    **record.facts(),
                }
            )
            sys.stdout.write(json.dumps({k: table[-1][k] for k in list(table[-1])[:11]}) + "\n")
            sys.stdout.flush()
            write_json(arguments.out, table)


if __name__ == "__main__":
    main()
