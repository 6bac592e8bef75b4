"""What the drafter was trained on, and whether a benchmark is held out from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from eagle3 import export as formats
from eagle3.config import Config
from eagle3.manifest import Manifest
from eagle3.store.reader import StoreReader
from eagle3.walk import generated_spans
from eval.benchmarks import Prompt

log = logging.getLogger(__name__)


def trained_on(config: Config) -> Callable[[], Iterator[tuple[Tensor, Tensor]]] | None:
    """What goes through the samples that the drafter was trained on, giving each one's token ids
    and loss mask; None if their store is not at hand."""
    if not config.store_dir.exists():
        return None
    reader = StoreReader(config.store_dir)
    drafter = Manifest.load(config.drafter_dir, formats.KIND)
    if drafter.inputs.get("store") != reader.manifest.hash():
        log.warning("%s is another store than the drafter's", config.store_dir)
        return None
    trained = formats.trained_samples(drafter.facts, len(reader))
    return lambda: (reader.tokens(number) for number in trained)


def prompts_in(
    samples: Iterable[tuple[Tensor, Tensor]], prompts: dict[str, list[Prompt]]
) -> dict[str, int]:
    """How many prompts of each benchmark were answered in these samples (token ids, loss mask).

    Of a drafter's training they should be none: on what it was trained on, it is accepted more.
    """
    wanted = {tuple(p.input_ids) for items in prompts.values() for p in items}
    lengths = {len(ids) for ids in wanted}
    answered = {
        tuple(ids[:start].tolist())
        for ids, mask in samples
        for start, _ in generated_spans(mask.tolist())
        if start in lengths
    }
    found = {
        name: sum(tuple(p.input_ids) in answered for p in items) for name, items in prompts.items()
    }
    for name, count in found.items():
        if count:
            log.warning(
                "benchmark %s: %d of %d prompts are in the drafter's training data",
                name, count, len(prompts[name]),
            )  # fmt: skip
    return found
