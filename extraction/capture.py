"""Capturing samples through servers that run our plugin, and the servers to do it with."""

from __future__ import annotations

import itertools
import logging
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle3 import checks, provenance
from eagle3.config import Config
from eagle3.errors import UserError
from eagle3.serving import cpu
from eagle3.serving.client import Client, RequestFailed
from eagle3.serving.from_config import get_servers
from eagle3.serving.pool import Pool
from eagle3.serving.server import Server
from eagle3.serving.watch import ServerFailed
from eagle3.store.codecs import Codec
from eagle3.store.sample import Encoded
from eagle3.target import Target
from extraction.check import Rejection, Verifier
from extraction.samples import TokenSample
from extraction.spool import SPOOL_VARIABLE, CaptureFailed, Session, Spool, Ticket, environment

log = logging.getLogger(__name__)
CHECKS = 3
"""Captures of one sample that verification may reject."""
ARRIVAL_TIMEOUT_S = 60.0
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Station:
    """A capturing server and the spool it writes to."""

    client: Client
    spool: Spool
    session: Session
    secret: str


@dataclass(frozen=True, slots=True)
class Extractor:
    """Captures samples. Safe to share between threads.

    servers: what they run with, for the manifest. slots: how many samples may be at the servers or
    in the spools; checking one takes none.
    """

    pool: Pool[Station]
    verifier: Verifier
    servers: list[dict[str, Any]]
    slots: threading.BoundedSemaphore
    workers: int
    """Threads worth calling `capture` from: some wait for servers while others check."""

    def capture(self, number: int, sample: TokenSample) -> Encoded | Rejection:
        """Capture one sample, again if verification rejects it, at most CHECKS times.

        Raises:
            RequestFailed: no server can do it; nothing is wrong with what was captured before.
        """
        attempts = itertools.count()
        rejection = Rejection("never tried")
        for _ in range(CHECKS):
            with self.slots:
                captured, output_ids = self.pool.run(
                    lambda station: _request(station, number, next(attempts), sample)
                )
            checked = self.verifier.check(sample, captured, output_ids)
            if isinstance(checked, Encoded):
                return checked
            rejection = checked
            log.warning("sample %s: %s", sample.id, rejection.reason)
        return rejection


def _request(
    station: Station, number: int, attempt: int, sample: TokenSample
) -> tuple[dict[str, Tensor], list[int]]:
    """One attempt on one server: the captured tensors and the token the server went on with."""
    ticket = Ticket(
        session=station.session.name,
        number=number,
        attempt=attempt,
        num_tokens=len(sample.input_ids),
    )
    reply = station.client.generate(
        sample.input_ids.tolist(),
        {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
        rid=ticket.rid(station.secret),
    )
    if not reply.output_ids:
        raise RequestFailed(
            f"{station.client.url} ended the request for sample {sample.id} ({reply.finish}) "
            "without a token"
        )
    deadline = time.monotonic() + ARRIVAL_TIMEOUT_S
    try:
        while (captured := station.spool.take(ticket)) is None:
            if time.monotonic() > deadline:
                raise CaptureFailed(f"nothing arrived within {ARRIVAL_TIMEOUT_S:.0f} s")
            time.sleep(0.002)
    except CaptureFailed as failure:
        raise RequestFailed(
            f"{station.client.url} answered for sample {sample.id} but did not capture it "
            f"(spool {station.spool.folder}): {failure}"
        ) from failure
    return captured, reply.output_ids


@contextmanager
def extractor(
    config: Config, target: Target, aux_layers: list[int], codec: Codec, longest: int
) -> Iterator[Extractor]:
    """Spools, capturing servers and verifier of a run whose longest sample has `longest` tokens.

    Raises:
        UserError: the servers or spools given are not fit for this run.
    """
    checks.require(config)
    concurrency = concurrency_per_server(config, target, codec, aux_layers)
    own = not config.server.urls
    count = config.server.replicas if own else len(config.server.urls)
    spools = _spools(config, count, own)
    with ExitStack() as stack:
        if own:
            for spool in spools:
                stack.callback(spool.remove)
        _require_room(spools, concurrency * longest * _row_bytes(target, codec, aux_layers))
        sessions = [stack.enter_context(spool.session(codec)) for spool in spools]
        starting = get_servers(
            config.server,
            target.folder,
            config.run_dir / "logs" / "extract-server.log",
            args=server_args(),
            envs=[environment(spool.folder, aux_layers) for spool in spools],
            plugins=["eagle3_capture"],
        )
        try:
            servers = stack.enter_context(starting)
        except ServerFailed:
            for spool in spools:
                _require_no_error(spool)
            raise
        names = {config.target.path, str(target.folder)}
        facts = [
            _require_fit(server, spool, aux_layers, names, longest)
            for server, spool in zip(servers, spools, strict=True)
        ]
        stations = [
            (server, Station(server.client, spool, session, spool.secret))
            for server, spool, session in zip(servers, spools, sessions, strict=True)
        ]
        yield Extractor(
            Pool(stations, config.server.patience_s),
            Verifier(target, len(aux_layers), codec),
            facts,
            threading.BoundedSemaphore(count * concurrency),
            2 * count * concurrency,
        )


def concurrency_per_server(
    config: Config, target: Target, codec: Codec, aux_layers: list[int]
) -> int:
    """As configured, but no more than a spool has room for: a running capture may lie there."""
    row_bytes = _row_bytes(target, codec, aux_layers)
    room = config.extract.spool_bytes // (row_bytes * config.data.max_length)
    if room < 1:
        raise UserError(
            f"extract.spool_bytes={config.extract.spool_bytes} does not hold a sample of "
            f"data.max_length={config.data.max_length}"
        )
    return min(config.extract.concurrency, room)


def _row_bytes(target: Target, codec: Codec, aux_layers: list[int]) -> int:
    """Of a row in a spool, with its token id."""
    return sum(codec.bytes_per_row(len(aux_layers), target.hidden_size)) + 4


def _require_room(spools: list[Spool], needed: int) -> None:
    """Refuse spools whose file system has less than `needed` bytes free for each of them."""
    devices = [spool.folder.stat().st_dev for spool in spools]
    for spool, device in zip(spools, devices, strict=True):
        free = shutil.disk_usage(spool.folder).free
        if free < (wanted := needed * devices.count(device)):
            raise UserError(
                f"running captures may take up {wanted:,} bytes in {spool.folder.parent}, which "
                f"has {free:,} free: give it more (a container's --shm-size), lower "
                "extract.spool_bytes or data.max_length, or name other folders in extract.spools"
            )


def server_args() -> dict[str, Any]:
    """What every capturing server runs with.

    Prompts must not be shortened by a cache. One prompt a forward makes the states independent of
    what else is under way, to the last bit; a CPU is busy with a single one anyway, a GPU needs
    several to be, and rounds differently for it (docs/extraction.md).
    """
    alone = {"prefill_max_requests": 1} if cpu.needed() else {}
    return {"disable_radix_cache": True, "disable_cuda_graph": True, **alone}


def _spools(config: Config, count: int, own: bool) -> list[Spool]:
    """A spool for each of `count` servers: made here for servers of our own."""
    folders = [Path(folder) for folder in config.extract.spools]
    if not own and len(folders) != count:
        raise UserError(
            f"server.urls has {count} servers and extract.spools {len(folders)} folders: name, for "
            f"each server, the folder that it was started with as {SPOOL_VARIABLE}"
        )
    if not own:
        for folder in folders:
            if not (folder / "secret").exists():
                raise UserError(f"{folder} is no spool: make it with `python -m extraction.spool`")
        return [Spool(folder) for folder in folders]
    if folders and len(folders) != count:
        raise UserError(f"extract.spools needs {count} folders, one for each of server.replicas")
    if not folders:
        for old in SHARED_MEMORY.glob(f"{_prefix(config)}*"):  # of a killed run, maybe with more
            Spool.create(old).remove()
    return [Spool.create(folder) for folder in folders or default_spools(config)]


def default_spools(config: Config) -> list[Path]:
    """In shared memory, under names that no other run has."""
    return [SHARED_MEMORY / f"{_prefix(config)}{n}" for n in range(config.server.replicas)]


def _prefix(config: Config) -> str:
    return f"eagle3-{provenance.hash_json(str(config.store_dir.resolve()))[:12]}-"


def _require_no_error(spool: Spool) -> None:
    if (error := spool.error()) is not None:
        raise UserError(f"the server's capture plugin refused to work:\n{error}")


def _require_fit(
    server: Server,
    spool: Spool,
    aux_layers: list[int],
    names: set[str],
    longest: int,
) -> dict[str, Any]:
    """Refuse a server whose plugin is missing, failed, or captures something else; return what is
    worth recording about it.

    Args:
        names: names under which the server may know the target.
    """
    _require_no_error(spool)
    found = spool.capture()
    if found is None:
        raise UserError(
            f"{server.url} answers, but its capture plugin is not active. Is eagle3 installed in "
            f"the server's environment, and {SPOOL_VARIABLE}={spool.folder} set?"
        )
    if found["aux_layers"] != aux_layers:
        raise UserError(
            f"{server.url} captures layers {found['aux_layers']}, this run {aux_layers}"
        )
    if found["model_path"] not in names:
        raise UserError(f"{server.url} serves {found['model_path']}, not {sorted(names)}")
    info = server.client.info()
    limit = info.get("max_req_input_len")
    if limit is not None and longest >= limit:
        raise UserError(
            f"the longest sample has {longest} tokens and {server.url} takes {limit - 1}: raise "
            "server.args.context_length (and max_total_tokens), or lower data.max_length"
        )
    keys = ("quantization", "attention_backend", "tp_size", "chunked_prefill_size", "version")
    facts = {key: found[key] for key in ("architecture", "dtype")}
    return facts | {key: info.get(key) for key in keys}
