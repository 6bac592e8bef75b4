"""Same data, same minutes: which trainer's drafter is accepted more?

    python bench/quality.py runs/smollm2_h200/store --experiment smollm2_h200 --seconds 300 \\
        --systems eagle3 speculators specforge --out FILE

Trains on one store, with one split and one draft vocabulary (those of our training of the given
configuration), each system with its own recipe:

    eagle3        our training command's Trainer, with the configuration's own settings
    speculators   its model, loss, optimizers and schedule (peer_training.py), as it ships them
    specforge     likewise

A setting is changed as `speculators:lr=0.002,ttt_steps=5`. Budgets, any of them:

    --seconds           wall-clock of the training loop, its start-up (compilation) included; the
                        process's own time on a CPU
    --training-seconds  the same without start-up
    --tokens            rows read

A learning-rate schedule needs its length beforehand, so for a budget in seconds each system first
runs `--probe` seconds on throw-away weights; from that come its seconds a step and its start-up,
which is reported and, where the budget includes it, charged. What would by that take longer than
`--limit` is reported and left out. Every drafter is exported for SGLang
and measured by `eval.offline` on held-out samples, and, in `teacher_forced`, at every position of
the held-out answers; `own_accuracy` is what the peer's own metric says there.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import eagle3
import record
from eagle3 import export as formats
from eagle3.config import Config
from eagle3.errors import UserError
from eagle3.manifest import Manifest, write_json
from eagle3.store.reader import StoreReader
from eagle3.target import Target
from eagle3.vocab import DraftVocab
from eval.offline import offline
from peer_training import PeerTraining, recipe_of
from peers import use_specforge
from runs import Clock, TimedTrainer, compose, groups_for, held_out, run_folder
from training.data import BatchPlan, Split
from training.export import DTYPES, export
from training.model import draft_vocab, open_store
from training.world import World, group_left_at_end


@dataclass(kw_only=True, slots=True)
class Trained:
    """A finished training, exported into the run folder of `config`."""

    config: Config
    steps: int
    tokens: int
    clock: Clock
    own_accuracy: list[float] | None = None


@dataclass(kw_only=True, slots=True)
class Course:
    """What all systems share: configuration, target, store, split and draft vocabulary."""

    overrides: list[str]
    config: Config
    target: Target
    reader: StoreReader
    split: Split
    vocab: DraftVocab
    world: World
    store: Path
    work: Path

    def folder(self, name: str) -> list[str]:
        """Overrides of the configuration for a run folder of that name."""
        return [*self.overrides, *run_folder(self.work, name, self.store)]

    @classmethod
    def of(cls, overrides: list[str], store: Path, work: Path) -> Course:
        world = World.join()  # first: it decides the number of threads
        config = compose([*overrides, *run_folder(work, "shared", store)])
        target = Target.from_config(config.target)
        reader = open_store(config, target)
        split = Split.of(reader, config.train.validation_ratio, config.seed)
        if not split.validation:
            raise UserError("train.validation_ratio=0 leaves nothing to measure on")
        vocab, _ = draft_vocab(config, reader, split.train)
        return cls(
            overrides=overrides, config=config, target=target, reader=reader, split=split,
            vocab=vocab, world=world, store=store, work=work,
        )  # fmt: skip


class Ours:
    """Our training of the configuration, for a number of steps instead of its own."""

    name, version = "eagle3", eagle3.__version__

    def __init__(self, course: Course) -> None:
        self.course = course
        train, optimizer = asdict(course.config.train), asdict(course.config.optimizer)
        kept = ("tokens_per_batch", "accumulation", "ttt_steps", "loss", "step_decay")
        self.settings = {**{k: train[k] for k in kept}, **optimizer}
        self.num_ttt = course.config.train.ttt_steps

    def steps_for(self, tokens: int) -> int:
        train, course = self.course.config.train, self.course
        plan = BatchPlan(
            lengths=course.reader.lengths, numbers=course.split.train,
            tokens_per_batch=train.tokens_per_batch, seed=course.config.seed,
        )  # fmt: skip
        return -(-groups_for(plan, None, tokens) // train.accumulation)

    def run(self, num_steps: int) -> Trained:
        config = self._config(num_steps, "run")
        trainer = TimedTrainer(config, self.course.world)
        trainer.run()
        export(config)
        count = num_steps * self.course.config.train.accumulation
        lengths, plan = self.course.reader.lengths, trainer.plan
        tokens = sum(int(lengths[plan.micro_batch(i)].sum()) for i in range(count))
        return Trained(config=config, steps=num_steps, tokens=tokens, clock=trainer.clock)

    def probe(self, seconds: float) -> Clock:
        trainer = TimedTrainer(self._config(1_000_000, "probe"), self.course.world)
        trainer.stop_after_s = seconds
        trainer.run()
        return trainer.clock

    def _config(self, num_steps: int, name: str) -> Config:
        folder = self.course.work / self.name / name
        shutil.rmtree(folder, ignore_errors=True)
        own = ["train.epochs=null", f"train.max_steps={num_steps}", f"train_dir={folder}"]
        rare = [f"train.{what}_every=1000000000" for what in ("validate", "save", "log")]
        return compose([*self.course.folder(self.name), *own, *rare, "export.speculators=false"])


class Theirs:
    """A peer's training with one recipe."""

    def __init__(self, course: Course, text: str) -> None:
        self.course, self.recipe = course, recipe_of(text)
        fresh = self._training()
        self.name, self.version = fresh.peer.name, fresh.peer.version
        self.settings = {**asdict(self.recipe), "attention": fresh.peer.attention}
        self.num_ttt = fresh.num_ttt

    def steps_for(self, tokens: int) -> int:
        return self._training().num_steps(tokens)

    def run(self, num_steps: int) -> Trained:
        training = self._training().train(num_steps)
        return Trained(
            config=self._export(training), steps=num_steps, tokens=training.tokens,
            clock=training.clock, own_accuracy=training.own_accuracy(self.course.split.validation),
        )  # fmt: skip

    def probe(self, seconds: float) -> Clock:
        return self._training().train(1_000_000, until_s=seconds).clock

    def _export(self, training: PeerTraining) -> Config:
        """Write its drafter as SGLang serves it, in our export's dtype."""
        course, name = self.course, self.name.lower()
        config = compose(course.folder(name))
        aux_layers = course.reader.manifest.match["aux_layers"]
        manifest = Manifest(
            kind=formats.KIND,
            match={"target": course.target.identity(), "aux_layers": aux_layers},
            config=config.resolved(),
            inputs={"store": course.reader.manifest.hash()},
            facts={"trained_by": f"{name} {self.version}"},
        )
        formats.save_sglang(
            training.peer.drafter(), config.drafter_dir, course.target, aux_layers,
            DTYPES[config.export.dtype], manifest,
        )  # fmt: skip
        return config

    def _training(self) -> PeerTraining:
        course = self.course
        return PeerTraining(
            self.recipe, course.config, course.target, course.reader, course.split, course.vocab,
            course.world.device,
        )  # fmt: skip


def measure(course: Course, trained: Trained, samples: int | None) -> dict[str, Any]:
    """Acceptance of what was exported, step by step on `samples`, and at every position of all."""
    config, numbers = trained.config, course.split.validation
    manifest = Manifest.load(config.drafter_dir, formats.KIND)
    manifest.facts["validation_samples"] = numbers[:samples]
    manifest.save(config.drafter_dir)
    found = offline(config)
    drafter, _ = formats.load_sglang(config.drafter_dir, course.target)
    chain = config.eval.num_steps
    everywhere = held_out(
        drafter, course.target, course.reader, numbers, chain, course.world.device
    )
    own = trained.own_accuracy
    return {
        "accept_length": found["accept_length"],
        "accept_length_ci95": found["accept_length_ci95"],
        "acceptance_per_step": found["marginal"],
        "step0_ci95": found["step0_ci95"],
        "offline_samples": found["samples"],
        "chain": chain,
        "teacher_forced": {
            "accept_length": 1 + sum(everywhere),
            "acceptance_per_step": everywhere,
        },
        "own_accuracy": own[:chain] if own else None,
    }


def steps_of(system: Ours | Theirs, budget: dict[str, float], clock: Clock) -> int:
    """Optimizer steps that a budget pays for; 0 if start-up uses it up."""
    if "tokens" in budget:
        return system.steps_for(int(budget["tokens"]))
    if "seconds" in budget:
        return max(0, int((budget["seconds"] - clock.start_up_s()) / clock.steady_s()))
    return max(1, int(budget["training_seconds"] / clock.steady_s()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("--experiment", required=True)
    parser.add_argument("--override", nargs="*", default=[], help="of the experiment")
    parser.add_argument("--systems", nargs="+", default=["eagle3", "speculators"])
    parser.add_argument("--seconds", type=float, nargs="*", default=[])
    parser.add_argument("--training-seconds", type=float, nargs="*", default=[])
    parser.add_argument("--tokens", type=int, nargs="*", default=[])
    parser.add_argument("--probe", type=float, default=10.0, help="seconds")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds of one training")
    parser.add_argument("--offline-samples", type=int, help="held-out samples for eval.offline")
    parser.add_argument("--specforge-path", type=Path, help="folder of an unpacked wheel")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    use_specforge(arguments.specforge_path)
    budgets: list[dict[str, float]] = [
        {name: value}
        for name in ("tokens", "seconds", "training_seconds")
        for value in getattr(arguments, name)
    ]
    if not budgets:
        raise UserError("give at least one of --seconds, --training-seconds, --tokens")
    overrides = [f"experiment={arguments.experiment}", *arguments.override]
    facts = record.facts()
    entries: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        course = Course.of(overrides, arguments.store, Path(work))
        for text in arguments.systems:
            system = Ours(course) if text == "eagle3" else Theirs(course, text)
            clock = system.probe(arguments.probe)
            for budget in budgets:
                steps = steps_of(system, budget, clock)
                entry = {
                    "system": text, "version": system.version, "budget": budget, "steps": steps,
                    "first_step_s": round(clock.ends[0], 2),
                    "start_up_s": round(clock.start_up_s(), 2),
                }  # fmt: skip
                expected = steps * clock.steady_s()
                if steps == 0:
                    entry["error"] = "start-up alone takes longer than the budget"
                elif expected > arguments.limit:
                    entry["error"] = f"would take {expected:.0f} s by the probe"
                else:
                    trained = system.run(steps)
                    loop_s = trained.clock.ends[-1]
                    charged = clock.start_up_s() if "seconds" in budget else 0.0
                    entry |= {
                        "tokens": trained.tokens, "seconds": round(loop_s + charged, 2),
                        "tok_s": round(trained.tokens / loop_s, 1), "ttt_steps": system.num_ttt,
                        **measure(course, trained, arguments.offline_samples),
                    }  # fmt: skip
                entries.append({**entry, "settings": system.settings,
                                "overrides": overrides, **facts})  # fmt: skip
                write_json(arguments.out, entries)
                shown = {k: v for k, v in entry.items() if not isinstance(v, dict) or k == "budget"}
                sys.stdout.write(f"{shown}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    with group_left_at_end():
        try:
            main()
        except UserError as error:
            sys.stderr.write(f"error: {error}\n")
            raise SystemExit(2) from None
