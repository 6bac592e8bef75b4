"""Other trainers' training loops over our stores, with the settings they ship.

speculators 0.9: what `speculators train --speculator-type eagle3` does without arguments: Muon for
matrices and AdamW for the rest at 1e-3, linear decay after 1% warm-up, gradients clipped at 1, 3
TTT steps weighted equally, batches of 8,192 tokens, one norm before fc, normed states fed back,
frozen lm_head, float32 weights under bf16 autocast on a GPU. Its sliding window of 2,048 is left
out, and norm_before_residual is off: SGLang serves neither.

SpecForge 0.2: what its offline configuration defaults to: AdamW at 1e-4 over float32 masters,
cosine decay after 1.5% warm-up, gradients clipped at 0.5, 7 TTT steps weighted 0.8 ** k, one sample
a step, everything but the embeddings trained from random weights, bf16 weights on a GPU.

Both use their own optimizer, schedule, loss and model classes; the samples come from our reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from eagle3.config import Config
from eagle3.drafter import Drafter, DrafterConfig
from eagle3.errors import UserError
from eagle3.store.reader import StoreReader
from eagle3.target import Target
from eagle3.vocab import DraftVocab
from peers import SpecForge, Speculators, whole_blocks
from runs import Clock, ahead, groups_for, sample_groups
from training.data import BatchPlan, Split, pack


@dataclass(kw_only=True, frozen=True, slots=True)
class SpeculatorsRecipe:
    """Settings of speculators' trainer, under its own names."""

    optimizer: str = "muon"
    lr: float = 1e-3
    weight_decay: float = 0.01
    muon_momentum: float = 0.95
    muon_weight_decay: float = 0.1
    muon_ns_steps: int = 5
    muon_adjust_lr_fn: str = "match_rms_adamw"
    warmup_ratio: float = 0.01
    max_grad_norm: float = 1.0
    ttt_steps: int = 3
    ttt_step_loss_decay: float = 1.0
    total_seq_len: int = 8192
    norm_before_fc: bool = True
    norm_output: bool = True
    train_lm_head: bool = False


@dataclass(kw_only=True, frozen=True, slots=True)
class SpecForgeRecipe:
    """Settings of SpecForge's trainer, under its own names."""

    learning_rate: float = 1e-4
    weight_decay: float = 0.0
    warmup_ratio: float = 0.015
    max_grad_norm: float = 0.5
    ttt_length: int = 7
    ploss_decay: float = 0.8
    batch_size: int = 1


BOOLEANS = {"true": True, "false": False}
RECIPES = {"speculators": SpeculatorsRecipe, "specforge": SpecForgeRecipe}


def recipe_of(text: str) -> Any:
    """`name` or `name:key=value,key=value` -> a recipe.

    Raises:
        UserError: an unknown system, key or value.
    """
    name, _, rest = text.partition(":")
    if name not in RECIPES:
        raise UserError(f"{name} is not one of {sorted(RECIPES)}")
    recipe = RECIPES[name]()
    types = {f.name: type(getattr(recipe, f.name)) for f in fields(recipe)}
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        if key not in types:
            raise UserError(f"{name} has no setting {key}; it has {sorted(types)}")
        read: Any = BOOLEANS.__getitem__ if types[key] is bool else types[key]
        try:
            recipe = replace(recipe, **{key: read(value)})
        except (KeyError, ValueError):
            raise UserError(f"{name}:{item}: {key} takes a {types[key].__name__}") from None
    return recipe


@dataclass(kw_only=True, slots=True)
class Prepared:
    """A batch in a peer's form: the arguments of each forward."""

    parts: list[dict[str, Tensor]]
    num_rows: int

    def to(self, device: torch.device, dtype: torch.dtype) -> Prepared:
        moved = [
            {
                key: x.to(device, dtype if x.is_floating_point() else None, non_blocking=True)
                for key, x in part.items()
            }
            for part in self.parts
        ]
        return Prepared(parts=moved, num_rows=self.num_rows)


class PeerTraining:
    """One training of a peer, from its own initial weights of a seed.

    Args:
        config: our configuration, for the draft vocabulary's size, the seed and the dtype.
        reader, split, vocab: what our own training of that configuration uses.
    """

    def __init__(
        self, recipe: Any, config: Config, target: Target, reader: StoreReader, split: Split,
        vocab: DraftVocab, device: torch.device,
    ) -> None:  # fmt: skip
        self.recipe, self.reader, self.device = recipe, reader, device
        self.on_gpu = device.type == "cuda"
        lm_head = target.lm_head().float()
        norms = {"norm_before_fc": False, "fc_norm": False, "norm_output": False}
        packed = isinstance(recipe, SpeculatorsRecipe)
        if packed:
            norms |= {"norm_before_fc": recipe.norm_before_fc, "norm_output": recipe.norm_output}
        draft = {**asdict(config.draft), **norms}
        shape = DrafterConfig.for_target(
            target.config, len(reader.manifest.match["aux_layers"]),
            draft_vocab_size=draft.pop("vocab_size"), **draft,
        )  # fmt: skip
        torch.manual_seed(config.seed)
        drafter = Drafter.fresh(shape, vocab, target.embeddings().float(), lm_head).to(device)
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.rows: int | None = None
        if packed:
            self.peer: Any = Speculators(drafter, lm_head.to(device), own_start=True)
            self.peer.model.lm_head.weight.requires_grad_(recipe.train_lm_head)
            self.group, tokens = None, recipe.total_seq_len
            self.rows = whole_blocks(tokens)
            self.num_ttt, self.decay = recipe.ttt_steps, recipe.ttt_step_loss_decay
        else:
            head = lm_head.to(device, self.dtype)
            self.peer = SpecForge(
                drafter.to(self.dtype), head, own_start=True, batch_size=recipe.batch_size
            )
            self.group, tokens = recipe.batch_size, config.train.tokens_per_batch
            self.num_ttt, self.decay = recipe.ttt_length, recipe.ploss_decay
        self.plan = BatchPlan(
            lengths=reader.lengths, numbers=split.train, tokens_per_batch=tokens, seed=config.seed
        )
        self.clock = Clock()
        self.tokens = 0

    def num_steps(self, tokens: int) -> int:
        """Optimizer steps that read at least so many tokens."""
        return groups_for(self.plan, self.group, tokens)

    def train(self, num_steps: int, until_s: float | None = None) -> PeerTraining:
        """Run `num_steps` steps of a schedule of that length, or stop early after `until_s`."""
        step = self._speculators(num_steps) if self.rows else self._specforge(num_steps)
        for batch in self._prepared(islice(sample_groups(self.plan, self.group), num_steps)):
            if not self.clock.ends:
                self.clock.start()
            step(batch)
            self.tokens += batch.num_rows
            self.clock.tick()
            if self.clock.over(until_s):
                break
        return self

    def _prepared(self, groups: Iterable[list[int]]) -> Iterator[Prepared]:
        """Inputs made on a thread, as the peers' loaders make them in workers."""

        def make(numbers: list[int]) -> Prepared:
            batch = self.reader.batch(numbers)
            parts = self.peer.inputs(batch, self.rows if self.on_gpu else None)
            return Prepared(parts=parts, num_rows=batch.num_rows).to(self.device, self.dtype)

        return ahead(make, groups)

    def _losses(self, batch: Prepared) -> Iterator[Any]:
        """Loss and metrics of each forward of a batch."""
        for part in batch.parts:
            with torch.autocast(
                self.device.type, torch.bfloat16, enabled=self.on_gpu and self.rows is not None
            ):
                loss = self.peer.loss(part, self.num_ttt, self.decay)
            yield loss

    def _speculators(self, num_steps: int) -> Any:
        from speculators.train.optimizers import build_optimizers
        from speculators.train.trainer import TrainerConfig
        from transformers import get_linear_schedule_with_warmup

        recipe, model = self.recipe, self.peer.model
        settings = TrainerConfig(
            lr=recipe.lr, num_epochs=1, save_path="", optimizer=recipe.optimizer,
            weight_decay=recipe.weight_decay, muon_lr=recipe.lr,
            muon_momentum=recipe.muon_momentum, muon_weight_decay=recipe.muon_weight_decay,
            muon_ns_steps=recipe.muon_ns_steps, muon_adjust_lr_fn=recipe.muon_adjust_lr_fn,
        )  # fmt: skip
        optimizers = build_optimizers(model, settings)
        warmup = int(recipe.warmup_ratio * num_steps)
        schedules = [get_linear_schedule_with_warmup(o, warmup, num_steps) for o in optimizers]

        def step(batch: Prepared) -> None:
            for optimizer in optimizers:
                optimizer.zero_grad()
            for loss, _ in self._losses(batch):
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
            for part in (*optimizers, *schedules):
                part.step()

        return step

    def _specforge(self, num_steps: int) -> Any:
        from specforge.optimizer import BF16Optimizer

        recipe = self.recipe
        optimizer = BF16Optimizer(
            self.peer.model, lr=recipe.learning_rate, weight_decay=recipe.weight_decay,
            max_grad_norm=recipe.max_grad_norm, total_steps=num_steps,
            warmup_ratio=recipe.warmup_ratio,
        )  # fmt: skip

        def step(batch: Prepared) -> None:
            for loss, _ in self._losses(batch):
                loss.backward()
            optimizer.step()

        return step

    @torch.no_grad()
    def own_accuracy(self, numbers: list[int]) -> list[float]:
        """Each step's accuracy on held-out samples as the peer counts it.

        speculators: rows whose drafts 0..k all equal the draft vocabulary's best. SpecForge: rows
        whose draft k equals the target's best, whatever came before.
        """
        hits = torch.zeros(self.num_ttt, dtype=torch.float64)
        rows = torch.zeros(self.num_ttt, dtype=torch.float64)
        length = self.plan.tokens_per_batch if self.rows else 1
        for batch in self._prepared(pack(numbers, self.reader.lengths, length)):
            for _, metrics in self._losses(batch):
                for k in range(self.num_ttt):
                    if self.rows:
                        hits[k] += float(metrics[f"full_acc_{k}_sum"])
                        rows[k] += float(metrics[f"full_acc_{k}_total"])
                    else:
                        hits[k] += float(metrics["correct"][k])
                        rows[k] += float(metrics["rows"][k])
        return (hits / rows.clamp(min=1)).tolist()
