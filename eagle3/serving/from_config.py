"""Servers as a run's configuration describes them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from eagle3.config import ServerConfig
from eagle3.errors import UserError
from eagle3.serving import cpu
from eagle3.serving.server import Launch, Server, connect, launch
from eagle3.serving.watch import Limits

log = logging.getLogger(__name__)


@contextmanager
def get_servers(
    config: ServerConfig,
    model: Path,
    log: Path,
    *,
    args: dict[str, Any] | None = None,
    envs: Sequence[dict[str, str]] = ({},),
    plugins: Sequence[str] = (),
) -> Iterator[list[Server]]:
    """Connect to `server.urls`, or start a server for each of the `envs` with the stage's own args
    and plugins. Logs of several servers are numbered.

    Raises:
        UserError: nothing answers at a URL, or `server.backends` cannot run on this machine.
    """
    if config.urls:
        yield [connect(url, config.api_key, config.timeout_s) for url in config.urls]
        return
    if cpu.needed() and set(config.backends) - {cpu.ATTENTION_BACKEND}:
        raise UserError(
            f"server.backends={config.backends} are for GPUs, and this machine has no GPU: set "
            "server=cpu (small targets), or server.urls of servers that run elsewhere"
        )
    whats = launches(config, model, log, args=args, envs=envs, plugins=plugins)
    with launch(*whats, timeout_s=config.timeout_s) as servers:
        yield servers


def launches(
    config: ServerConfig,
    model: Path,
    log: Path,
    *,
    args: dict[str, Any] | None = None,
    envs: Sequence[dict[str, str]] = ({},),
    plugins: Sequence[str] = (),
) -> list[Launch]:
    """What `get_servers` starts; the configuration's flags give way to `args`.

    Each server has GPUs of its own while there are enough, then they are shared in turns; the first
    one's begin at `server.args.base_gpu_id`.
    """
    limits = Limits(
        deadline_s=config.deadline_s, memory_gb=config.memory_gb, stall_s=config.stall_s
    )
    gpus = _gpus(config.args)
    first = int(config.args.get("base_gpu_id") or 0)
    places = max(1, (torch.cuda.device_count() - first) // gpus)
    begins = [first + number % places * gpus for number in range(len(envs))]
    return [
        Launch(
            model=model,
            log=log if len(envs) == 1 else log.with_stem(f"{log.stem}-{number}"),
            args={
                **config.args,
                **({"base_gpu_id": begins[number]} if begins[number] else {}),
                **(args or {}),
            },
            plugins=plugins,
            backends=config.backends,
            env={**config.env, **env},
            host=config.host,
            port=None if config.port is None else config.port + number,
            limits=limits,
        )
        for number, env in enumerate(envs)
    ]


def _gpus(args: dict[str, Any]) -> int:
    """How many GPUs a server with these flags takes, on one machine."""

    def size(letters: str, word: str) -> int:
        names = (f"{letters}_size", letters, f"{word}_parallel_size")
        return int(next((args[name] for name in names if args.get(name)), 1))

    replicas = 1 if args.get("enable_dp_attention") else size("dp", "data")
    return size("tp", "tensor") * size("pp", "pipeline") * replicas


def tell_other_target(found: dict[str, Any], names: set[str], url: str) -> None:
    """Warn that a server knows its model by another name than the target's.

    It may be the same model all the same: elsewhere it lies in another folder.

    Args:
        found: of `Client.info`. names: of the target.
    """
    served = found.get("model_path")
    if served is None or Path(served).resolve() not in {Path(name).resolve() for name in names}:
        log.warning("%s serves %s: is it the target, %s?", url, served, " or ".join(sorted(names)))


@contextmanager
def get_server(
    config: ServerConfig, model: Path, log: Path, args: dict[str, Any] | None = None
) -> Iterator[Server]:
    """The one server of a stage that measures; see `get_servers`."""
    with get_servers(config, model, log, args=args) as (server,):
        yield server
