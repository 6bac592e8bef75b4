"""Train a drafter on a store: `python -m training.train experiment=<name>`.

Several ranks: `torchrun --nproc-per-node N -m training.train experiment=<name>`. Nothing here
contacts a server. An interrupted run resumes from its last checkpoint with the same samples,
learning rates and weights.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Generator, Iterator
from contextlib import closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from eagle3 import logging as console
from eagle3.command import command
from eagle3.config import Config
from eagle3.errors import UserError
from eagle3.flops import useful_flops
from eagle3.lock import exclusive
from eagle3.manifest import Manifest
from eagle3.metrics import JsonLines, Metrics, Tracker, Wandb
from eagle3.target import Target
from eagle3.ttt import supervised_weight
from training import checkpoint, optimizer, schedule
from training import engine as engines
from training.data import BatchPlan, Loaded, Split, prefetch
from training.deepspeed_settings import deepspeed_config, uses_bf16
from training.evaluate import simulate, summary, validate
from training.finite import all_finite, require
from training.meter import Meter, device_peak_tflops
from training.model import build_model, draft_vocab, init_identity, open_store
from training.schedule import learning_rate
from training.weights import for_evaluation
from training.world import World, group_left_at_end

log = logging.getLogger(__name__)
KIND = "checkpoints"


class Trainer:
    """One run: its data, engine and metrics."""

    def __init__(self, config: Config, world: World) -> None:
        schedule.check(config.optimizer)
        deepspeed_config(config)
        optimizer.check(config)
        self.config, self.world = config, world
        self.root = config.checkpoints_dir
        target = Target.from_config(config.target)
        self.reader = open_store(config, target)
        self.split = Split.of(self.reader, config.train.validation_ratio, config.seed)
        self.plan = BatchPlan(
            lengths=self.reader.lengths,
            numbers=self.split.train,
            tokens_per_batch=config.train.tokens_per_batch,
            seed=config.seed,
        )
        self.num_steps = self._num_steps()
        self.vocab, self.coverage = draft_vocab(config, self.reader, self.split.train)
        log.info(
            "%d training and %d validation samples (%d other answers to their prompts left out), "
            "%d steps; draft vocabulary %d covers %.2f%%",
            len(self.split.train), len(self.split.validation), len(self.split.left_out),
            self.num_steps, self.vocab.size, 100 * self.coverage,
        )  # fmt: skip
        self.manifest = self._manifest(target)
        self.resumed = self._resume_point()
        model = build_model(config, target, self.vocab)
        if self.resumed is not None:
            checkpoint.load_weights(model.drafter, self.resumed)
        self.dtype = torch.bfloat16 if uses_bf16(config) else torch.float32
        self.engine = engines.initialize(model, config, world)
        self.step = 0
        if self.resumed is not None:
            checkpoint.load_optimizer(self.engine, self.resumed)
            self.step = checkpoint.load_state(self.resumed)["step"]
            log.info("resuming after step %d", self.step)
        self.metrics = self._metrics()
        peak = device_peak_tflops(config.train.peak_tflops, world, uses_bf16(config))
        one_layer = model.drafter.config.num_layers == 1  # what `useful_flops` is for
        self.meter = Meter(world, peak if one_layer else None)

    def run(self) -> None:
        """Train to the last step; validate, log and save on the way."""
        train = self.config.train
        last = checkpoint.load_state(self.resumed) if self.resumed else {}
        with console.progress("train") as bar, closing(self._batches()) as batches:
            task = bar.add_task("", total=self.num_steps, completed=self.step, note="")
            self.meter.restart()
            while self.step < self.num_steps:
                window = self.meter.take(batches, train.accumulation)
                due = (self.step + 1) % train.log_every == 0 or self.step + 1 == self.num_steps
                totals = self._optimizer_step(window, score=due)
                self.step += 1
                bar.update(task, advance=1)
                if due:
                    values = self._logged(totals)
                    bar.update(task, note=f"loss {values['train/loss']:.3f}")
                    self.metrics.log(self.step, values)
                    self.meter.restart()
                at_end = self.step == self.num_steps
                state: dict[str, Any] = {"step": self.step}
                if self.split.validation and (at_end or self.step % train.validate_every == 0):
                    state |= self._validate()
                    self.meter.restart()
                if at_end or self.step % train.save_every == 0:
                    last = state
                    checkpoint.save(
                        self.engine, self.root, state, train.keep_checkpoints, self.world
                    )
                    self.meter.restart()
        if self.world.rank == 0:
            self.manifest.facts |= {"complete": True, "steps": self.step, "last": last}
            self.manifest.save(self.root)
        self.metrics.close()
        log.info("trained %d steps into %s; %s", self.step, self.root, last)

    def _optimizer_step(self, window: list[Loaded], score: bool) -> torch.Tensor:
        """One step over a window of micro-batches; returns summed [loss, rows, accepted] [3, K].

        Step k's loss is the weighted mean over all rows it supervises in the window, on every rank:
        DeepSpeed averages gradients over ranks and micro-batches, so the sums are scaled back up by
        both. The returned sums are without weights.
        """
        num_ttt = self.config.train.ttt_steps
        weights = [supervised_weight(x.batch, num_ttt) for x in window]
        weight = self.world.sum(torch.stack(weights).sum(dim=0))
        scale = (self.world.size * len(window) / weight.masked_fill(weight == 0, 1)).float()
        totals = torch.zeros(3, num_ttt, dtype=torch.float64, device=self.world.device)
        engines.set_learning_rate(
            self.engine.optimizer, learning_rate(self.step, self.num_steps, self.config.optimizer)
        )
        for index, loaded in enumerate(window):
            output = engines.forward(self.engine, loaded.batch, scale, score)
            self.engine.backward(output.loss)
            totals[0] += output.step_loss
            totals[1] += output.rows
            if output.accepted is not None:
                totals[2] += output.accepted
            if index + 1 == len(window):
                self._require_finite(window, totals[0])
            self.engine.step()
        return totals

    def _require_finite(self, window: list[Loaded], step_loss: torch.Tensor) -> None:
        """End on every rank, before the weights change, if something is not finite on any."""
        found = torch.isfinite(step_loss).all()
        for loaded in window:
            found &= all_finite(loaded)
        numbers = [n for loaded in window for n in loaded.numbers]
        require(found, numbers, self.reader, self.world, f"the loss of step {self.step + 1}")

    def _logged(self, totals: torch.Tensor) -> dict[str, Any]:
        values = summary("train", *self.world.sum(totals.clone()))
        values["train/lr"] = learning_rate(self.step - 1, self.num_steps, self.config.optimizer)
        values |= self.meter.values()
        if (norm := self.engine.get_global_grad_norm()) is not None:
            values["train/grad_norm"] = float(norm)
        return values

    def _validate(self) -> dict[str, Any]:
        train, held_out = self.config.train, self.split.validation
        with for_evaluation(self.engine, ema=train.ema is not None) as model:
            values = validate(
                model, self.reader, held_out, train.tokens_per_batch, train.ttt_steps, self.world,
                self.dtype,
            )  # fmt: skip
            if train.simulate_samples > 0:
                chosen = held_out[:: -(-len(held_out) // train.simulate_samples)]
                values |= simulate(
                    model, self.reader, chosen, self.config.eval.num_steps, self.world, self.dtype
                )
        self.metrics.log(self.step, values)
        log.info("step %d: %s", self.step, {k: round(v, 4) for k, v in values.items()})
        return {k.removeprefix("validation/"): v for k, v in values.items()}

    def _batches(self) -> Generator[Loaded, None, None]:
        """This rank's micro-batches from the next step on, read ahead."""
        count_flops = None
        if self.meter.peak_tflops is not None:
            shape, num_ttt = self.engine.module.model.drafter.config, self.config.train.ttt_steps
            count_flops = lambda batch: useful_flops(batch, shape, num_ttt)  # noqa: E731
        return prefetch(
            self.reader, self._my_batches(self.step), self.world.device, self.dtype, count_flops,
            mask=self.config.train.mask,
        )  # fmt: skip

    def _my_batches(self, step: int) -> Iterator[list[int]]:
        """This rank's micro-batches from optimizer step `step` on."""
        per_step = self.config.train.accumulation * self.world.size
        for index in range(step * per_step, self.num_steps * per_step):
            if index % self.world.size == self.world.rank:
                yield self.plan.micro_batch(index)

    def _num_steps(self) -> int:
        train = self.config.train
        if (train.max_steps is None) == (train.epochs is None):
            raise UserError(
                "set exactly one of train.max_steps and train.epochs, the other to null"
            )
        if train.max_steps is not None:
            return train.max_steps
        per_step = train.accumulation * self.world.size
        num_batches = self.plan.num_batches(train.epochs or 0.0)
        if num_batches == 0:
            raise UserError(f"train.epochs={train.epochs} is less than one batch: train longer")
        return -(-num_batches // per_step)

    def _manifest(self, target: Target) -> Manifest:
        config = self.config
        return Manifest(
            kind=KIND,
            match={
                "store": self.reader.manifest.hash(),
                "target": target.identity(),
                "aux_layers": self.reader.manifest.match["aux_layers"],
                "seed": config.seed,
                "validation_ratio": config.train.validation_ratio,
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
                "bf16": uses_bf16(config),
                "gradient_clipping": config.deepspeed.get("gradient_clipping", 0.0),
            },
            config=config.resolved(),
            facts={"coverage": self.coverage, **self.split.facts},
        )

    def _resume_point(self) -> Path | None:
        """The checkpoint to go on from, after checking that it belongs to this configuration."""
        found = checkpoint.folders(self.root)
        if found and not self.config.train.resume:
            raise UserError(f"{self.root} holds checkpoints and train.resume is false")
        remedy = "Resume with the same configuration, or choose another run_name or train_dir."
        if found and not Manifest.of_ours(self.root):
            raise UserError(
                f"{self.root} holds checkpoints and no manifest that says of what: put theirs back "
                "(manifest.json of the folder they are from), or choose another run_name or "
                "train_dir"
            )
        resumes = self.manifest.resumes(self.root, f"{self.root}", remedy, begun=bool(found))
        if resumes:
            self.split.require_same(Manifest.load(self.root, KIND).facts, self.root)
        elif self.world.rank == 0:
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
                    resume=self.resumed is not None,
                )
            )
        return Metrics(trackers)

    def close(self) -> None:
        """Let go of the engine: a sweep's next training, in the same process, needs its memory.

        DeepSpeed's hooks would keep it; with ZeRO 3 or a grad_accum_dtype something still does.
        Only after a whole run: it waits for the GPU, on which an error may have left work that
        never ends.
        """
        self.engine.destroy()
        del self.engine
        gc.collect()  # its parts refer to each other


@command("train")
def main(config: Config) -> None:
    world = World.join()
    config.checkpoints_dir.mkdir(parents=True, exist_ok=True)
    with exclusive(config.checkpoints_dir) if world.rank == 0 else nullcontext():
        trainer = Trainer(config, world)
        trainer.run()
        trainer.close()


if __name__ == "__main__":
    with group_left_at_end():
        main()
