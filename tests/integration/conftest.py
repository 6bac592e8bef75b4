"""One capturing server for all tests that need one: the tiny target, chunks of 64 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from eagle3.config import Config, ServerConfig, TargetConfig
from eagle3.serving.client import in_order
from eagle3.serving.from_config import get_servers
from eagle3.serving.server import Server
from eagle3.store import codecs
from eagle3.store.sample import Encoded
from eagle3.target import Target
from extraction.capture import Extractor, extractor, server_args
from extraction.samples import TokenSample
from extraction.spool import Spool, environment

AUX_LAYERS = [1, 3, 4]
CHUNK = 64
CPU_ARGS = {
    "context_length": 1024,
    "max_total_tokens": 8192,
    "max_running_requests": 16,
    "mem_fraction_static": 0.2,
    "skip_server_warmup": True,
}


@dataclass(frozen=True)
class CaptureServer:
    """A server as a user would start it, and its spool."""

    server: Server
    spool: Spool

    def overrides(self) -> list[str]:
        """What makes a command use it."""
        return [f"server.urls=[{self.server.url}]", f"extract.spools=[{self.spool.folder}]"]


@pytest.fixture(scope="session")
def capture_server(
    target: Target, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CaptureServer]:
    folder = tmp_path_factory.mktemp("capture")
    spool = Spool.create(folder / "spool")
    config = ServerConfig(args={**CPU_ARGS, "chunked_prefill_size": CHUNK}, deadline_s=400)
    with get_servers(
        config,
        target.folder,
        folder / "server.log",
        args=server_args(),
        envs=[environment(spool.folder, AUX_LAYERS)],
        plugins=["eagle3_capture"],
    ) as (server,):
        yield CaptureServer(server, spool)


@pytest.fixture
def capturing(capture_server: CaptureServer, target: Target, tmp_path: Path) -> Iterator[Extractor]:
    """The extract stage's own view of that server."""
    config = Config(
        run_name="t",
        runs_dir=str(tmp_path),
        target=TargetConfig(path=str(target.folder)),
        server=ServerConfig(urls=[capture_server.server.url]),
    )
    config.extract.spools = [str(capture_server.spool.folder)]
    with extractor(config, target, AUX_LAYERS, codecs.get("fp32"), longest=1) as found:
        yield found


def capture_all(
    extractor: Extractor, samples: list[TokenSample], concurrency: int
) -> list[Encoded]:
    """Capture them all, none rejected."""

    def work(number: int) -> Encoded:
        found = extractor.capture(number, samples[number])
        assert isinstance(found, Encoded), found
        return found

    return list(in_order(work, range(len(samples)), concurrency))
