"""Where an output differs from the plain server's: was it a near tie?

In float32 greedy outputs are the same with and without a drafter. In bf16 a batch of another shape
rounds otherwise, so where the target's two best tokens are nearly level the other one can win, and
everything after it differs. A fault looks otherwise: the target prefers one token clearly. So each
pair's first difference is looked up: how far apart are the two tokens after their common prefix?
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from eagle3.serving.client import Client, in_order
from eval.benchmarks import Prompt
from eval.measure import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Differences:
    """First differences of two runs' outputs.

    outputs: how many differ. ended: of these, how many are the other one cut short, which has no
    second token. margin_median, margin_max: of the others, the target's log-probability (nats) of
    the plain server's token less that of the speculative one's, without its sign; None if there are
    none.
    """

    outputs: int
    ended: int
    margin_median: float | None
    margin_max: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Where two outputs part, or where one of them ends; None if they are the same."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def margin(client: Client, prefix: list[int], token: int, other: int) -> float:
    """|log p(token) - log p(other)| after a prefix, in nats, as this server computes it."""
    answer = client.generate(
        prefix, {"temperature": 0, "max_new_tokens": 1}, token_ids_logprob=[token, other]
    )
    found = {int(id_): float(p) for p, id_, *_ in answer.meta["output_token_ids_logprobs"][0]}
    return abs(found[token] - found[other])


def differences(
    client: Client, prompts: list[Prompt], plain: Run, speculative: Run, concurrency: int = 8
) -> Differences:
    """Look up the first difference of every pair of answers on the plain server."""
    questions: list[tuple[list[int], int, int]] = []
    outputs = 0
    for prompt, before, after in zip(prompts, plain.answers, speculative.answers, strict=True):
        index = first_difference(before.output_ids, after.output_ids)
        if index is None:
            continue
        outputs += 1
        if index < min(len(before.output_ids), len(after.output_ids)):
            prefix = prompt.input_ids + before.output_ids[:index]
            questions.append((prefix, before.output_ids[index], after.output_ids[index]))
    margins = list(in_order(lambda q: margin(client, *q), questions, concurrency))
    return Differences(
        outputs=outputs,
        ended=outputs - len(questions),
        margin_median=statistics.median(margins) if margins else None,
        margin_max=max(margins) if margins else None,
    )
