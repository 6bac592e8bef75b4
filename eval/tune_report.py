"""tune.json -> a summary for the console and tune.md. Computes no figure of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eval.report import aligned, markdown, several_starts

COLUMNS = [
    "benchmark", "concurrency", "steps", "topk", "draft tokens", "accept length", "tok/s",
    "tok/s per request", "against plain", "identical",
]  # fmt: skip
ALL = "(all)"


def table(results: dict[str, Any]) -> list[list[Any]]:
    """A line for each row under COLUMNS; of several benchmarks also what all give together."""
    rows = list(results["rows"])
    if len({row["benchmark"] for row in rows}) > 1:
        rows += [
            {
                "benchmark": ALL,
                "accept_length": None,
                "tok_s_per_request": None,
                "identical": None,
                **total,
            }
            for total in results["totals"]
        ]
    return [
        [
            row["benchmark"],
            row["concurrency"],
            *_setting(row["speculation"]),
            _number(row["accept_length"], ".2f"),
            _number(row["tok_s"], ".1f"),
            _number(row["tok_s_per_request"], ".1f"),
            _number(row["speedup"], ".2f", "x"),
            _number(row["identical"], ".1%"),
        ]
        for row in rows
    ]


def _setting(speculation: dict[str, int] | None) -> list[Any]:
    return list(speculation.values()) if speculation else ["plain", "", ""]


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def remarks(results: dict[str, Any]) -> list[str]:
    """A line for each server that could not be measured, for each that was started several times,
    and for each row with requests that failed at first."""
    lines = []
    for one in results["failed"]:
        name = _server(one["speculation"])
        lines.append(f"{name} could not be measured: {one['failed'].splitlines()[0]}")
    for one in results["servers"]:
        lines += several_starts(_server(one["speculation"]), one["starts"])
    for row in results["rows"]:
        if row["retries"]:
            name = _server(row["speculation"])
            lines.append(
                f"{name}, {row['benchmark']} x{row['concurrency']}: {row['retries']} requests "
                "failed and were made again; its times include the pauses"
            )
    return lines


def _server(speculation: dict[str, int] | None) -> str:
    return _name(speculation) if speculation else "plain serving"


def _name(speculation: dict[str, int]) -> str:
    return "steps {num_steps}, topk {topk}, draft tokens {draft_tokens}".format(**speculation)


def verdict(concurrency: str, best: dict[str, Any]) -> str:
    """What to serve with at this concurrency."""
    speed = f"{best['tok_s']:.1f} tok/s"
    if best["speculation"] is None:
        return f"concurrency {concurrency}: plain serving is fastest ({speed}); serve no drafter"
    against = (
        "plain serving could not be measured"
        if best["speedup"] is None
        else f"{best['speedup']:.2f}x plain"
    )
    return f"concurrency {concurrency}: {_name(best['speculation'])} ({speed}, {against})"


def summary(results: dict[str, Any]) -> str:
    """A few lines for the end of `make tune`."""
    lines = aligned(COLUMNS, table(results)) + remarks(results)
    for concurrency, best in results["best"].items():
        lines += ["", verdict(concurrency, best)]
        lines += [best["command"]] if best["command"] else []
    return "\n".join(lines)


def write(run_dir: Path) -> Path:
    """Write tune.md beside <run>/eval/tune.json; return its path."""
    folder = run_dir / "eval"
    results = json.loads((folder / "tune.json").read_text())
    lines = [f"# {run_dir.name}: speculative settings", "", *markdown(COLUMNS, table(results))]
    for line in remarks(results):
        lines += ["", line]
    lines += [
        "",
        "Greedy decoding, prefix cache off, warm-up excluded; accept length is the tokens gained "
        "by one verify step; identical is the share of outputs that plain serving gave too. Chosen "
        "by all tokens / all seconds over the benchmarks. The commands leave the prefix cache on.",
        "",
        "## Fastest",
    ]
    for concurrency, best in results["best"].items():
        lines += ["", verdict(concurrency, best)]
        lines += ["", "```", best["command"], "```"] if best["command"] else []
    lines += ["", "## Versions and settings", "", "```json"]
    keys = ("versions", "machine", "git_commit", "settings")
    lines += [json.dumps({k: results[k] for k in keys}, indent=1), "```", ""]
    path = folder / "tune.md"
    path.write_text("\n".join(lines))
    return path
