"""Held-out prompts as token ids."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from eagle3.chat import ChatEncoder
from eagle3.config import BenchmarkConfig, Config
from eagle3.errors import UserError
from eagle3.records import Record, RowError, read
from eagle3.target import Target

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Prompt:
    """One prompt, rendered and tokenised as the server would."""

    id: str
    input_ids: list[int]


def load(config: Config, target: Target) -> dict[str, list[Prompt]]:
    """Prompts of every benchmark of the run, by name.

    Raises:
        UserError: no benchmark is configured, or one has no usable prompt.
    """
    if not config.benchmark:
        raise UserError(
            "no benchmark is configured: name one in the experiment's file, or add "
            "'+benchmark={mine: {path: prompts.jsonl}}' to the command"
        )
    encoder = ChatEncoder(target.tokenizer, config.target.template_kwargs)
    return {
        name: _prompts(name, benchmark, encoder) for name, benchmark in config.benchmark.items()
    }


def _prompts(name: str, benchmark: BenchmarkConfig, encoder: ChatEncoder) -> list[Prompt]:
    records, skipped = read(benchmark.path, benchmark.split, benchmark.limit)
    prompts = []
    for record in records:
        try:
            prompts.append(_prompt(record, encoder))
        except RowError as error:
            skipped[str(error)] += 1
    if not prompts:
        raise UserError(
            f"benchmark.{name}: no usable prompt in {benchmark.path}; skipped: {dict(skipped)}"
        )
    if skipped:
        log.warning("benchmark %s: skipped rows %s", name, dict(skipped))
    return prompts


def _prompt(record: Record, encoder: ChatEncoder) -> Prompt:
    if not record.messages:
        raise RowError("tokens in place of messages")
    return Prompt(id=record.id, input_ids=encoder.prompt(record.prompt, record.tools))
