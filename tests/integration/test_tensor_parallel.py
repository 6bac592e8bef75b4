"""One and two tensor-parallel ranks of the same target capture the same, and each record once.

On the CPU engine in float32, and on two GPUs in bf16 where there are some.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3.serving.client import in_order
from eagle3.serving.server import Launch, Server, launch
from eagle3.serving.watch import Limits
from eagle3.store import codecs
from extraction.capture import server_args
from extraction.samples import TokenSample
from extraction.spool import Spool, Ticket, environment
from tests.integration import tiny_models
from tests.integration.conftest import CHUNK, CPU_ARGS
from tests.integration.test_families import make_samples

log = logging.getLogger(__name__)
pytestmark = pytest.mark.server
AUX_LAYERS = [1, 3, 5]
LENGTHS = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 17, 300, 33, 7, 129]
SHAPE = dict(hidden_size=256, intermediate_size=512, initializer_range=0.05)
"""Heads of 64, for which SGLang's GPU kernels are made."""
GPU_ARGS = {
    **CPU_ARGS,
    "dtype": "bfloat16",
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "cuda_graph_backend_prefill": "disabled",
    "disable_custom_all_reduce": True,
}
UNEQUAL_MEMORY = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"
"""SGLang refuses two ranks when something else holds part of one GPU: here, the other server."""
IN_MOVED_TO = 0x80
"""From linux/inotify.h: a file got its name by a rename."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """What servers run on.

    tolerance: of a sample's states, norm of the difference over norm of the states. In bf16 halves
    that are summed move these layers by up to 0.014 in Hugging Face's forward, other groups of
    prompts by as much again; the layer next to one differs by 0.4 and more.
    """

    args: dict[str, Any]
    tolerance: float


ENGINES = [
    pytest.param(
        Engine(args=CPU_ARGS, tolerance=1e-5),
        id="cpu",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(
                torch.cuda.is_available(), reason="the CPU engine is for machines without a GPU"
            ),
        ],
    ),
    pytest.param(
        Engine(args=GPU_ARGS, tolerance=0.05),
        id="gpu",
        marks=[
            pytest.mark.gpu,
            pytest.mark.multi_gpu,
            pytest.mark.skipif(
                torch.cuda.device_count() < 2,
                reason=f"needs two GPUs, {torch.cuda.device_count()} are visible",
            ),
        ],
    ),
]


class Arrivals:
    """How often each name appeared in a folder by a rename, as Linux tells (inotify)."""

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.handle = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if (
            self.handle < 0
            or libc.inotify_add_watch(self.handle, os.fsencode(folder), IN_MOVED_TO) < 0
        ):
            raise OSError(ctypes.get_errno(), "inotify")

    def count(self) -> Counter[str]:
        """Since the last call; closes the watch."""
        found: Counter[str] = Counter()
        while True:
            try:
                data = os.read(self.handle, 1 << 16)
            except BlockingIOError:
                os.close(self.handle)
                return found
            while data:
                _, _, _, size = struct.unpack_from("iIII", data)
                found[data[16 : 16 + size].rstrip(b"\0").decode()] += 1
                data = data[16 + size :]


@dataclass(kw_only=True, slots=True)
class Captured:
    """What a server left in its spool for a list of samples."""

    records: list[dict[str, torch.Tensor]] = field(default_factory=list)
    names: list[str]
    """Of the records, in the samples' order."""
    files: list[str]
    """Everything in the spool but the server's own files."""
    arrivals: Counter[str]
    ranks: list[str]
    """The plugin's lines in the log."""


def capture(server: Server, spool: Spool, samples: list[TokenSample]) -> Captured:
    """Ask for every sample once, all at the same time, and leave what comes where it is."""
    with spool.session(codecs.get("fp32")) as session:
        tickets = [
            Ticket(session=session.name, number=i, attempt=0, num_tokens=len(s.input_ids))
            for i, s in enumerate(samples)
        ]
        arrivals = Arrivals(spool.folder)

        def ask(number: int) -> None:
            server.client.generate(
                samples[number].input_ids.tolist(),
                {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
                rid=tickets[number].rid(spool.secret),
            )

        for _ in in_order(ask, range(len(samples)), len(samples)):
            pass
        paths = [spool.path(ticket) for ticket in tickets]
        deadline = time.monotonic() + 60
        while not all(path.exists() for path in paths):
            assert spool.error() is None, spool.error()
            assert time.monotonic() < deadline, "a record did not come"
            time.sleep(0.05)
        time.sleep(1.0)  # a second writer may be slower
        assert spool.error() is None
        assert server.log is not None
        own = {"secret", "session", "capture.json"}
        return Captured(
            records=[load_file(path) for path in paths],
            names=[path.name for path in paths],
            files=sorted(p.name for p in spool.folder.iterdir() if p.name not in own),
            arrivals=arrivals.count(),
            ranks=[
                line
                for line in server.log.read_text(errors="replace").splitlines()
                if "capture plugin:" in line
            ],
        )


@dataclass(kw_only=True, slots=True)
class Pair:
    samples: list[TokenSample]
    one: Captured
    two: Captured
    tolerance: float


@pytest.fixture(scope="module", params=ENGINES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The same samples through a server of one rank and one of two, side by side."""
    engine: Engine = request.param
    folder = tmp_path_factory.mktemp("tensor-parallel")
    tiny_models.build(folder / "model", "LlamaForCausalLM", **SHAPE)
    samples = make_samples(LENGTHS)
    spools = [Spool.create(folder / f"spool-{size}") for size in (1, 2)]
    servers = [
        Launch(
            model=folder / "model",
            log=folder / f"tp-{size}.log",
            args={**engine.args, "chunked_prefill_size": CHUNK, "tp_size": size, **server_args()},
            env={**environment(spool.folder, AUX_LAYERS), UNEQUAL_MEMORY: "0"},
            plugins=["eagle3_capture"],
            limits=Limits(deadline_s=300, memory_gb=None, stall_s=None),
        )
        for size, spool in zip((1, 2), spools, strict=True)
    ]
    with launch(*servers) as started:
        one, two = map(capture, started, spools, [samples, samples])
    return Pair(samples=samples, one=one, two=two, tolerance=engine.tolerance)


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found - wanted).norm() / wanted.norm())


def test_two_ranks_capture_what_one_captures(pair: Pair) -> None:
    """Each layer and the final states of each sample; the tokens to the last one."""
    worst = 0.0
    for sample, one, two in zip(pair.samples, pair.one.records, pair.two.records, strict=True):
        for record in (one, two):
            assert record["input_ids"].tolist() == sample.input_ids.tolist()
            rows = [len(record["aux.values"]), len(record["final.values"])]
            assert rows == [len(sample.input_ids)] * 2
        parts = [
            (*record["aux.values"].chunk(len(AUX_LAYERS), 1), record["final.values"])
            for record in (two, one)
        ]
        for layer, found, wanted in zip([*AUX_LAYERS, "final"], *parts, strict=True):
            assert (apart := distance(found, wanted)) < pair.tolerance, (sample.id, layer)
            worst = max(worst, apart)
    log.info("two ranks against one: %.2g at most, %.2g allowed", worst, pair.tolerance)


def test_the_ranks_did_split_the_work(pair: Pair) -> None:
    """Sums of halves round otherwise: equal bits everywhere would mean the same server twice."""
    assert any(
        not torch.equal(one["final.values"], two["final.values"])
        for one, two in zip(pair.one.records, pair.two.records, strict=True)
    )


def test_every_record_is_written_once_by_rank_0(pair: Pair) -> None:
    for captured, size in ((pair.one, 1), (pair.two, 2)):
        assert captured.files == sorted(captured.names)
        assert {name: captured.arrivals[name] for name in captured.names} == dict.fromkeys(
            captured.names, 1
        )
        assert set(captured.arrivals) == set(captured.names)
        assert len(captured.ranks) == size, captured.ranks
        writers = [line for line in captured.ranks if "writes" in line]
        assert len(writers) == 1 and "attention-TP rank 0 writes" in writers[0], captured.ranks
