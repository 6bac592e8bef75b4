"""Which speculative settings serve the drafter fastest?

`python -m eval.tune experiment=<name>` answers the run's benchmarks on the plain server and on one
server for each combination of `tune.num_steps`, `tune.topk` and `tune.draft_tokens`, and writes
<run>/eval/tune.json and tune.md: a table, the best setting at each concurrency, and the command
that launches it. What a server gave is kept in <run>/eval/tune/ as soon as it is measured, so that
a rerun measures only what is missing; combinations that failed are tried again.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle3 import provenance
from eagle3.command import command
from eagle3.config import Config
from eagle3.errors import UserError
from eagle3.manifest import Manifest, write_json
from eagle3.serving.client import RequestFailed
from eagle3.serving.from_config import launches
from eagle3.serving.server import shell_command
from eagle3.serving.watch import ServerFailed
from eagle3.target import Target
from eval import benchmarks, tune_report
from eval.benchmarks import Prompt
from eval.live import require_servable, run_server
from eval.requirements import require_measurable
from eval.speculation import Speculation, combinations
from eval.tune_figures import Record, figures, rows, totals

log = logging.getLogger(__name__)
KIND = "tune"


def measured(
    config: Config,
    target: Target,
    prompts: dict[str, list[Prompt]],
    speculation: Speculation | None,
    folder: Path,
) -> Record:
    """One server's record: the one in the folder, else measured now and written there."""
    name = speculation.name if speculation else "plain"
    path = folder / f"{name}.json"
    if path.exists():
        record: Record = json.loads(path.read_text())
        if record["failed"] is None:
            log.info("%s is measured already", name)
            return record
        log.info("%s failed before and is tried again", name)
    record = {"speculation": speculation and asdict(speculation), "failed": None}
    try:
        runs, record["server"] = run_server(config, target, prompts, f"tune-{name}", speculation)
        record["runs"] = [
            figures(benchmark, run, speculation) for (benchmark, _), run in runs.items()
        ]
    except (ServerFailed, RequestFailed) as failure:
        log.warning("%s failed: %s", name, failure)
        record["failed"] = str(failure)
    write_json(path, record)
    return record


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


def _manifest(config: Config, target: Target, prompts: dict[str, list[Prompt]]) -> Manifest:
    """Of the records: figures from another drafter, machine or setting must not share a table."""
    drafter = require_servable(config, target)
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
            "concurrency": config.eval.concurrency,
            "max_new_tokens": config.eval.max_new_tokens,
            "warmup": config.eval.warmup,
            "plain_url": config.eval.plain_url,
            "server": {key: getattr(config.server, key) for key in ("args", "env", "backends")},
            "machine": provenance.machine(),
            "versions": {name: versions[name] for name in ("sglang", "torch")},
        },
        config=config.resolved(),
        inputs={"drafter": drafter.hash()},
    )


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
    manifest = _manifest(config, target, prompts)
    folder = config.eval_dir / "tune"
    remedy = f"Remove {folder} to measure anew, or choose another run_name."
    begun = len(list(folder.glob("*.json"))) > 1  # beside the manifest
    if not manifest.resumes(folder, f"{folder}", remedy, begun):
        manifest.save(folder)
    records = [measured(config, target, prompts, one, folder) for one in (None, *wanted)]
    failed = [{k: r[k] for k in ("speculation", "failed")} for r in records if r["failed"]]
    if all(record["failed"] for record in records[1:]):
        reasons = [f"{one['speculation'] or 'plain'}: {one['failed']}" for one in failed]
        raise RuntimeError("every combination failed:\n" + "\n\n".join(reasons))
    servers = [
        {
            "speculation": record["speculation"],
            "settings": record["server"],
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
