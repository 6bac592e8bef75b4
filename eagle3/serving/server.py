"""An SGLang server of our own (a child process) or somebody's (by URL), behind one small object."""

from __future__ import annotations

import logging
import os
import random
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
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
    """A server that has answered a request. `process` is None for one we did not start."""

    url: str
    client: Client
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None
    backend: str | None = None

    def ended(self) -> bool:
        """Whether it is a server of ours that is no more."""
        return self.process is not None and self.process.poll() is not None

    def last_words(self) -> str:
        """State and end of the log, for an error message."""
        if self.process is None or self.log is None:
            return f"{self.url} does not answer"
        state = f"ended with status {self.process.poll()}" if self.ended() else "does not answer"
        return f"{self.url} {state}. End of {self.log}:\n{watch.tail(self.log)}"


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


def require_drafter_flags(flags: Iterable[str]) -> None:
    """The installed SGLang must know these switches of an EAGLE-3 drafter's config.json.

    One that does not drops them without a word (0.5.14 norm_before_fc), and drafts are rejected.

    Raises:
        UserError: it does not.
    """
    found = find_spec("sglang")
    for folder in (found and found.submodule_search_locations) or ():
        source = (Path(folder) / "srt" / "models" / "llama_eagle3.py").read_text()
        unknown = [flag for flag in flags if f'"{flag}"' not in source]
        if unknown:
            raise UserError(
                f"sglang {check_version()} does not know {', '.join(unknown)} and would serve this "
                "drafter without it. Install a newer one, or train with other norms "
                "(draft.fc_norm=true in place of norm_before_fc)"
            )


def connect(url: str, api_key: str | None = None, timeout_s: float = 600.0) -> Server:
    """Use a running server.

    Raises:
        UserError: nothing answers there.
    """
    client = Client(url, api_key=api_key, timeout_s=timeout_s)
    if (trouble := client.trouble()) is not None:
        raise UserError(f"no SGLang server answers at {url}: {trouble}")
    return Server(url=url, client=client)


@contextmanager
def launch(*whats: Launch, timeout_s: float = 600.0) -> Iterator[list[Server]]:
    """Start servers side by side, wait until each generates a token, and end them afterwards.

    All run with the same attention backend: the first of the first one's list with which all come
    up.

    Raises:
        ServerFailed: there is none; says why, with the log's tail.
    """
    check_version()
    failures = []
    for backend in whats[0].backends or (None,):
        servers: list[Server] = []
        try:
            servers += [_spawn(what, backend, timeout_s) for what in whats]
            for server, what in zip(servers, whats, strict=True):
                _wait(server, what)
        except watch.ServerFailed as failure:
            _end(servers)
            failures.append(f"attention backend {backend or 'default'}: {failure}")
            log.warning("%s", failures[-1])
            continue
        except BaseException:
            _end(servers)
            raise
        try:
            yield servers
        finally:
            _end(servers)
        return
    remedy = "What it was started with is the configuration's `server`: args, backends and limits."
    raise watch.ServerFailed("\n\n".join([*failures, remedy]))


def _wait(server: Server, what: Launch) -> None:
    assert server.process is not None
    seconds = watch.wait_until(server.client.answers, server.process.pid, what.log, what.limits)
    log.info("server ready at %s after %.0f s (log: %s)", server.url, seconds, what.log)


def _end(servers: Sequence[Server]) -> None:
    for server in servers:
        if server.process is not None:
            watch.end(server.process.pid)
            server.process.wait()


def command(what: Launch, port: int | None, backend: str | None) -> list[str]:
    """The command line that starts a server; without a port SGLang takes its default."""
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


def environment(what: Launch) -> dict[str, str]:
    """What a server needs in its environment beside the inherited one."""
    env: dict[str, str] = {}
    plugins = list(what.plugins)
    if cpu.needed():
        env.update(cpu.environment())
        plugins.append("eagle3_cpu")
    if plugins:
        env["SGLANG_PLUGINS"] = ",".join(plugins)
    return env | what.env


def shell_command(what: Launch, backend: str | None) -> str:
    """One line for a shell that starts the server outside this framework."""
    assignments = [f"{name}={shlex.quote(value)}" for name, value in environment(what).items()]
    line = ["python", *command(what, what.port, backend)[1:]]
    return " ".join([*assignments, shlex.join(line)])


def _spawn(what: Launch, backend: str | None, timeout_s: float) -> Server:
    port = what.port or _free_port()
    # a whitelist; the name `none` keeps every plugin out
    env = {**os.environ, "SGLANG_PLUGINS": "none", **environment(what)}
    what.log.parent.mkdir(parents=True, exist_ok=True)
    args = {"nccl_port": _free_port(), **what.args}
    line = command(replace(what, args=args), port, backend)
    log.info("starting %s", " ".join(line))
    with what.log.open("wb") as output:
        process = subprocess.Popen(
            line,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
            preexec_fn=watch.die_with_parent,
        )
    url = f"http://{what.host}:{port}"
    client = Client(url, timeout_s=timeout_s)
    return Server(url=url, client=client, process=process, log=what.log, backend=backend)


def _free_port() -> int:
    """A port nobody listens on; SGLang derives others by adding up to 10,000, so not a high one."""
    while True:
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port := random.randrange(20000, 50000)))
            except OSError:
                continue
            return port
