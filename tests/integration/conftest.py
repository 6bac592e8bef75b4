"""One capturing server for all tests that need one: the tiny target, chunks of 64 tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from eagle3.config import ServerConfig
from eagle3.serving.from_config import get_server
from eagle3.target import Target
from extraction.check import Verifier
from extraction.extract import Extractor, _require_capture
from extraction.spool import LAYERS_VARIABLE, SPOOL_VARIABLE, Spool

AUX_LAYERS = [1, 3, 4]
CHUNK = 64
CPU_ARGS = {
    "context_length": 1024,
    "max_total_tokens": 8192,
    "max_running_requests": 16,
    "mem_fraction_static": 0.2,
    "skip_server_warmup": True,
}


@pytest.fixture(scope="session")
def capture_server(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Extractor]:
    folder = tmp_path_factory.mktemp("capture")
    spool = Spool.create(folder / "spool")
    config = ServerConfig(args={**CPU_ARGS, "chunked_prefill_size": CHUNK}, deadline_s=400)
    with get_server(
        config,
        target.folder,
        folder / "server.log",
        args={"disable_radix_cache": True},
        env={SPOOL_VARIABLE: str(spool.folder), LAYERS_VARIABLE: json.dumps(AUX_LAYERS)},
        plugins=["eagle3_capture"],
    ) as server:
        _require_capture(spool, AUX_LAYERS, {str(target.folder)})
        yield Extractor(server.client, spool, Verifier(target, len(AUX_LAYERS)))
