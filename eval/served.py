"""Everything answered on one server, plain or with the drafter; what is kept is not asked again."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import quote

from eagle3 import provenance
from eagle3.config import Config, EvalConfig
from eagle3.manifest import Manifest
from eagle3.serving.client import Client, RequestFailed
from eagle3.serving.from_config import get_server, tell_other_target
from eagle3.target import Target
from eval.benchmarks import Prompt
from eval.differences import Differences, differences
from eval.kept import KIND, Kept
from eval.measure import Run, histograms, measure
from eval.outputs import Place, Runs
from eval.requirements import require_room, require_settings
from eval.speculation import Speculation

log = logging.getLogger(__name__)
SETTINGS = (
    "version", "attention_backend", "dtype", "disable_radix_cache", "tp_size",
    "max_running_requests",  # SGLang lowers it where it speculates: more requests then wait
)  # fmt: skip
"""Of a server, beside those of speculation, to be recorded."""


@dataclass(kw_only=True, slots=True)
class Served:
    """What one server gave.

    settings: in force. starts: when the server was there -> what was measured then; more than one
    if the command was ended in between. differences: of each run to those it was compared with.
    """

    runs: Runs
    settings: dict[str, Any]
    starts: dict[str, list[str]]
    differences: dict[Place, Differences]


def measured_with(
    config: Config, target: Target, prompts: dict[str, list[Prompt]], drafter: Manifest, **more: Any
) -> Manifest:
    """Of what is kept: figures from another drafter, machine or setting must not share a table.

    Concurrency is not in it: each has runs of its own. more: what else must stay the same.
    """
    versions = provenance.versions()
    asked = {name: [p.input_ids for p in items] for name, items in prompts.items()}
    return Manifest(
        kind=KIND,
        match={
            "target": target.identity(),
            # the files themselves: a config.json may have been edited since
            "drafter": {
                name: provenance.hash_file(config.drafter_dir / name)
                for name in ("config.json", "model.safetensors")
            },
            "prompts": provenance.hash_json(asked),
            "max_new_tokens": config.eval.max_new_tokens,
            "warmup": config.eval.warmup,
            "plain_url": config.eval.plain_url,
            "speculative_url": config.eval.speculative_url,
            "server": {key: getattr(config.server, key) for key in ("args", "env", "backends")},
            "machine": provenance.machine(),
            "versions": {name: versions[name] for name in ("sglang", "torch")},
            **more,
        },
        config=config.resolved(),
        inputs={"drafter": drafter.hash()},
    )


def run_server(
    config: Config,
    target: Target,
    prompts: dict[str, list[Prompt]],
    name: str,
    speculation: Speculation | None,
    kept: Kept,
    others: Runs | None = None,
) -> Served:
    """Answer everything that is not kept yet, and keep it.

    Only if something is missing is a server started; one that is running already is always asked
    whether it has the settings of what is kept.

    Args:
        name: of its log.
        speculation: None serves the target alone.
        others: runs of the same prompts; where their outputs part from these is looked up once all
            is measured.
    """
    places = [(benchmark, c) for benchmark in prompts for c in config.eval.concurrency]
    url = config.eval.speculative_url if speculation else config.eval.plain_url
    if url is None and _complete(kept, places, others):
        log.info("%s: everything is measured already, and no server is started", name)
    else:
        with _serving(config, target, prompts, name, speculation, url) as (client, settings):
            kept.begin(settings)
            for place in places:
                if _piece(place) in kept:
                    log.info("%s, %s x%d is measured already", name, *place)
                    continue
                run = _measured(client, config.eval, prompts, place, speculation)
                kept.add(_piece(place), asdict(run))
                log.info("%s, %s x%d: %.1f tok/s", name, *place, run.speed()["tok_s"])
            for place, other in (others or {}).items():
                run = _run(kept, place)
                if (piece := _compared(place, run, other)) not in kept:
                    found = differences(client, prompts[place[0]], run, other)
                    kept.add(piece, asdict(found))
    runs = {place: _run(kept, place) for place in places}
    starts: dict[str, list[str]] = {}
    for place in places:
        starts.setdefault(kept.start(_piece(place)), []).append("{} x{}".format(*place))
    return Served(
        runs=runs,
        settings=kept.settings,
        starts=dict(sorted(starts.items())),
        differences={
            place: Differences(**kept[_compared(place, runs[place], other)])
            for place, other in (others or {}).items()
        },
    )


def _piece(place: Place) -> str:
    benchmark, concurrency = place
    return f"{quote(benchmark, safe='')}-x{concurrency}"


def _compared(place: Place, run: Run, other: Run) -> str:
    """Piece of the differences of exactly these outputs."""
    outputs = [[answer.output_ids for answer in one.answers] for one in (run, other)]
    return f"{_piece(place)}-differences-{provenance.hash_json(outputs)[:16]}"


def _run(kept: Kept, place: Place) -> Run:
    return Run.from_dict(kept[_piece(place)])


def _complete(kept: Kept, places: list[Place], others: Runs | None) -> bool:
    return all(_piece(place) in kept for place in places) and all(
        _compared(place, _run(kept, place), other) in kept
        for place, other in (others or {}).items()
    )


@contextmanager
def _serving(
    config: Config,
    target: Target,
    prompts: dict[str, list[Prompt]],
    name: str,
    speculation: Speculation | None,
    url: str | None,
) -> Iterator[tuple[Client, dict[str, Any]]]:
    """A server that is fit for these prompts: its client and its settings in force.

    What fails within is told with the end of its log.
    """
    args: dict[str, Any] = {"disable_radix_cache": True, "speculative_algorithm": None}
    if speculation:
        args |= speculation.server_args(config.drafter_dir.resolve())
    log_file = config.run_dir / "logs" / f"{name}-server.log"
    which = replace(config.server, urls=[url] if url else [])
    with get_server(which, target.folder, log_file, args) as server:
        try:
            info = server.client.info()
            tell_other_target(info, {config.target.path, str(target.folder)}, server.url)
            require_settings(info, args)
            require_room(info, prompts, config.eval.max_new_tokens, speculation)
            settings = {k: v for k, v in info.items() if k.startswith("speculative_")}
            yield server.client, settings | {k: info.get(k) for k in SETTINGS}
        except RequestFailed as failure:
            raise RequestFailed(f"{failure}\n{server.last_words()}") from failure


def _measured(
    client: Client,
    config: EvalConfig,
    prompts: dict[str, list[Prompt]],
    place: Place,
    speculation: Speculation | None,
) -> Run:
    benchmark, concurrency = place
    run = measure(client, prompts[benchmark], config.max_new_tokens, concurrency, config.warmup)
    if speculation:
        run.histograms = histograms(run, speculation.num_steps)
    return run
