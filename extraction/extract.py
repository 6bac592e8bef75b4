"""Capture hidden states into a store: `python -m extraction.extract experiment=<name>`.

Prints the budget first. Samples are captured concurrently and stored in the order of the data, so
the store does not depend on timing; an interrupted run goes on after the last committed shard.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Generator
from contextlib import closing
from typing import Any

import torch

from eagle3 import logging as console
from eagle3.command import command
from eagle3.config import Config
from eagle3.lock import exclusive
from eagle3.manifest import Manifest, require_match
from eagle3.serving.client import in_order
from eagle3.store import budget, codecs
from eagle3.store.budget import Workload
from eagle3.store.sample import Encoded
from eagle3.store.writer import KIND, StoreWriter
from eagle3.target import Target
from extraction import samples as samples_module
from extraction.capture import Extractor, extractor
from extraction.check import Rejection
from extraction.samples import TokenSample

log = logging.getLogger(__name__)
PRECISION = ("dtype", "quantization")
"""Of what is known of a server, what its states depend on by more than rounding."""
PROBE_SAMPLES = 32
"""Captures after which the rate is known well enough to say how long the rest takes."""


class Extraction:
    """One run: what is to be captured, and the store it goes to.

    Raises:
        UserError: there is nothing to capture, or the codec does not fit the target.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.folder = config.eval_store_dir if config.extract.of_eval else config.store_dir
        self.target = Target.from_config(config.target)
        self.aux_layers = self.target.aux_layers(config.target.aux_layers)
        self.codec = codecs.get(config.codec.name)
        width = self.target.hidden_size
        row = {"aux": torch.zeros(1, len(self.aux_layers) * width), "final": torch.zeros(1, width)}
        self.codec.encode(**row)  # raises if it cannot do that width
        self.todo, self.skipped = samples_module.load(config, self.target)

    def run(self) -> None:
        """Fill the store; resumes, and does nothing where it is complete.

        Raises:
            UserError: the configuration is not the store's, the budget does not fit, the servers
                are not fit, or the disk is full.
        """
        folder = self.folder
        whole = self._budget(self.todo, self.config.extract.tokens_per_s)
        log.info("budget: %s", whole)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (
            exclusive(folder),
            closing(
                StoreWriter(folder, self._manifest(), self.config.extract.shard_bytes)
            ) as writer,
        ):
            rest = self.todo[writer.next_number :]
            if writer.complete:  # whatever is left was rejected, and is on record
                log.info("the store in %s is complete", folder)
                return
            if writer.next_number:
                log.info(
                    "resuming: %d of %d samples are committed", writer.next_number, len(self.todo)
                )
            self._require(rest, self.config.extract.tokens_per_s)
            facts = self._fill(writer, rest) if rest else {}
            writer.finish({"tokens": whole.work.num_tokens, "skipped": dict(self.skipped), **facts})
            log.info("store %s: %s", folder, json.dumps(writer.manifest.facts))

    def _fill(self, writer: StoreWriter, rest: list[TokenSample]) -> dict[str, Any]:
        """Capture the rest into the store; returns what to record about it."""
        torch.set_num_threads(1)  # samples are checked on many threads already
        longest = max(len(sample.input_ids) for sample in rest)
        with (
            extractor(self.config, self.target, self.aux_layers, self.codec, longest) as servers,
            closing(_captures(servers, rest)) as found,
        ):
            writer.settle("server", _precision(servers.servers))
            start, tokens = time.monotonic(), 0
            for done, (sample, result) in enumerate(found, start=1):
                number = len(self.todo) - len(rest) + done - 1
                tokens += len(sample.input_ids)
                if isinstance(result, Rejection):
                    writer.reject(number, sample.id, result.reason)
                    _require_few(writer.rejected, len(self.todo), self.config.extract.max_rejected)
                else:
                    writer.append(number, result)
                if done == PROBE_SAMPLES:
                    self._require(rest[done:], tokens / (time.monotonic() - start))
            seconds = time.monotonic() - start
        return {
            "seconds": round(seconds, 2),
            "tokens_per_s": round(tokens / seconds, 1),
            "servers": servers.servers,
        }

    def _budget(self, samples: list[TokenSample], tokens_per_s: float | None) -> budget.Budget:
        return budget.plan(
            self.folder,
            self.codec,
            workload(samples),
            num_aux=len(self.aux_layers),
            hidden_size=self.target.hidden_size,
            tokens_per_s=tokens_per_s,
        )

    def _require(self, rest: list[TokenSample], tokens_per_s: float | None) -> None:
        """Refuse to go on if what is left does not fit."""
        left = self._budget(rest, tokens_per_s)
        log.info("left: %s", left)
        limits = self.config.extract
        budget.require(left, self.folder, max_bytes=limits.max_bytes, max_hours=limits.max_hours)

    def _manifest(self) -> Manifest:
        return Manifest(
            kind=KIND,
            match={
                "target": self.target.identity(),
                "aux_layers": self.aux_layers,
                "final": "post-norm",
                "codec": self.codec.name,
                "shard_bytes": self.config.extract.shard_bytes,
                "data": samples_module.data_hash(self.todo),
            },
            config=self.config.resolved(),
        )


def workload(samples: list[TokenSample]) -> Workload:
    """What capturing these samples amounts to."""
    return Workload(
        num_samples=len(samples),
        num_tokens=sum(len(sample.input_ids) for sample in samples),
        num_final=sum(sample.num_final for sample in samples),
    )


def _precision(servers: list[dict[str, Any]]) -> dict[str, Any]:
    """What all servers compute in: states of different precisions must not be mixed.

    Raises:
        UserError: they differ.
    """
    first, *others = ({key: server[key] for key in PRECISION} for server in servers)
    for other in others:
        require_match(first, other, "one of the servers", "Start them all with the same flags.")
    return first


def _captures(
    servers: Extractor, rest: list[TokenSample]
) -> Generator[tuple[TokenSample, Encoded | Rejection]]:
    """Results in the samples' order; to be closed before the servers, so that all threads end."""

    def work(number: int) -> tuple[TokenSample, Encoded | Rejection]:
        result = servers.capture(number, rest[number])
        if isinstance(result, Encoded):
            _ = result.sha256  # worked out here, on many threads
        return rest[number], result

    with (
        console.progress("extract") as bar,
        closing(in_order(work, range(len(rest)), servers.workers)) as results,
    ):
        task = bar.add_task("", total=len(rest), note="")
        start, tokens = time.monotonic(), 0
        for sample, result in results:
            tokens += len(sample.input_ids)
            bar.update(task, advance=1, note=f"{tokens / (time.monotonic() - start):,.0f} tokens/s")
            yield sample, result


def _require_few(rejected: list[dict[str, Any]], total: int, share: float) -> None:
    if len(rejected) > share * total:
        reasons = sorted({row["reason"] for row in rejected})
        raise RuntimeError(
            f"{len(rejected)} of {total} captures rejected, over extract.max_rejected={share}: "
            f"{reasons}"
        )


@command("extract")
def main(config: Config) -> None:
    Extraction(config).run()


if __name__ == "__main__":
    main()
