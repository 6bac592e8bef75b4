"""A server as a run's configuration describes it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from eagle3.config import ServerConfig
from eagle3.serving.server import Launch, Server, connect, launch
from eagle3.serving.watch import Limits


def get_server(
    config: ServerConfig,
    model: Path,
    log: Path,
    *,
    args: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    plugins: Sequence[str] = (),
) -> AbstractContextManager[Server]:
    """Connect to `server.url`, or start a server with the stage's own args, env and plugins."""
    if config.url:
        return connect(config.url, config.api_key, config.timeout_s)
    return launch(
        Launch(
            model=model,
            log=log,
            args={**config.args, **(args or {})},
            plugins=plugins,
            backends=config.backends,
            env={**config.env, **(env or {})},
            host=config.host,
            port=config.port,
            limits=Limits(
                deadline_s=config.deadline_s, memory_gb=config.memory_gb, stall_s=config.stall_s
            ),
        ),
        config.timeout_s,
    )
