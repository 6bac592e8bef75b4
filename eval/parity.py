"""Does the server draft what we draft? `python -m eval.parity experiment=<name>` (`make parity`).

`eval` left every answer and its histogram of accepted drafts; `extract` with extract.of_eval=true
has captured the hidden states of the same texts. Replayed over them, the exported drafter must be
accepted as the live one was: step-0 acceptance and accept length within the live figures'
intervals, and nearly all verify steps the same. If it was not, the server does not run what was
trained: known causes are tried, and the one that explains the live histograms is named. Writes
<run>/eval/parity.json; exits with 1 if the two differ.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from eagle3 import export as formats
from eagle3 import provenance
from eagle3.command import command
from eagle3.config import Config
from eagle3.drafter import Drafter
from eagle3.errors import UserError
from eagle3.manifest import Manifest, require_match, write_json
from eagle3.store.reader import StoreReader
from eagle3.target import Target
from eagle3.walk import sample_histograms
from eval.causes import NONE, Cause, known_causes
from eval.stats import Acceptance, acceptance

log = logging.getLogger(__name__)
DIAGNOSED = 64
"""Most answers on which causes are tried."""
FEW = 0.05
"""Share of verify steps that may be counted differently beyond one an answer: without a fault none
were in float32; a drafter in bf16 against the same in float32 gave 0.012 (ci)."""

Histograms = Callable[[list[int], list[int], Any, int], list[list[int]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One live answer: its prompt's number, its own in the store, and the server's histogram
    [K + 1]."""

    prompt: int
    number: int
    histogram: list[int]


def matched(lines: list[str], reader: StoreReader) -> tuple[list[Answer], int]:
    """The answers that were captured, and how many were not; the same text may come several
    times."""
    numbers: dict[tuple[int, ...], int] = {}
    for number in range(len(reader)):
        ids, mask = reader.tokens(number)
        numbers[(int(mask.sum()), *ids.tolist())] = number
    prompts: dict[tuple[int, ...], int] = {}
    found, missing = [], 0
    for row in map(json.loads, lines):
        key = len(row["output_ids"]), *row["input_ids"], *row["output_ids"]
        if key in numbers:
            prompt = prompts.setdefault(tuple(row["input_ids"]), len(prompts))
            found.append(Answer(prompt=prompt, number=numbers[key], histogram=row["histogram"]))
        else:
            missing += 1
    return found, missing


def replay(reader: StoreReader, answers: list[Answer], histograms: Histograms) -> list[list[int]]:
    """Each answer's histogram as these drafts give it."""
    found: dict[int, list[int]] = {}
    for answer in answers:
        if answer.number not in found:
            ids, mask = reader.tokens(answer.number)
            aux, _ = reader.states(answer.number)
            num_steps = len(answer.histogram) - 1
            (found[answer.number],) = histograms(
                ids.tolist(), mask.int().tolist(), aux.float(), num_steps
            )
    return [found[answer.number] for answer in answers]


def by_prompt(answers: list[Answer], histograms: list[list[int]]) -> list[list[int]]:
    """One histogram a prompt, of all its answers together.

    A prompt is answered once at each concurrency, mostly in the same words: its answers are not
    independent, and intervals over them would be too narrow.
    """
    sums: dict[int, np.ndarray] = {}
    for answer, histogram in zip(answers, histograms, strict=True):
        sums[answer.prompt] = sums.get(answer.prompt, 0) + np.asarray(histogram)
    return [total.tolist() for total in sums.values()]


def distance(a: list[list[int]], b: list[list[int]], spared: int = 0) -> float:
    """Verify steps counted differently, as a share of all: 0 for equal histograms, at most 1.

    spared: steps of each answer that may differ and do not count. Its last one may: the server may
    have accepted drafts beyond the end.
    """
    moved = 0
    for x, y in zip(a, b, strict=True):
        steps = sum(abs(n - m) for n, m in zip(x, y, strict=True))
        moved += max(
            0, steps - 2 * spared
        )  # a step counted differently is missing once, added once
    return moved / max(1, sum(map(sum, a)) + sum(map(sum, b)))


def diagnose(
    reader: StoreReader, answers: list[Answer], drafter: Drafter, causes: list[Cause]
) -> list[dict[str, Any]]:
    """No fault and every cause with the distance of its histograms from the live ones, the nearest
    first; of answers from all over."""
    some = answers[:: -(-len(answers) // DIAGNOSED)]
    live = [answer.histogram for answer in some]
    rows = []
    for cause in (NONE, *causes):
        found = replay(reader, some, lambda *x, c=cause: c.histograms(drafter, *x))
        rows.append(
            {
                "cause": cause.name,
                "remedy": cause.remedy,
                "distance": distance(found, live),
                "step0": acceptance(found).step0,
            }
        )
    return sorted(rows, key=lambda row: row["distance"])


def parity(config: Config) -> dict[str, Any]:
    """The whole stage; returns what parity.json holds.

    Raises:
        UserError: nothing was measured or captured, or of another drafter or target.
    """
    outputs = config.outputs_file
    if not outputs.exists():
        raise UserError(f"{outputs} is missing: run `eval` first")
    target = Target.from_config(config.target)
    drafter, aux_layers = formats.load_sglang(config.drafter_dir, target)
    measured = Manifest.load(config.eval_dir, "eval").inputs["drafter"]
    if measured != Manifest.load(config.drafter_dir, formats.KIND).hash():
        raise UserError(f"{outputs} is of another drafter: run `eval` again")
    if not config.eval_store_dir.exists():
        raise UserError(
            f"the answers' hidden states are not in {config.eval_store_dir}: run "
            "`make parity`, or `extract` with extract.of_eval=true first"
        )
    reader = StoreReader(config.eval_store_dir)
    wanted = {"target": target.identity(), "aux_layers": aux_layers}
    remedy = f"Delete {config.eval_store_dir} and run `make parity` again."
    require_match(wanted, reader.manifest.match, f"the store in {config.eval_store_dir}", remedy)
    answers, missing = matched(outputs.read_text().splitlines(), reader)
    if not answers:
        raise UserError(f"no answer in {outputs} was captured. {remedy}")
    live = [answer.histogram for answer in answers]
    if len(by_prompt(answers, live)) < 2:
        raise UserError(f"{outputs} is of one prompt only, which gives no interval: eval on more")
    ours = replay(reader, answers, lambda *x: sample_histograms(drafter, *x))
    there, here = acceptance(by_prompt(answers, live)), acceptance(by_prompt(answers, ours))
    beyond = distance(live, ours, spared=1)
    result: dict[str, Any] = {
        "agrees": agrees(there, here, beyond),
        "live": there.as_dict(),
        "offline": here.as_dict(),
        "distance": distance(live, ours),
        "distance_beyond_last": beyond,
        "identical_histograms": sum(a == b for a, b in zip(live, ours, strict=True)) / len(live),
        "answers": len(answers),
        "not_captured": missing,
        "causes": [],
        "versions": provenance.versions(),
        "git_commit": provenance.git_commit(),
        "machine": provenance.machine(),
    }
    if not result["agrees"]:
        result["causes"] = diagnose(
            reader, answers, drafter, known_causes(drafter, target.lm_head().float())
        )
    write_json(config.eval_dir / "parity.json", result)
    return result


def agrees(there: Acceptance, here: Acceptance, beyond: float) -> bool:
    """Whether our figures lie within the live intervals, and few verify steps differ.

    Of few prompts the intervals are wide; the steps are compared answer by answer, so that they
    tell a fault all the same.
    """
    return (
        _within(here.step0, there.step0_ci95)
        and _within(here.accept_length, there.accept_length_ci95)
        and beyond <= FEW
    )


def _within(value: float, interval: list[float]) -> bool:
    return interval[0] <= value <= interval[1]


def summary(result: dict[str, Any]) -> str:
    """A few lines for the console."""
    there, here = result["live"], result["offline"]
    low, high = there["step0_ci95"]
    least, most = there["accept_length_ci95"]
    lines = [
        f"parity on {result['answers']} live answers: step-0 acceptance live {there['step0']:.1%} "
        f"({low:.1%} to {high:.1%}), ours on the same texts {here['step0']:.1%}; accept length "
        f"{there['accept_length']:.2f} ({least:.2f} to {most:.2f}), ours "
        f"{here['accept_length']:.2f}; {result['identical_histograms']:.0%} of the histograms are "
        f"the same, {result['distance']:.1%} of the verify steps differ"
    ]
    if result["not_captured"]:
        lines.append(f"{result['not_captured']} answers were not captured and are left out")
    if result["agrees"]:
        return "\n".join([*lines, "the server drafts what was trained"])
    lines.append("the server does not draft what was trained")
    best, unchanged = (
        next(row for row in result["causes"] if (row["cause"] == NONE.name) is wanted)
        for wanted in (False, True)
    )
    if best["distance"] < unchanged["distance"] / 2:  # both of the same answers
        lines.append(f"it drafts as with this fault: {best['cause']}. {best['remedy']}.")
    else:
        lines.append(
            "no known cause explains it. Left to check: the layer ids that the server captures, "
            "its SGLang version, quantisation, and whether it serves another drafter"
        )
    return "\n".join(lines)


@command("parity")
def main(config: Config) -> None:
    result = parity(config)
    sys.stdout.write(summary(result) + "\n")
    if not result["agrees"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
