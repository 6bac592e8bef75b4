"""Figures of `eval.tune`: of one run, of all servers side by side, of all benchmarks together."""

from __future__ import annotations

from operator import eq
from typing import Any

from eagle3 import provenance
from eval.measure import Run
from eval.speculation import Speculation
from eval.stats import acceptance

Record = dict[str, Any]
"""What one server gave: `speculation` (None: plain), `runs` (a list of figures), `server` (its
settings in force), `starts` (of `Served`), or `failed` (why there are none)."""


def figures(benchmark: str, run: Run, speculation: Speculation | None) -> dict[str, Any]:
    """Of one benchmark at one concurrency on one server."""
    live = acceptance(run.histograms) if speculation else None
    return {
        "benchmark": benchmark,
        "concurrency": run.concurrency,
        **run.speed(),
        **run.latencies(),
        "tokens": run.tokens,
        "seconds": run.seconds,
        "accept_length": live and live.accept_length,
        "accept_length_ci95": live and live.accept_length_ci95,
        "outputs": [provenance.hash_json(answer.output_ids) for answer in run.answers],
    }


def rows(records: list[Record]) -> list[dict[str, Any]]:
    """One a benchmark, concurrency and server that did not fail, in that order.

    speedup: tok/s against plain; identical: share of the outputs that are plain's. Both None if
    that failed. A setting that the server gets wrong may be fast, but it does not say the same.
    """
    found = [
        {"speculation": record["speculation"], **run}
        for record in records
        if record["failed"] is None
        for run in record["runs"]
    ]
    _against_plain(found, ("benchmark", "concurrency"))
    plain = {
        (row["benchmark"], row["concurrency"]): row["outputs"]
        for row in found
        if row["speculation"] is None
    }
    for row in found:
        ours = row.pop("outputs")
        theirs = plain.get((row["benchmark"], row["concurrency"]))
        row["identical"] = theirs and sum(map(eq, ours, theirs)) / len(ours)
    places = list(dict.fromkeys((row["benchmark"], row["concurrency"]) for row in found))
    return sorted(found, key=lambda row: places.index((row["benchmark"], row["concurrency"])))


def totals(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of all benchmarks together: one row a concurrency and server, in that order.

    tok_s: all tokens / all seconds. speedup: as in `rows`.
    """
    found: list[dict[str, Any]] = []
    for concurrency in dict.fromkeys(row["concurrency"] for row in table):
        servers: list[dict[str, int] | None] = []
        for row in table:
            if row["speculation"] not in servers:
                servers.append(row["speculation"])
        for speculation in servers:
            place = concurrency, speculation
            same = [row for row in table if (row["concurrency"], row["speculation"]) == place]
            tok_s = sum(row["tokens"] for row in same) / sum(row["seconds"] for row in same)
            found.append({"concurrency": concurrency, "speculation": speculation, "tok_s": tok_s})
    _against_plain(found, ("concurrency",))
    return found


def _against_plain(table: list[dict[str, Any]], keys: tuple[str, ...]) -> None:
    """Add each row's speedup over the plain one that agrees with it in these keys."""
    plain = {
        tuple(row[key] for key in keys): row["tok_s"] for row in table if row["speculation"] is None
    }
    for row in table:
        before = plain.get(tuple(row[key] for key in keys))
        row["speedup"] = None if before is None else row["tok_s"] / before
