"""Run prompts against one server and keep what is needed for every figure."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eagle3 import logging as console
from eagle3.errors import UserError
from eagle3.serving.client import Answer, Client, RequestRefused, in_order
from eval.benchmarks import Prompt

HISTOGRAM = "spec_correct_drafts_histogram"


@dataclass(kw_only=True, slots=True)
class Run:
    """Answers to a list of prompts, in their order, at one concurrency.

    seconds: wall time of all requests together.
    """

    answers: list[Answer]
    seconds: float
    concurrency: int
    histograms: list[list[int]] = field(default_factory=list)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Run:
        """Of what `asdict` gave."""
        return cls(**{**data, "answers": [Answer(**answer) for answer in data["answers"]]})

    @property
    def tokens(self) -> int:
        return sum(len(a.output_ids) for a in self.answers)

    def speed(self) -> dict[str, float]:
        """tok_s: generated tokens per second of all requests together; tok_s_per_request: mean over
        requests of their own; cached_tokens: prompt tokens the server did not compute; retries:
        attempts that failed, whose time is in the others."""
        own = [len(a.output_ids) / a.latency_s for a in self.answers]
        return {
            "tok_s": self.tokens / self.seconds,
            "tok_s_per_request": sum(own) / len(own),
            "cached_tokens": sum(a.meta.get("cached_tokens", 0) for a in self.answers),
            "retries": sum(a.retries for a in self.answers),
        }

    def latencies(self) -> dict[str, float | None]:
        """In milliseconds, over requests; None where nothing was streamed.

        ttft_ms, ttft_p95_ms: time to the first token, median and 95th percentile. itl_ms:
        inter-token latency, median of the time after a request's first tokens divided by the number
        of those that came then.
        """
        streamed = [(a, a.first_s) for a in self.answers if a.first_s is not None]
        first = [1000 * first_s for _, first_s in streamed]
        between = [
            1000 * (a.latency_s - first_s) / (len(a.output_ids) - a.first_tokens)
            for a, first_s in streamed
            if len(a.output_ids) > a.first_tokens
        ]
        return {
            "ttft_ms": float(np.median(first)) if first else None,
            "ttft_p95_ms": float(np.percentile(first, 95)) if first else None,
            "itl_ms": float(np.median(between)) if between else None,
        }


def sampling(max_new_tokens: int) -> dict[str, Any]:
    """Greedy decoding: acceptance and identity of outputs are defined for it."""
    return {"temperature": 0, "max_new_tokens": max_new_tokens}


def measure(
    client: Client, prompts: list[Prompt], max_new_tokens: int, concurrency: int, warmup: int
) -> Run:
    """Warm up on the first prompts, unmeasured, then answer all of them.

    warmup: requests for each of the `concurrency`: what a server prepares at the first batch of a
    size is then done.

    Raises:
        UserError: the server refuses a prompt.
    """

    def answer(prompt: Prompt, stream: bool, **changes: int) -> Answer:
        params = {**sampling(max_new_tokens), **changes}
        try:
            return client.generate(prompt.input_ids, params, stream=stream)
        except RequestRefused as refusal:
            raise UserError(f"prompt {prompt.id} was refused: {refusal}") from refusal

    first = prompts[: warmup * concurrency]
    list(in_order(lambda p: answer(p, stream=False, max_new_tokens=8), first, concurrency))
    with console.progress(f"eval, concurrency {concurrency}") as bar:
        task = bar.add_task("", total=len(prompts), note="")
        answers = []
        start = time.perf_counter()
        # all prompts are drawn ahead: however long one answer takes, no other request waits for it
        for one in in_order(
            lambda p: answer(p, stream=True), prompts, concurrency, ahead=len(prompts)
        ):
            answers.append(one)
            bar.advance(task)
        seconds = time.perf_counter() - start
    return Run(answers=answers, seconds=seconds, concurrency=concurrency)


def histograms(run: Run, num_steps: int) -> list[list[int]]:
    """Each request's histogram of accepted drafts, padded to num_steps + 1.

    Of a tree too: SGLang counts the drafts on the accepted path, which has at most num_steps. An
    answer of one token comes from prefill: no verify step, and SGLang reports no histogram of it.

    Raises:
        RuntimeError: the server did not speculate, or its counts do not add up.
    """
    found = []
    for answer in run.answers:
        verified = answer.meta.get("spec_verify_ct", 0)
        counts = answer.meta.get(HISTOGRAM, [])
        if not counts and len(answer.output_ids) > 1:
            raise RuntimeError("the server reports no draft histogram: is it speculating?")
        if sum(counts) != verified or len(counts) > num_steps + 1:
            raise RuntimeError(
                f"histogram {counts} does not fit {verified} verify steps of {num_steps} drafts"
            )
        found.append(counts + [0] * (num_steps + 1 - len(counts)))
    return found
