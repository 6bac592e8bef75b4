"""Servers that are only told about, for tests of what is measured, kept and asked again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eagle3.config import Config, ServerConfig, TargetConfig
from eagle3.manifest import Manifest
from eagle3.serving import cpu
from eagle3.serving.client import Answer
from eagle3.serving.server import Server
from eval import benchmarks, kept, live, served, tune
from eval.benchmarks import Prompt
from eval.measure import HISTOGRAM, Run
from tests.conftest import TINY


@dataclass
class FakeClient:
    """Of the server called `name`; every first difference is a margin of a quarter of a nat."""

    name: str
    settings: dict[str, Any]
    event: Callable[[str], None]

    def info(self) -> dict[str, Any]:
        return self.settings

    def generate(self, ids: list[int], sampling: dict, token_ids_logprob: list[int]) -> Answer:
        self.event("look up")
        one, other = token_ids_logprob
        meta = {"output_token_ids_logprobs": [[(-1.0, one, None), (-1.25, other, None)]]}
        return Answer(output_ids=[one], finish="length", latency_s=0.1, meta=meta)


class FakeServers:
    """Stands in for `get_server` and `measure` of eval.served.

    run: what a server (its log's name) gives for prompts at a concurrency. started, measured: names
    of servers, and of runs, in their order. event: called with whatever happens. settings: of all
    servers, beside what they are asked for.
    """

    def __init__(self, run: Callable[[str, list[Prompt], int], Run]) -> None:
        self.run = run
        self.started: list[str] = []
        self.measured: list[str] = []
        self.failures: dict[str, Exception | type[BaseException]] = {}
        self.settings: dict[str, Any] = {"attention_backend": "triton", "version": "0.5.23"}
        self.event: Callable[[str], None] = lambda _: None

    @contextmanager
    def get_server(
        self, config: ServerConfig, model: Path, log: Path, args: dict[str, Any]
    ) -> Iterator[Server]:
        name = log.stem.removesuffix("-server").split("-", 1)[1]
        self.started.append(name)
        self.event("start")
        if name in self.failures:
            raise self.failures[name]
        settings = {"model_path": str(model), **args, **self.settings}
        client = FakeClient(name, settings, lambda what: self.event(what))
        yield Server(url="http://fake", client=client)  # type: ignore[arg-type]

    def measure(
        self, client: FakeClient, prompts: list[Prompt], most: int, concurrency: int, warmup: int
    ) -> Run:
        self.measured.append(f"{client.name} {prompts[0].id} x{concurrency}")
        self.event("measure")
        return self.run(client.name, prompts, concurrency)

    def install(self, monkeypatch: pytest.MonkeyPatch, prompts: dict[str, list[Prompt]]) -> None:
        """For live and tune, with a drafter that is not looked at."""
        drafter = Manifest(kind="drafter", match={})
        for command in (live, tune):
            monkeypatch.setattr(command, "require_servable", lambda *_: drafter)
        monkeypatch.setattr(benchmarks, "load", lambda *_: prompts)
        monkeypatch.setattr(served, "get_server", self.get_server)
        monkeypatch.setattr(served, "measure", self.measure)
        monkeypatch.setattr(kept, "now", lambda: f"time {len(self.started)}")
        monkeypatch.setattr(cpu, "needed", lambda: False)


def configured(tmp_path: Path, **parts: Any) -> Config:
    """A run with a drafter that is not looked at. parts: further fields of the configuration."""
    config = Config(
        run_name="run", runs_dir=str(tmp_path), target=TargetConfig(path=str(TINY)), **parts
    )
    config.eval.concurrency = [1, 8]
    config.drafter_dir.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (config.drafter_dir / name).write_text(name)
    return config


def drafts(steps: int, *counts: int) -> dict[str, Any]:
    """What a server says of an answer: verify steps by accepted drafts, of a chain."""
    histogram = [*counts] + [0] * (steps + 1 - len(counts))
    return {"spec_verify_ct": sum(counts), HISTOGRAM: histogram}
