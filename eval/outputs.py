"""Every request of an evaluation: its tokens and histogram, to be looked into and recomputed.

`parity` replays the drafter on them; `extract` with extract.of_eval=true captures their states.
"""

from __future__ import annotations

import json
from pathlib import Path

from eagle3.manifest import write_text
from eval.benchmarks import Prompt
from eval.measure import Run

Place = tuple[str, int]
"""Benchmark and concurrency."""
Runs = dict[Place, Run]


def write(path: Path, prompts: dict[str, list[Prompt]], plain: Runs, speculative: Runs) -> None:
    """One line a request, benchmark by benchmark; all or nothing."""
    lines = []
    for (name, concurrency), run in speculative.items():
        for prompt, before, answer, histogram in zip(
            prompts[name],
            plain[name, concurrency].answers,
            run.answers,
            run.histograms,
            strict=True,
        ):
            row = {
                "benchmark": name,
                "concurrency": concurrency,
                "id": prompt.id,
                "input_ids": prompt.input_ids,
                "output_ids": answer.output_ids,
                "identical": answer.output_ids == before.output_ids,
                "histogram": histogram,
                "seconds": {"plain": before.latency_s, "speculative": answer.latency_s},
            }
            lines.append(json.dumps(row) + "\n")
    write_text(path, "".join(lines))
