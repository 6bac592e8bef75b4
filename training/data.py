"""Which samples make which batch: a pure function of (seed, epoch, index), for any number of
ranks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle3.batch import Batch
from eagle3.errors import UserError
from eagle3.store.reader import StoreReader


@dataclass(kw_only=True, slots=True)
class Split:
    """Disjoint sample numbers that together are all of a store.

    All turns of a conversation that became several samples are on one side. left_out: conversations
    with other answers to the prompts of `validation`, which would tell training about them.
    """

    train: list[int]
    validation: list[int]
    left_out: list[int]

    @classmethod
    def of(cls, reader: StoreReader, validation_ratio: float, seed: int) -> Split:
        """`make` of a store's samples."""
        return cls.make(reader.openings(), reader.conversations, validation_ratio, seed)

    @classmethod
    def make(
        cls, openings: np.ndarray, conversations: np.ndarray, validation_ratio: float, seed: int
    ) -> Split:
        """Random split; at least one sample to train on, and to validate on if the ratio is not 0.

        Conversations are drawn, not samples. Where each is a single sample, and for stores from
        before turns were kept together, that is the same split as drawing samples gave.

        Args:
            openings: what each sample begins with [S], see `StoreReader.openings`.
            conversations: equal for turns of one conversation [S], see `StoreReader`.

        Raises:
            UserError: too few samples for both.
        """
        _, conversation = np.unique(conversations, return_inverse=True)
        num_conversations = int(conversation.max(initial=-1)) + 1
        order = np.random.default_rng([seed, 0x5911]).permutation(num_conversations)
        held_out = round(num_conversations * validation_ratio)
        if validation_ratio > 0:
            held_out = max(1, held_out)
        validation = np.isin(conversation, order[:held_out])
        told = np.isin(openings, openings[validation])
        left_out = np.isin(conversation, conversation[told]) & ~validation
        train = ~validation & ~left_out
        if not train.any():
            raise UserError(
                f"{num_conversations} conversations cannot be split with train.validation_ratio="
                f"{validation_ratio}: without answers to held-out prompts nothing is left to train "
                "on; 0 holds none out"
            )
        return cls(
            train=np.flatnonzero(train).tolist(),
            validation=np.flatnonzero(validation).tolist(),
            left_out=np.flatnonzero(left_out).tolist(),
        )

    @property
    def facts(self) -> dict[str, list[int]]:
        """For the training's manifest."""
        return {"validation_samples": self.validation, "left_out_samples": self.left_out}

    def require_same(self, facts: dict[str, Any], root: Path) -> None:
        """Refuse to go on from a manifest's facts: the store's hash does not tell whether turns of
        a conversation were kept together in it.

        Raises:
            UserError: the training would go on with what it has held out so far.
        """
        if any(facts.get(key, []) != numbers for key, numbers in self.facts.items()):
            raise UserError(
                f"{root} was trained with another split of the same store: an earlier version "
                "split conversations, or their store was made anew since. Choose another run_name "
                "or train_dir"
            )


@dataclass(kw_only=True)
class BatchPlan:
    """An endless, reproducible stream of micro-batches of whole samples.

    Every epoch shuffles the samples anew and cuts the sequence wherever the next sample would
    exceed `tokens_per_batch` rows. Micro-batch i of the stream is the same whoever asks for it.
    """

    lengths: np.ndarray
    numbers: Sequence[int]
    tokens_per_batch: int
    seed: int
    _epochs: list[list[list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        longest = max(int(self.lengths[n]) for n in self.numbers)
        if longest > self.tokens_per_batch:
            raise UserError(
                f"train.tokens_per_batch={self.tokens_per_batch} is smaller than the longest "
                f"sample ({longest} tokens)"
            )

    def epoch(self, number: int) -> list[list[int]]:
        """All micro-batches of one epoch."""
        while len(self._epochs) <= number:
            rng = np.random.default_rng([self.seed, len(self._epochs)])
            order = [self.numbers[i] for i in rng.permutation(len(self.numbers))]
            self._epochs.append(pack(order, self.lengths, self.tokens_per_batch))
        return self._epochs[number]

    def micro_batch(self, index: int) -> list[int]:
        """Sample numbers of micro-batch `index` of the stream."""
        number = 0
        while index >= len(batches := self.epoch(number)):
            index -= len(batches)
            number += 1
        return batches[index]

    def num_batches(self, epochs: float) -> int:
        """Micro-batches in the first `epochs` epochs, the last one perhaps in part."""
        whole = int(epochs)
        count = sum(len(self.epoch(e)) for e in range(whole))
        return count + round((epochs - whole) * len(self.epoch(whole)))


def pack(numbers: Iterable[int], lengths: np.ndarray, tokens_per_batch: int) -> list[list[int]]:
    """Cut a sequence of samples into runs of at most `tokens_per_batch` rows."""
    batches: list[list[int]] = []
    room = 0
    for number in numbers:
        if not batches or lengths[number] > room:
            batches.append([])
            room = tokens_per_batch
        batches[-1].append(int(number))
        room -= int(lengths[number])
    return batches


@dataclass(kw_only=True, slots=True)
class Loaded:
    """A batch on its device, its sample numbers, and what the loader counted on the way.

    generated: tokens that the target generated. flops: useful work of training on it, 0 if nobody
    asked.
    """

    batch: Batch
    numbers: Sequence[int]
    generated: int
    flops: float


def prefetch(
    reader: StoreReader,
    batches: Iterable[Sequence[int]],
    device: torch.device,
    dtype: torch.dtype,
    count_flops: Callable[[Batch], float] | None = None,
    depth: int = 2,
    mask: str = "serving",
) -> Generator[Loaded, None, None]:
    """Read batches ahead on a thread, in order; an error there is raised here.

    On a GPU they are copied and decoded on a stream of their own, beside the training step.

    Args:
        mask: rule of what is supervised, one of `eagle3.batch.MASKS`.
    """
    Item = tuple[Loaded, Any] | BaseException | None
    ready: queue.Queue[Item] = queue.Queue(maxsize=depth)
    stopped = threading.Event()
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def load(numbers: Sequence[int]) -> Loaded:
        packed = reader.pack(numbers, mask, pinned=stream is not None)
        return Loaded(
            numbers=numbers,
            generated=int(packed.tokens.loss_mask.sum()),
            flops=count_flops(packed.tokens) if count_flops else 0.0,
            batch=packed.to(device, dtype),
        )

    def put(item: Item) -> None:
        while not stopped.is_set():
            try:
                return ready.put(item, timeout=0.2)
            except queue.Full:
                continue

    def work() -> None:
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                for numbers in batches:
                    if stopped.is_set():
                        return
                    loaded = load(numbers)
                    put((loaded, None if stream is None else stream.record_event()))
            put(None)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            loaded, event = item
            if event is not None:
                torch.cuda.current_stream(device).wait_event(event)
                loaded.batch.record_stream(torch.cuda.current_stream(device))
            yield loaded
    finally:
        stopped.set()
        thread.join()
