"""Values that are not finite: found before a step touches the weights, and on every rank at once.

A store that was captured and verified has none, so one that turns up means damage. Leaving the
sample out would hide it and change what a resumed run sees; training ends and names it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from eagle3.errors import UserError
from eagle3.store.reader import StoreReader
from training.data import Loaded
from training.world import World

log = logging.getLogger(__name__)


def all_finite(loaded: Loaded) -> Tensor:
    """Whether a batch's hidden states are all finite; a scalar on its device."""
    batch = loaded.batch
    return torch.isfinite(batch.aux).all() & torch.isfinite(batch.final).all()


def require(
    finite: Tensor, numbers: Sequence[int], reader: StoreReader, world: World, what: str
) -> None:
    """Raise on every rank if `finite` is false on any.

    Args:
        finite: this rank's finding, a scalar. numbers: the samples that went into it.
        what: is not finite, where no sample is to blame.

    Raises:
        UserError: samples hold values that are not finite; it names those of all ranks.
        RuntimeError: none does, so `what` went wrong in computing.
    """
    if world.sum((~finite).double()).item() == 0:
        return
    mine = [f"{reader.ids[n]} (number {n})" for n in numbers if not _sample_finite(reader, n)]
    ranks: list[list[str]] = [mine]
    if world.size > 1:
        ranks = [[] for _ in range(world.size)]
        dist.all_gather_object(ranks, mine)
    named = sorted({name for rank in ranks for name in rank})
    if named:
        raise UserError(
            f"samples with values that are not finite in {reader.folder}: {', '.join(named)}. "
            "Nothing was trained on them. `python -m extraction.verify` finds all such samples; "
            "extract the store again, then resume"
        )
    raise RuntimeError(f"{what} is not finite although every sample is: training diverged")


def _sample_finite(reader: StoreReader, number: int) -> bool:
    return all(bool(torch.isfinite(states).all()) for states in reader.states(number))
