"""What each choice of the training recipe is worth, one change at a time.

    python bench/ablation.py runs/ci/store --out bench/results/ablation.json

Trains the experiment on one store with several seeds for each row of ROWS. A seed fixes split,
order and initial weights, so a row is compared with the first, the experiment as it is, in pairs.
The measure is acceptance at every position of held-out answers, the drafts of a chain of three,
in float32, the same for all rows (`held_out` in runs.py). speculators trains on the same samples
with its own defaults (peer_training.py) but our batch size, for as many tokens.

A row that the result file already holds for the same store and composed configuration is not
trained again: to add one, put it in ROWS and run the command again; to redo one, name it with
--redo.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import record
from eagle3 import provenance
from eagle3.drafter import Drafter
from eagle3.export import load_sglang
from eagle3.manifest import Manifest, write_json
from eagle3.store.writer import KIND
from eagle3.target import Target
from intervals import interval
from peer_training import PeerTraining, recipe_of
from rounded import round_products
from runs import compose, held_out, planned_tokens, run_folder
from training.data import Split
from training.export import export
from training.model import draft_vocab, open_store
from training.train import Trainer
from training.world import World, group_left_at_end

CHAIN = 3


@dataclass(kw_only=True, frozen=True, slots=True)
class Row:
    """A recipe: the experiment with overrides, or with another start of lm_head, or a peer's."""

    overrides: tuple[str, ...] = ()
    start: Callable[[Drafter], None] | None = None
    peer: str | None = None


def random_head(drafter: Drafter) -> None:
    nn.init.normal_(drafter.lm_head.weight, std=drafter.config.hidden_size**-0.5)


def frozen_head(drafter: Drafter) -> None:
    drafter.lm_head.weight.requires_grad_(False)


NORMS = ("draft.norm_before_fc=true", "draft.norm_output=true")
"""What speculators' trainer defaults to."""

MUON = ("optimizer=muon", "optimizer.lr=0.01")

ROWS = {
    "defaults": Row(),
    "norm_output": Row(overrides=("draft.norm_output=true",)),
    "lm_head: random start": Row(start=random_head),
    "lm_head: frozen": Row(start=frozen_head),
    "loss tv": Row(overrides=("train.loss=tv",)),
    "loss log_acceptance": Row(overrides=("train.loss=log_acceptance",)),
    "loss hard_ce": Row(overrides=("train.loss=hard_ce",)),
    "norm_before_fc": Row(overrides=("draft.norm_before_fc=true",)),
    "fc_norm": Row(overrides=("draft.fc_norm=true",)),
    "step_decay 1.0": Row(overrides=("train.step_decay=1.0",)),
    "weight decay 0": Row(overrides=("optimizer.weight_decay=0",)),
    "norm_before_fc, norm_output": Row(overrides=NORMS),
    "1 TTT step": Row(overrides=("train.ttt_steps=1",)),
    "5 TTT steps": Row(overrides=("train.ttt_steps=5",)),
    "step_decay 0.6": Row(overrides=("train.step_decay=0.6",)),
    "lr doubled": Row(overrides=("optimizer.lr=0.004",)),
    "norm_before_fc, norm_output, lr doubled": Row(overrides=(*NORMS, "optimizer.lr=0.004")),
    "norm_before_fc, norm_output, lr x 4": Row(overrides=(*NORMS, "optimizer.lr=0.008")),
    "muon 0.01": Row(overrides=MUON),
    "norm_before_fc, norm_output, muon 0.01": Row(overrides=(*NORMS, *MUON)),
    "fp8, by its definition": Row(start=round_products),
    "speculators, its defaults": Row(peer="speculators"),
    "speculators, lr 0.02": Row(peer="speculators:lr=0.02"),
}
"""The first is what the others are compared with."""


@contextmanager
def started_by(start: Callable[[Drafter], None] | None) -> Iterator[None]:
    """Fresh drafters get `start` applied: there is no switch for what only this file varies."""
    fresh = Drafter.fresh.__func__  # type: ignore[attr-defined]

    def changed(cls: type[Drafter], *arguments: Any) -> Drafter:
        drafter = fresh(cls, *arguments)
        if start is not None:
            start(drafter)
        return drafter

    Drafter.fresh = classmethod(changed)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Drafter.fresh = classmethod(fresh)  # type: ignore[assignment, method-assign]


def train(row: Row, overrides: list[str], seed: int, world: World) -> dict[str, Any]:
    """One training; its figures."""
    with tempfile.TemporaryDirectory() as folder:
        config = compose([*overrides, *row.overrides, f"seed={seed}", f"train_dir={folder}"])
        target = Target.from_config(config.target)
        reader = open_store(config, target)
        split = Split.of(reader, config.train.validation_ratio, seed)
        tokens = planned_tokens(config, reader, split)
        started = time.process_time()
        if row.peer is None:
            with started_by(row.start):
                Trainer(config, world).run()
                drafter, _ = load_sglang(export(config), target)
        else:
            vocab, _ = draft_vocab(config, reader, split.train)
            recipe = replace(recipe_of(row.peer), total_seq_len=config.train.tokens_per_batch)
            peer = PeerTraining(recipe, config, target, reader, split, vocab, world.device)
            peer.train(peer.num_steps(tokens))
            drafter, tokens = peer.peer.drafter(), peer.tokens
        seconds = time.process_time() - started
        gc.collect()  # an engine's parts refer to each other
        found = held_out(drafter, target, reader, split.validation, CHAIN, world.device)
    return {
        "seed": seed,
        "acceptance": found,
        "accept_length": 1 + sum(found),
        "tokens": tokens,
        "cpu_s": round(seconds, 1),
    }


def identity(row: Row, overrides: list[str], store: Path) -> str:
    """Hash of what the row trains on and of what its experiment composes to for a training."""
    composed = compose([*overrides, *row.overrides]).resolved()
    recipe = [composed[key] for key in ("target", "draft", "optimizer", "deepspeed", "train")]
    start = row.start.__name__ if row.start else None
    return provenance.hash_json([Manifest.load(store, KIND).hash(), recipe, start, row.peer])


def summary(runs: list[dict[str, Any]], base: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds with intervals, and the paired differences to `base`."""
    figures: dict[str, Any] = {}
    for name, of in (
        ("step0_acceptance", lambda run: run["acceptance"][0]),
        ("accept_length", lambda run: run["accept_length"]),
    ):
        values, others = [of(run) for run in runs], [of(run) for run in base]
        deltas = [a - b for a, b in zip(values, others, strict=True)]
        figures |= {
            name: statistics.mean(values),
            f"{name}_ci95": interval(values),
            f"delta_{name}": statistics.mean(deltas),
            f"delta_{name}_ci95": interval(deltas),
        }
    per_step = zip(*(run["acceptance"] for run in runs), strict=True)
    return {**figures, "acceptance_per_step": [statistics.mean(step) for step in per_step]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("--experiment", default="ci")
    parser.add_argument("--override", nargs="*", default=[], help="of every row")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--redo", nargs="*", default=[], choices=list(ROWS))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    setting = {
        "experiment": arguments.experiment,
        "overrides_of_all": arguments.override,
        "seeds": arguments.seeds,
    }
    found = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    world = World.join()
    base = next(iter(ROWS))
    with tempfile.TemporaryDirectory() as work:
        overrides = [f"experiment={arguments.experiment}", *arguments.override]
        overrides += run_folder(Path(work), "ablation", arguments.store)
        overrides += ["train.validate_every=1000000", "train.save_every=1000000"]
        overrides += ["export.speculators=false", "export.dtype=float32"]
        identities = {name: identity(row, overrides, arguments.store) for name, row in ROWS.items()}
        kept = {
            entry["row"]: entry
            for entry in found
            if entry["row"] in ROWS and entry["row"] not in arguments.redo
            and entry["seeds"] == arguments.seeds
            and entry.get("identity") == identities[entry["row"]]
        }  # fmt: skip
        for name in dict.fromkeys([base, *arguments.rows]):
            if name in kept:
                continue
            row = ROWS[name]
            runs = [train(row, overrides, seed, world) for seed in range(arguments.seeds)]
            compared = kept[base]["runs"] if name != base else runs
            kept[name] = {
                "row": name, "overrides": [*row.overrides], "peer": row.peer,
                **summary(runs, compared), "runs": runs, **setting,
                "identity": identities[name], **record.facts(),
            }  # fmt: skip
            if name == base:  # perhaps not the one that others were compared with
                for entry in kept.values():
                    entry |= summary(entry["runs"], runs)
            sys.stdout.write(json.dumps({k: kept[name][k] for k in list(kept[name])[:11]}) + "\n")
            sys.stdout.flush()
            write_json(arguments.out, [kept[n] for n in ROWS if n in kept])


if __name__ == "__main__":
    with group_left_at_end():
        main()
