"""Capture a random sample of a store again, and compare."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from eagle3.config import Config
from eagle3.serving.client import in_order
from eagle3.store.reader import StoreReader
from eagle3.store.sample import Encoded, digest
from eagle3.store.verify import Problem
from eagle3.target import Target
from extraction.capture import extractor
from extraction.check import Rejection
from extraction.samples import TokenSample


@dataclass(kw_only=True, slots=True)
class Recaptured:
    """How many samples were captured again, how many came out the same to the last bit, and the
    largest relative difference of a sample's decoded states."""

    samples: int
    problems: list[Problem] = field(default_factory=list)
    identical: int = 0
    largest: float = 0.0


def recapture(config: Config, target: Target, reader: StoreReader) -> Recaptured:
    """Capture `verify.recapture` samples again with the run's servers."""
    chosen = random.Random(config.seed).sample(
        range(len(reader)), min(config.verify.recapture, len(reader))
    )
    samples = {}
    for number in chosen:
        ids, mask = reader.tokens(number)
        samples[number] = TokenSample.of(reader.ids[number], ids.tolist(), mask.tolist())
    longest = max(len(sample.input_ids) for sample in samples.values())
    aux_layers = reader.manifest.match["aux_layers"]
    outcome = Recaptured(samples=len(chosen))
    with extractor(config, target, aux_layers, reader.codec, longest) as servers:

        def work(number: int) -> tuple[int, Encoded | Rejection]:
            return number, servers.capture(number, samples[number])

        for number, found in in_order(work, chosen, servers.workers):
            where = f"sample {number} ({reader.ids[number]})"
            if isinstance(found, Rejection):
                what = f"captured again, it is rejected: {found.reason}"
                outcome.problems.append(Problem(where, what))
                continue
            difference = _difference(reader, number, found)
            outcome.identical += difference == 0
            outcome.largest = max(outcome.largest, difference)
            if not difference <= config.verify.tolerance:
                what = f"captured again, it differs by {difference:.2%}"
                outcome.problems.append(Problem(where, what))
    return outcome


def _difference(reader: StoreReader, number: int, found: Encoded) -> float:
    """Norm of the difference of a sample's states relative to their norm, the worse of aux and
    final; 0 only if the bytes are the same."""
    stored = reader.encoded(number)
    if digest(stored) == found.sha256:
        return 0.0
    worst = 0.0
    for kind in ("aux", "final"):
        a, b = (reader.codec.decode(kind, t).float() for t in (stored, found.tensors))
        worst = max(worst, float((a - b).norm() / a.norm().clamp(min=1e-30)))
    return max(worst, 1e-12)
