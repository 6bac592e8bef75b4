"""results.json -> a summary for the console, report.md and plots. Computes no figure of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eagle3 import metrics, usage
from eval import plots

COLUMNS = [
    "benchmark", "concurrency", "step-0", "95% interval", "accept length", "bigram step-0",
    "plain tok/s", "EAGLE-3 tok/s", "speed-up", "identical",
]  # fmt: skip


def rows(results: dict[str, Any]) -> list[list[Any]]:
    """One row a benchmark and concurrency, under COLUMNS."""
    table = []
    for name, runs in results["benchmarks"].items():
        for concurrency, r in runs.items():
            low, high = r["step0_acceptance"]["ci95"]
            bigram = r.get("bigram")
            table.append(
                [
                    name,
                    int(concurrency),
                    f"{r['step0_acceptance']['value']:.1%}",
                    f"{low:.1%} to {high:.1%}",
                    f"{r['accept_length']:.2f}",
                    f"{bigram['step0_acceptance']:.1%}" if bigram else "",
                    f"{r['tok_s']['plain']:.1f}",
                    f"{r['tok_s']['speculative']:.1f}",
                    f"{r['speedup']:.2f}x",
                    f"{r['identical_outputs']:.1%}",
                ]
            )
    return table


LATENCIES = [
    "benchmark", "concurrency", "plain TTFT ms", "EAGLE-3 TTFT ms", "plain TTFT p95",
    "EAGLE-3 TTFT p95", "plain ITL ms", "EAGLE-3 ITL ms",
]  # fmt: skip


def latencies(results: dict[str, Any]) -> list[list[Any]]:
    """Time to the first token and between tokens, under LATENCIES."""
    return [
        [name, int(concurrency)]
        + [
            "" if r[key][side] is None else f"{r[key][side]:.1f}"
            for key in ("ttft_ms", "ttft_p95_ms", "itl_ms")
            for side in ("plain", "speculative")
        ]
        for name, runs in results["benchmarks"].items()
        for concurrency, r in runs.items()
    ]


def summary(results: dict[str, Any]) -> str:
    """A few lines for the end of `make eval`."""
    lines = aligned(COLUMNS, rows(results))
    live = results["step0_acceptance"]["value"]
    lines += _told(results)
    if (predicted := results["offline_step0_acceptance"]) is not None:
        name = next(iter(results["benchmarks"]))
        lines.append(
            f"step-0 acceptance: live {live:.1%} on {name}, offline prediction {predicted:.1%} on "
            "held-out samples of the store"
        )
    return "\n".join(lines)


def _told(results: dict[str, Any]) -> list[str]:
    """What has to be known beside the figures."""
    lines = _differences(results) + _seen(results) + _retries(results)
    for side, starts in results["server_starts"].items():
        lines += several_starts(f"the {side} server", starts)
    return lines


def several_starts(server: str, starts: dict[str, list[str]]) -> list[str]:
    """A line if not all runs come from one start of a server, which the next may not equal."""
    if len(starts) < 2:
        return []
    parts = [f"{', '.join(names)} at {time}" for time, names in starts.items()]
    return [f"runs come from {len(starts)} starts of {server}: {'; '.join(parts)}"]


def _differences(results: dict[str, Any]) -> list[str]:
    """A line if outputs differ: how far apart the target has the tokens at which they part."""
    found = [r["differences"] for runs in results["benchmarks"].values() for r in runs.values()]
    margins = [d for d in found if d["margin_max"] is not None]
    if not margins:
        return []
    outputs = sum(d["outputs"] for d in found)
    largest, median = (max(d[k] for d in margins) for k in ("margin_max", "margin_median"))
    return [
        f"{outputs} outputs differ; where they part, the target has the two tokens at most "
        f"{largest:.3f} nats apart (median of a row at most {median:.3f})"
    ]


def _seen(results: dict[str, Any]) -> list[str]:
    """A line for each benchmark that is not held out."""
    return [
        f"{count} prompts of {name} are in the drafter's training data: its acceptance there is "
        "not that on new prompts"
        for name, count in (results["prompts_in_training"] or {}).items()
        if count
    ]


def _retries(results: dict[str, Any]) -> list[str]:
    """A line for each row with requests that failed at first."""
    return [
        f"{name} x{concurrency}: {count} requests to the {side} server failed and were made again; "
        "its times include the pauses: measure again"
        for name, runs in results["benchmarks"].items()
        for concurrency, r in runs.items()
        for side, count in r["retries"].items()
        if count
    ]


def write(run_dir: Path, train_dir: Path) -> Path:
    """Write report.md and its plots beside <run>/eval/results.json; return the report's path.

    train_dir: of the training whose learning curve is shown, if it is at hand.
    """
    folder = run_dir / "eval"
    results = json.loads((folder / "results.json").read_text())
    drawn = plots.write(results, metrics.lines(train_dir / "metrics.jsonl"), folder)
    path = folder / "report.md"
    path.write_text(_document(results, run_dir, drawn))
    return path


def _document(results: dict[str, Any], run_dir: Path, drawn: list[Path]) -> str:
    lines = [f"# {run_dir.name}: EAGLE-3 drafter on the live server", ""]
    lines += [*markdown(COLUMNS, rows(results)), "", *markdown(LATENCIES, latencies(results))]
    for line in _told(results):
        lines += ["", line]
    predicted = results["offline"]
    if predicted is not None:
        low, high = predicted["step0_ci95"]
        lines += [
            "",
            f"Offline prediction on {predicted['samples']} held-out samples of the store: step-0 "
            f"acceptance {predicted['step0']:.1%} ({low:.1%} to {high:.1%}), accept length "
            f"{predicted['accept_length']:.2f}.",
        ]
    lines += [
        "",
        "TTFT: time to the first token, median and 95th percentile over requests; ITL: mean "
        "time between a request's tokens, median over requests. Greedy decoding, prefix cache off, "
        "warm-up excluded. A draft is accepted if it equals the target's own next token; step k's "
        "acceptance is the share of verify steps with more than k accepted drafts; accept length "
        "is 1 + their sum. Intervals: bootstrap over requests. Bigram: the token that most often "
        "followed in the training text.",
        "",
    ]
    lines += [f"![{plot.stem}]({plot.name})" for plot in drawn]
    cost = _usage(run_dir)
    if cost:
        lines += [
            "",
            "## Cost of each stage",
            "",
            *markdown(["stage", "seconds", "peak memory, GB"], cost),
        ]
    lines += ["", "## Versions and settings", "", "```json"]
    keys = ("versions", "machine", "git_commit", "settings")
    lines += [json.dumps({k: results[k] for k in keys}, indent=1), "```", ""]
    return "\n".join(lines)


def aligned(columns: list[str], table: list[list[Any]]) -> list[str]:
    """A table for the console."""
    widths = [max(len(str(x)) for x in column) for column in zip(columns, *table, strict=True)]
    return [
        "  ".join(str(x).ljust(w) for x, w in zip(line, widths, strict=True))
        for line in [columns, *table]
    ]


def markdown(columns: list[str], table: list[list[Any]]) -> list[str]:
    """A table for a report."""
    head = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return head + ["| " + " | ".join(str(x) for x in row) + " |" for row in table]


def _usage(run_dir: Path) -> list[list[Any]]:
    """Seconds and peak memory of the stages so far, as `eagle3.usage` recorded them."""
    recorded = usage.read(run_dir / "usage.json")
    return [[k, f"{v['seconds']:.0f}", f"{v['peak_memory_gb']:.1f}"] for k, v in recorded.items()]
