"""Trainings to compare: one configuration, one store, a folder for each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from eagle3.composition import CONF, from_dict_config, register
from eagle3.config import Config
from eagle3.drafter import Drafter
from eagle3.loss import Teacher
from eagle3.store.reader import StoreReader
from eagle3.target import Target
from eagle3.ttt import TTTModel
from gpu import synchronize
from training.data import BatchPlan, Split, pack
from training.train import Trainer
from training.world import World

Made = TypeVar("Made")


def compose(overrides: list[str]) -> Config:
    """The configuration that `python -m training.train <overrides>` would use."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return from_dict_config(hydra_compose("train", overrides=overrides))


def run_folder(work: Path, name: str, store: Path) -> list[str]:
    """Overrides for a run of its own under `work` that reads `store`."""
    link = work / name / "store"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(store.resolve())
    return [f"runs_dir={work}", f"run_name={name}", "logger=jsonl"]


@dataclass(kw_only=True, slots=True)
class Clock:
    """When steps ended, in seconds since the first began; the GPU has done its work at each end.

    Without a GPU the seconds are the process's own, which other programs of a busy machine do not
    lengthen.
    """

    began: float = 0.0
    ends: list[float] = field(default_factory=list)

    def start(self) -> None:
        self.began = self._now()

    def tick(self) -> None:
        synchronize()
        self.ends.append(self._now() - self.began)

    def _now(self) -> float:
        return time.perf_counter() if torch.cuda.is_available() else time.process_time()

    def over(self, limit_s: float | None) -> bool:
        """Whether so many seconds have passed, with enough steps done to tell a steady one."""
        return limit_s is not None and len(self.ends) >= 20 and self.ends[-1] > limit_s

    def steady_s(self) -> float:
        """Seconds of a step, from the later half of them."""
        half = len(self.ends) // 2
        return (self.ends[-1] - self.ends[half - 1]) / (len(self.ends) - half)

    def start_up_s(self) -> float:
        """What the steps so far took longer than steady ones: compilation, first allocations."""
        return max(0.0, self.ends[-1] - len(self.ends) * self.steady_s())


class TimedTrainer(Trainer):
    """Our training, with a clock on its optimizer steps (reading data included); it ends early once
    `stop_after_s` has passed and a few steps are done."""

    stop_after_s: float | None = None

    def __init__(self, config: Config, world: World) -> None:
        super().__init__(config, world)
        self.clock = Clock()

    def _optimizer_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        if not self.clock.ends:
            self.clock.start()
        totals = super()._optimizer_step(*arguments, **options)
        self.clock.tick()
        if self.clock.over(self.stop_after_s):
            self.num_steps = self.step + 1
        return totals


def planned_tokens(config: Config, reader: StoreReader, split: Split) -> int:
    """Tokens that our training of this configuration reads on one rank."""
    train = config.train
    plan = BatchPlan(
        lengths=reader.lengths, numbers=split.train, tokens_per_batch=train.tokens_per_batch,
        seed=config.seed,
    )  # fmt: skip
    if train.max_steps is not None:
        count = train.max_steps * train.accumulation
    else:
        count = plan.num_batches(train.epochs or 0.0)
    return sum(int(reader.lengths[plan.micro_batch(i)].sum()) for i in range(count))


def sample_groups(plan: BatchPlan, size: int | None) -> Iterator[list[int]]:
    """Endless groups of sample numbers: the plan's batches, or `size` samples in its order."""
    index, waiting = 0, []
    while True:
        batch = plan.micro_batch(index)
        index += 1
        if size is None:
            yield batch
            continue
        waiting += batch
        while len(waiting) >= size:
            yield waiting[:size]
            waiting = waiting[size:]


def groups_for(plan: BatchPlan, size: int | None, tokens: int) -> int:
    """How many of those groups hold at least so many tokens."""
    seen = 0
    for count, numbers in enumerate(sample_groups(plan, size), 1):
        seen += int(plan.lengths[numbers].sum())
        if seen >= tokens:
            return count
    raise AssertionError("the groups are endless")


def ahead(make: Callable[[list[int]], Made], groups: Iterable[list[int]]) -> Iterator[Made]:
    """`make` of each group in order, two groups ahead on a thread."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        waiting: deque[Future[Made]] = deque()
        for group in groups:
            waiting.append(pool.submit(make, group))
            if len(waiting) > 2:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


@torch.no_grad()
def held_out(
    drafter: Drafter,
    target: Target,
    reader: StoreReader,
    numbers: list[int],
    num_steps: int,
    device: torch.device,
) -> list[float]:
    """Acceptance of a chain's drafts at every position of held-out answers, in float32: joint
    marginals, one measure for drafters of any origin."""
    model = TTTModel(drafter, Teacher(target.lm_head().float(), drafter.vocab), [1.0] * num_steps)
    model.to(device).eval()
    rows, accepted = 0, torch.zeros(num_steps, dtype=torch.int64, device=device)
    for group in pack(numbers, reader.lengths, 4096):
        batch = reader.batch(group).to(device, torch.float32)
        output = model(batch, torch.zeros(num_steps, device=device), score=True)
        assert output.accepted is not None
        rows += int(output.rows[0])
        accepted += output.accepted
    return (accepted / max(rows, 1)).tolist()
