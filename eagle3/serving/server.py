"""An SGLang server of our own (a child process) or somebody's (by URL), behind one small object."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from eagle3.errors import UserError
from eagle3.serving import cpu, watch
from eagle3.serving.client import Client

log = logging.getLogger(__name__)
OLDEST, NEWEST = (0, 5, 14), (0, 5, 23)


@dataclass(kw_only=True, slots=True)
class Launch:
    """What to start.

    model: local folder of the target. args: SGLang flags to values, underscores allowed; True gives
    a bare flag, False and None leave it out. plugins: names of our SGLang plugins the server may
    load.
    backends: attention backends to try in order (empty: SGLang's choice). env: more environment.
    """

    model: Path
    log: Path
    args: dict[str, Any] = field(default_factory=dict)
    plugins: Sequence[str] = ()
    backends: Sequence[str] = ()
    env: dict[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int | None = None
    limits: watch.Limits = field(
        default_factory=lambda: watch.Limits(deadline_s=900, memory_gb=None, stall_s=None)
    )


@dataclass(kw_only=True, slots=True)
class Server:
    """A server that has answered a request. `pid` is None for one we did not start."""

    url: str
    client: Client
    pid: int | None = None
    log: Path | None = None
    backend: str | None = None


def check_version() -> str:
    """The installed SGLang's version.

    Raises:
        UserError: none, or one this project has not been tried on.
    """
    try:
        found = version("sglang")
    except PackageNotFoundError:
        raise UserError("sglang is not installed; run `make setup`") from None
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:3] if part.isdigit())
    if not OLDEST <= numbers <= NEWEST:
        raise UserError(
            f"sglang {found} is installed; supported are {'.'.join(map(str, OLDEST))} to "
            f"{'.'.join(map(str, NEWEST))}"
        )
    return found


@contextmanager
def connect(url: str, api_key: str | None = None, timeout_s: float = 600.0) -> Iterator[Server]:
    """Use a running server.

    Raises:
        UserError: nothing answers there.
    """
    client = Client(url, api_key=api_key, timeout_s=timeout_s)
    if not client.answers():
        raise UserError(f"no SGLang server answers at server.url={url}")
    yield Server(url=url, client=client)


@contextmanager
def launch(what: Launch, timeout_s: float = 600.0) -> Iterator[Server]:
    """Start a server, wait until it generates a token, and end it with its children afterwards.

    Raises:
        ServerFailed: no backend of the list came up; says why, with the log's tail.
    """
    check_version()
    failures = []
    for backend in what.backends or (None,):
        process = _spawn(what, port := what.port or _free_port(), backend)
        client = Client(f"http://{what.host}:{port}", timeout_s=timeout_s)
        try:
            seconds = watch.wait_until(client.answers, process.pid, what.log, what.limits)
        except watch.ServerFailed as failure:
            watch.end(process.pid)
            process.wait()
            failures.append(f"attention backend {backend or 'default'}: {failure}")
            log.warning("%s", failures[-1])
            continue
        except BaseException:
            watch.end(process.pid)
            raise
        log.info("server ready at %s after %.0f s (log: %s)", client.url, seconds, what.log)
        try:
            yield Server(
                url=client.url, client=client, pid=process.pid, log=what.log, backend=backend,
            )  # fmt: skip
        finally:
            watch.end(process.pid)
            process.wait()
        return
    raise watch.ServerFailed("\n\n".join(failures))


def command(what: Launch, port: int, backend: str | None) -> list[str]:
    """The command line that starts a server."""
    args = {
        "model_path": str(what.model),
        "host": what.host,
        "port": port,
        "attention_backend": backend,
        **what.args,
    }
    line = [sys.executable, "-m", "sglang.launch_server"]
    line += cpu.server_args() if cpu.needed() else []
    for name, value in args.items():
        if value is None or value is False:
            continue
        line.append("--" + name.replace("_", "-"))
        if isinstance(value, list | tuple):
            line += [str(v) for v in value]
        elif value is not True:
            line.append(str(value))
    return line


def _spawn(what: Launch, port: int, backend: str | None) -> subprocess.Popen[bytes]:
    env = dict(os.environ)
    plugins = list(what.plugins)
    if cpu.needed():
        env.update(cpu.environment())
        plugins.append("eagle3_cpu")
    # a whitelist; the name `none` keeps every plugin out
    env["SGLANG_PLUGINS"] = ",".join(plugins) or "none"
    env.update(what.env)
    what.log.parent.mkdir(parents=True, exist_ok=True)
    line = command(what, port, backend)
    log.info("starting %s", " ".join(line))
    with what.log.open("wb") as output:
        return subprocess.Popen(
            line,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
            preexec_fn=watch.die_with_parent,
        )


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
