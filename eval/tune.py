"""Which speculative settings serve the drafter fastest?

`python -m eval.tune experiment=<name>` answers the run's benchmarks on the plain server and on one
server for each combination of `tune.num_steps`, `tune.topk` and `tune.draft_tokens`, and writes
<run>/eval/tune.json and tune.md: a table, the best setting at each concurrency, and the command
that launches it. Each run is kept in <run>/eval/tune/ as soon as it is measured, so that a rerun
measures only what is missing; combinations that failed are tried again.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle3 import provenance
from eagle3.command import command
from eagle3.config import Config
from eagle3.errors import UserError
from eagle3.manifest import write_json
from eagle3.serving.client import RequestFailed
from eagle3.serving.from_config import launches
from eagle3.serving.server import shell_command
from eagle3.serving.watch import ServerFailed
from eagle3.target import Target
from eval import benchmarks, tune_report
from eval.benchmarks import Prompt
from eval.kept import Kept, claimed
from eval.live import require_servable
from eval.requirements import require_measurable
from eval.served import measured_with, run_server
from eval.speculation import Speculation, combinations
from eval.tune_figures import Record, figures, rows, totals

log = logging.getLogger(__name__)


def measured(
    config: Config,
    target: Target,
    prompts: dict[str, list[Prompt]],
    speculation: Speculation | None,
    folder: Path,
) -> Record:
    """One server's record."""
    name = speculation.name if speculation else "plain"
    record: Record = {"speculation": speculation and asdict(speculation), "failed": None}
    try:
        served = run_server(
            config, target, prompts, f"tune-{name}", speculation, Kept(folder / name)
        )
    except (ServerFailed, RequestFailed) as failure:
        log.warning("%s failed: %s", name, failure)
        return record | {"failed": str(failure)}
    runs = [figures(benchmark, run, speculation) for (benchmark, _), run in served.runs.items()]
    return record | {"server": served.settings, "starts": served.starts, "runs": runs}


def launch_command(config: Config, target: Target, record: Record) -> str | None:
    """Serves the drafter as measured, but with the prefix cache on; None for plain serving.

    Paths are absolute.
    """
    if record["speculation"] is None:
        return None
    args = Speculation(**record["speculation"]).server_args(config.drafter_dir.resolve())
    (what,) = launches(config.server, target.folder.resolve(), Path(), args=args)
    # of a list of backends, the one that came up; without a list SGLang chooses again
    backend = record["server"]["attention_backend"] if config.server.backends else None
    return shell_command(what, backend)


def choose(table: list[dict[str, Any]], servers: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The fastest server at each concurrency, with its command; of equals the one measured first.

    table: of `totals`.
    """
    commands = [(server["speculation"], server["command"]) for server in servers]
    best = {}
    for concurrency in dict.fromkeys(row["concurrency"] for row in table):
        same = [row for row in table if row["concurrency"] == concurrency]
        first = max(same, key=lambda row: row["tok_s"])
        line = next(line for speculation, line in commands if speculation == first["speculation"])
        best[str(concurrency)] = {**first, "command": line}
    return best


def tune(config: Config) -> dict[str, Any]:
    """The whole stage; returns what tune.json holds.

    Raises:
        UserError: the configuration cannot be measured, or the records are of another one.
        RuntimeError: every combination failed.
    """
    if config.server.urls or config.eval.speculative_url:
        raise UserError(
            "tune starts a server for each setting, which a running one cannot change: set "
            "server.urls=[] eval.speculative_url=null (eval.plain_url may stay)"
        )
    wanted = combinations(config.tune)
    target = Target.from_config(config.target)
    prompts = benchmarks.load(config, target)
    require_measurable(config.eval, prompts)
    manifest = measured_with(config, target, prompts, require_servable(config, target))
    folder = config.eval_dir / "tune"
    with claimed(folder, manifest, refuse=True):
        records = [measured(config, target, prompts, one, folder) for one in (None, *wanted)]
    failed = [{k: r[k] for k in ("speculation", "failed")} for r in records if r["failed"]]
    if all(record["failed"] for record in records[1:]):
        reasons = [f"{one['speculation'] or 'plain'}: {one['failed']}" for one in failed]
        raise RuntimeError("every combination failed:\n" + "\n\n".join(reasons))
    servers = [
        {
            "speculation": record["speculation"],
            "settings": record["server"],
            "starts": record["starts"],
            "command": launch_command(config, target, record),
        }
        for record in records
        if not record["failed"]
    ]
    table = rows(records)
    together = totals(table)
    results = {
        "rows": table,
        "totals": together,
        "best": choose(together, servers),
        "servers": servers,
        "failed": failed,
        "versions": provenance.versions(),
        "git_commit": provenance.git_commit(),
        "machine": provenance.machine(),
        "settings": {
            "eval": config.resolved()["eval"],
            "tune": config.resolved()["tune"],
            "temperature": 0,
        },
    }
    write_json(config.eval_dir / "tune.json", results)
    return results


@command("tune")
def main(config: Config) -> None:
    results = tune(config)
    path = tune_report.write(config.run_dir)
    sys.stdout.write(tune_report.summary(results) + f"\n\nreport: {path}\n")


if __name__ == "__main__":
    main()
