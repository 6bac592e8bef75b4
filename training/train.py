"""Train a drafter on a store: `python -m training.train experiment=<name>`.

Several ranks: `torchrun --nproc-per-node N -m training.train experiment=<name>`. Nothing here
contacts a server. An interrupted run resumes from its last checkpoint with the same samples,
learning rates and weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch

from eagle3 import logging as console
from eagle3.batch import Batch
from eagle3.config import Config, command
from eagle3.errors import UserError
from eagle3.manifest import Manifest
from eagle3.metrics import JsonLines, Metrics, Tracker, Wandb
from eagle3.target import Target
from eagle3.ttt import supervised_rows
from training import checkpoint, optimizer, schedule
from training import engine as engines
from training.data import BatchPlan, Split, prefetch
from training.engine import World
from training.evaluate import summary, validate
from training.model import build_model, draft_vocab, init_identity, open_store
from training.schedule import learning_rate
from training.weights import for_evaluation

log = logging.getLogger(__name__)
KIND = "checkpoints"


class Trainer:
    """One run: its data, engine and metrics."""

    def __init__(self, config: Config, world: World) -> None:
        schedule.check(config.optimizer)
        optimizer.check(config)
        self.config, self.world = config, world
        self.root = config.checkpoints_dir
        target = Target.from_config(config.target)
        self.reader = open_store(config, target)
        self.split = Split.make(len(self.reader), config.train.validation_ratio, config.seed)
        self.plan = BatchPlan(
            lengths=self.reader.lengths,
            numbers=self.split.train,
            tokens_per_batch=config.train.tokens_per_batch,
            seed=config.seed,
        )
        self.num_steps = self._num_steps()
        self.vocab, self.coverage = draft_vocab(config, self.reader, self.split.train)
        log.info(
            "%d training and %d validation samples, %d steps; draft vocabulary %d covers %.2f%%",
            len(self.split.train), len(self.split.validation), self.num_steps, self.vocab.size,
            100 * self.coverage,
        )  # fmt: skip
        self.manifest = self._manifest(target)
        self.resumed = self._resume_point()
        model = build_model(config, target, self.vocab)
        if self.resumed is not None:
            checkpoint.load_weights(model.drafter, self.resumed)
        self.dtype = torch.bfloat16 if engines.uses_bf16(config) else torch.float32
        self.engine = engines.initialize(model, config, world)
        self.step = 0
        if self.resumed is not None:
            checkpoint.load_optimizer(self.engine, self.resumed)
            self.step = checkpoint.load_state(self.resumed)["step"]
            log.info("resuming after step %d", self.step)
        self.metrics = self._metrics()

    def run(self) -> None:
        """Train to the last step; validate, log and save on the way."""
        train = self.config.train
        batches = prefetch(
            self.reader, self._my_batches(self.step), self.world.device, self.dtype, mask=train.mask
        )
        last = checkpoint.load_state(self.resumed) if self.resumed else {}
        with console.progress("train") as bar:
            task = bar.add_task("", total=self.num_steps, completed=self.step, note="")
            started, seen, waited = time.perf_counter(), 0, 0.0
            while self.step < self.num_steps:
                before = time.perf_counter()
                window = [next(batches) for _ in range(train.accumulation)]
                waited += time.perf_counter() - before
                due = (self.step + 1) % train.log_every == 0 or self.step + 1 == self.num_steps
                totals = self._optimizer_step(window, score=due)
                self.step += 1
                seen += sum(batch.num_rows for batch in window)
                bar.update(task, advance=1)
                if due:
                    elapsed = time.perf_counter() - started
                    values = self._logged(totals, seen, elapsed, waited)
                    bar.update(task, note=f"loss {values['train/loss']:.3f}")
                    self.metrics.log(self.step, values)
                    started, seen, waited = time.perf_counter(), 0, 0.0
                at_end = self.step == self.num_steps
                if self.split.validation and (at_end or self.step % train.validate_every == 0):
                    last = self._validate()
                    started, seen, waited = time.perf_counter(), 0, 0.0
                if at_end or self.step % train.save_every == 0:
                    state = {"step": self.step, **{k: v for k, v in last.items() if k != "step"}}
                    checkpoint.save(
                        self.engine, self.root, state, train.keep_checkpoints, self.world.rank
                    )
        batches.close()  # type: ignore[attr-defined]
        if self.world.rank == 0:
            self.manifest.facts |= {"complete": True, "steps": self.step, "last": last}
            self.manifest.save(self.root)
        self.metrics.close()
        log.info("trained %d steps into %s; %s", self.step, self.root, last)

    def _optimizer_step(self, window: list[Batch], score: bool) -> torch.Tensor:
        """One step over a window of micro-batches; returns summed [loss, rows, accepted] [3, K].

        Step k's loss is the mean over all rows it supervises in the window, on every rank:
        DeepSpeed averages gradients over ranks and micro-batches, so the sums are scaled back up by
        both.
        """
        num_ttt = self.config.train.ttt_steps
        counts = self.world.sum(sum(supervised_rows(b, num_ttt) for b in window).double())
        scale = (self.world.size * len(window) / counts.clamp(min=1)).float()
        totals = torch.zeros(3, num_ttt, dtype=torch.float64, device=self.world.device)
        engines.set_learning_rate(
            self.engine.optimizer, learning_rate(self.step, self.num_steps, self.config.optimizer)
        )
        for batch in window:
            output = self.engine(batch, scale, score)
            self.engine.backward(output.loss)
            self.engine.step()
            totals[0] += output.step_loss
            totals[1] += output.rows
            if output.accepted is not None:
                totals[2] += output.accepted
        if not torch.isfinite(totals[0]).all():
            raise RuntimeError(f"the loss is not finite at step {self.step}: {totals[0].tolist()}")
        return totals

    def _logged(
        self, totals: torch.Tensor, rows_seen: int, elapsed_s: float, waited_s: float
    ) -> dict[str, Any]:
        seen = torch.tensor([rows_seen], dtype=torch.float64, device=self.world.device)
        step_loss, rows, accepted = self.world.sum(totals.clone())
        tokens = self.world.sum(seen).item()
        values = summary("train", step_loss, rows, accepted)
        values |= {
            "train/lr": learning_rate(self.step - 1, self.num_steps, self.config.optimizer),
            "train/tokens_per_s": tokens / elapsed_s,
            "train/data_wait": waited_s / elapsed_s,
            "train/memory_gb": self._memory_gb(),
        }
        if (norm := self.engine.get_global_grad_norm()) is not None:
            values["train/grad_norm"] = float(norm)
        return values

    def _validate(self) -> dict[str, Any]:
        train = self.config.train
        with for_evaluation(self.engine, ema=train.ema is not None) as model:
            values = validate(
                model, self.reader, self.split.validation, train.tokens_per_batch, train.ttt_steps,
                self.world, self.dtype,
            )  # fmt: skip
        self.metrics.log(self.step, values)
        log.info("step %d: %s", self.step, {k: round(v, 4) for k, v in values.items()})
        return {k.removeprefix("validation/"): v for k, v in values.items()}

    def _my_batches(self, step: int) -> Iterator[list[int]]:
        """This rank's micro-batches from optimizer step `step` on."""
        per_step = self.config.train.accumulation * self.world.size
        for index in range(step * per_step, self.num_steps * per_step):
            if index % self.world.size == self.world.rank:
                yield self.plan.micro_batch(index)

    def _num_steps(self) -> int:
        train = self.config.train
        if (train.max_steps is None) == (train.epochs is None):
            raise UserError("set exactly one of train.max_steps and train.epochs")
        if train.max_steps is not None:
            return train.max_steps
        per_step = train.accumulation * self.world.size
        return -(-self.plan.num_batches(train.epochs or 0.0) // per_step)

    def _manifest(self, target: Target) -> Manifest:
        config = self.config
        return Manifest(
            kind=KIND,
            match={
                "store": self.reader.manifest.hash(),
                "target": target.identity(),
                "aux_layers": self.reader.manifest.match["aux_layers"],
                "seed": config.seed,
                "draft": asdict(config.draft),
                "optimizer": asdict(config.optimizer),
                "init_from": init_identity(config),
                "ttt_steps": config.train.ttt_steps,
                "loss": config.train.loss,
                "mask": config.train.mask,
                "fp8": config.train.fp8,
                "step_decay": config.train.step_decay,
                "ema": config.train.ema,
                "tokens_per_batch": config.train.tokens_per_batch,
                "micro_batches_per_step": config.train.accumulation * self.world.size,
                "num_steps": self.num_steps,
            },
            config=config.resolved(),
            facts={"coverage": self.coverage, "validation_samples": self.split.validation},
        )

    def _resume_point(self) -> Path | None:
        """The checkpoint to go on from, after checking that it belongs to this configuration."""
        found = checkpoint.folders(self.root)
        if found and not self.config.train.resume:
            raise UserError(f"{self.root} holds checkpoints and train.resume is false")
        remedy = "Resume with the same configuration, or choose another run_name or train_dir."
        if not self.manifest.resumes(self.root, f"{self.root}", remedy) and self.world.rank == 0:
            self.manifest.save(self.root)
        return found[-1] if found else None

    def _metrics(self) -> Metrics:
        if self.world.rank != 0:
            return Metrics([])
        logger = self.config.logger
        trackers: list[Tracker] = [JsonLines(self.root / "metrics.jsonl", self.step)]
        if logger.wandb:
            trackers.append(
                Wandb(
                    self.root,
                    project=logger.project,
                    group=logger.group or self.config.run_name,
                    name=f"{self.config.run_name}-{self.root.name}",
                    mode=logger.mode,
                    config=self.config.resolved(),
                )
            )
        return Metrics(trackers)

    def _memory_gb(self) -> float:
        """Peak GPU memory, or resident memory of this process without a GPU."""
        if self.world.device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 1e9
        return psutil.Process().memory_info().rss / 1e9


@command("train")
def main(config: Config) -> None:
    Trainer(config, World.join()).run()


if __name__ == "__main__":
    main()
