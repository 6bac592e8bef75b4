"""Capture hidden states into a store: `python -m extraction.extract experiment=<name>`.

Prints the budget first. Samples are captured concurrently and stored in the order of the data, so
the store does not depend on timing; an interrupted run goes on after the last committed shard.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from eagle3 import logging as console
from eagle3 import provenance
from eagle3.config import Config, command
from eagle3.errors import UserError
from eagle3.manifest import Manifest
from eagle3.serving.client import Client, in_order
from eagle3.serving.from_config import get_server
from eagle3.store import budget, codecs
from eagle3.store.writer import KIND, Sample, StoreWriter
from eagle3.target import Target
from extraction import samples as samples_module
from extraction.check import Rejection, Verifier
from extraction.samples import TokenSample
from extraction.spool import LAYERS_VARIABLE, SPOOL_VARIABLE, Spool, Ticket

log = logging.getLogger(__name__)
ATTEMPTS = 3
ARRIVAL_TIMEOUT_S = 60.0


class Extractor:
    """Captures samples from one server through one spool."""

    def __init__(self, client: Client, spool: Spool, verifier: Verifier) -> None:
        self.client = client
        self.spool = spool
        self.secret = spool.secret
        self.verifier = verifier

    def capture(self, number: int, sample: TokenSample) -> Sample | Rejection:
        """Capture one sample, again if verification rejects it, at most ATTEMPTS times."""
        rejection = Rejection("never tried")
        for attempt in range(ATTEMPTS):
            ticket = Ticket(number=number, attempt=attempt, num_tokens=len(sample.input_ids))
            reply = self.client.generate(
                sample.input_ids,
                {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
                rid=ticket.rid(self.secret),
            )
            tensors = self._arrival(ticket)
            checked = self.verifier.check(sample, tensors, reply.output_ids)
            if isinstance(checked, Sample):
                return checked
            rejection = checked
            log.warning("sample %s, attempt %d: %s", sample.id, attempt + 1, rejection.reason)
        return rejection

    def _arrival(self, ticket: Ticket) -> dict[str, torch.Tensor]:
        """Wait for the spool file: the answer may be a moment ahead of it."""
        deadline = time.monotonic() + ARRIVAL_TIMEOUT_S
        while (tensors := self.spool.take(ticket)) is None:
            if (error := self.spool.error()) is not None:
                raise RuntimeError(f"the capture plugin failed:\n{error}")
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the server answered request {ticket.number} but captured nothing within "
                    f"{ARRIVAL_TIMEOUT_S:.0f} s (spool: {self.spool.folder})"
                )
            time.sleep(0.002)
        return tensors


def extract(config: Config) -> Path:
    """Run the stage; return the store's folder."""
    target = Target.from_config(config.target)
    aux_layers = target.aux_layers(config.target.aux_layers)
    todo, skipped = samples_module.load(config, target)
    codec = codecs.get(config.codec.name)
    planned = budget.plan(
        config.store_dir,
        codec,
        num_samples=len(todo),
        num_tokens=sum(len(s.input_ids) for s in todo),
        num_final=sum(sum(s.loss_mask[1:]) for s in todo),
        num_aux=len(aux_layers),
        hidden_size=target.hidden_size,
    )
    for line in planned.lines():
        log.info("budget: %s", line)
    manifest = Manifest(
        kind=KIND,
        match={
            "target": target.identity(),
            "aux_layers": aux_layers,
            "final": "post-norm",
            "codec": codec.name,
            "shard_bytes": config.extract.shard_bytes,
            "data": provenance.hash_json([[s.id, s.input_ids, s.loss_mask] for s in todo]),
        },
        config=config.resolved(),
    )
    writer = StoreWriter(config.store_dir, manifest, config.extract.shard_bytes)
    first = writer.next_number
    if first:
        log.info("resuming: %d of %d samples are committed", first, len(todo))
    if first == len(todo) and Manifest.load(config.store_dir, KIND).facts.get("complete"):
        log.info("the store in %s is complete", config.store_dir)
        return config.store_dir
    budget.require_space(planned, config.store_dir, config.extract.max_bytes)
    rejected: Counter[str] = Counter()
    seconds = 0.0
    if first < len(todo):
        concurrency = _concurrency(config, target, len(aux_layers))
        longest = max(len(s.input_ids) for s in todo)
        with _extractor(config, target, aux_layers, longest) as extractor:
            start = time.monotonic()
            for number, result in _captures(extractor, todo, first, concurrency):
                if isinstance(result, Rejection):
                    rejected[result.reason] += 1
                    _require_few(rejected, len(todo), config.extract.max_rejected)
                else:
                    writer.append(number, result)
            seconds = time.monotonic() - start
    writer.finish(
        {
            "samples": writer.num_samples,
            "tokens": planned.num_tokens,
            "skipped": dict(skipped),
            "rejected": len(todo) - writer.num_samples,
            "reasons": dict(rejected),
            "seconds": round(seconds, 2),
            "tokens_per_s": round(
                sum(len(s.input_ids) for s in todo[first:]) / max(seconds, 1e-9), 1
            ),
        }
    )
    log.info("store %s: %s", config.store_dir, json.dumps(writer.manifest.facts))
    return config.store_dir


def _captures(
    extractor: Extractor, todo: list[TokenSample], first: int, concurrency: int
) -> Iterator[tuple[int, Sample | Rejection]]:
    def work(number: int) -> tuple[int, Sample | Rejection]:
        return number, extractor.capture(number, todo[number])

    with console.progress("extract") as bar:
        task = bar.add_task("", total=len(todo), completed=first, note="")
        start, tokens = time.monotonic(), 0
        for number, result in in_order(work, range(first, len(todo)), concurrency):
            tokens += len(todo[number].input_ids)
            bar.update(task, advance=1, note=f"{tokens / (time.monotonic() - start):,.0f} tokens/s")
            yield number, result


@contextmanager
def _extractor(
    config: Config, target: Target, aux_layers: list[int], longest: int
) -> Iterator[Extractor]:
    """Spool, capturing server and verifier of a run whose longest sample has `longest` tokens."""
    if config.server.url and config.extract.spool is None:
        raise UserError(
            "server.url needs extract.spool: the folder that server was started with as "
            f"{SPOOL_VARIABLE}"
        )
    folder = Path(config.extract.spool) if config.extract.spool else default_spool(config)
    spool = Spool(folder) if config.server.url else Spool.create(folder)
    try:
        with get_server(
            config.server,
            target.folder,
            config.run_dir / "logs" / "extract-server.log",
            args={"disable_radix_cache": True, "disable_cuda_graph": True},
            env={SPOOL_VARIABLE: str(folder), LAYERS_VARIABLE: json.dumps(aux_layers)},
            plugins=["eagle3_capture"],
        ) as server:
            _require_capture(spool, aux_layers, {config.target.path, str(target.folder)})
            _require_room(server.client, longest)
            yield Extractor(server.client, spool, Verifier(target, len(aux_layers)))
    finally:
        if not config.server.url:
            shutil.rmtree(folder)


def _concurrency(config: Config, target: Target, num_aux: int) -> int:
    """As configured, but no more than the spool has room for.

    `in_order` lets twice as many captures be finished or under way as it runs at a time.
    """
    row_bytes = (num_aux + 1) * target.hidden_size * 4
    room = config.extract.spool_bytes // (2 * row_bytes * config.data.max_length)
    if room < 1:
        raise UserError(
            f"extract.spool_bytes={config.extract.spool_bytes} does not hold two samples of "
            f"data.max_length={config.data.max_length}"
        )
    return min(config.extract.concurrency, room)


def _require_capture(spool: Spool, aux_layers: list[int], models: set[str]) -> None:
    """Refuse a server whose plugin is missing, failed, or captures something else.

    Args:
        models: the names under which the server may know the target.
    """
    if (error := spool.error()) is not None:
        raise UserError(f"the server's capture plugin refused to work:\n{error}")
    found = spool.capture()
    if found is None:
        raise UserError(
            "the server answers, but its capture plugin is not active. Is eagle3 installed in the "
            f"server's environment, and {SPOOL_VARIABLE}={spool.folder} set?"
        )
    if found["aux_layers"] != aux_layers:
        raise UserError(f"the server captures layers {found['aux_layers']}, not {aux_layers}")
    if found["model_path"] not in models:
        raise UserError(f"the server serves {found['model_path']}, not {sorted(models)}")


def _require_room(client: Client, longest: int) -> None:
    """Refuse a server that cannot take the longest sample, before anything is captured."""
    limit = client.info().get("max_req_input_len")
    if limit is not None and longest >= limit:
        raise UserError(
            f"the longest sample has {longest} tokens and the server takes {limit - 1}: raise "
            "server.args.context_length (and max_total_tokens), or lower data.max_length"
        )


def default_spool(config: Config) -> Path:
    """In shared memory, under a name that no other run has."""
    key = provenance.hash_json(str(config.store_dir.resolve()))[:12]
    return Path("/dev/shm") / f"eagle3-{key}"


def _require_few(rejected: Counter[str], total: int, share: float) -> None:
    if sum(rejected.values()) > share * total:
        raise RuntimeError(
            f"too many captures rejected (extract.max_rejected={share}): {dict(rejected)}"
        )


@command("extract")
def main(config: Config) -> None:
    extract(config)


if __name__ == "__main__":
    main()
