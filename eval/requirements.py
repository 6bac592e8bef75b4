"""What has to hold for figures to be what they are called; checked before anything is measured."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from eagle3.config import EvalConfig
from eagle3.errors import UserError
from eval.benchmarks import Prompt
from eval.speculation import Speculation

log = logging.getLogger(__name__)
PATHS = ("model_path", "speculative_draft_model_path")


def require_measurable(config: EvalConfig, prompts: dict[str, list[Prompt]]) -> None:
    """The numbers of concurrent requests make sense for these prompts; where some would never be
    under way, that is told.

    Raises:
        UserError: they do not.
    """
    wanted = config.concurrency
    if not wanted or min(wanted) < 1 or len(set(wanted)) < len(wanted):
        raise UserError(
            f"eval.concurrency={wanted} must name at least one number, none twice, each at least 1"
        )
    for name, items in prompts.items():
        if len(items) < max(wanted):
            log.warning(
                "benchmark.%s has %d prompts: no more requests than that are under way at "
                "eval.concurrency=%d", name, len(items), max(wanted),
            )  # fmt: skip


def require_settings(found: dict[str, Any], asked: dict[str, Any]) -> None:
    """A server runs with what was asked for: SGLang changes some settings by itself, and a server
    that was running already may be any.

    Args:
        found: of `Client.info`.

    Raises:
        UserError: it does not; names every setting that differs.
    """
    differing = {
        key: (value, found[key])
        for key, value in asked.items()
        if key in found and _comparable(key, found[key]) != _comparable(key, value)
    }
    if differing:
        raise UserError(
            f"the server runs with other settings (asked, in force): {differing}. One that is "
            "running already must be started with those asked for"
        )


def _comparable(key: str, value: Any) -> Any:
    return Path(value).resolve() if key in PATHS and value else value


def require_room(
    found: dict[str, Any],
    prompts: dict[str, list[Prompt]],
    max_new_tokens: int,
    speculation: Speculation | None,
) -> None:
    """The server takes the longest prompt with a whole answer after it.

    It would refuse longer ones, or cut their answers short without a word.

    Raises:
        UserError: it does not; names the prompt.
    """
    limit = found.get("max_req_input_len")
    if limit is None:
        return
    room = limit + 4  # of context: SGLang keeps 5 tokens free, and one for the token being made
    if speculation:
        room -= max(speculation.topk * speculation.num_steps, speculation.draft_tokens)
    for name, items in prompts.items():
        longest = max(items, key=lambda prompt: len(prompt.input_ids))
        if len(longest.input_ids) + max_new_tokens > room:
            raise UserError(
                f"benchmark.{name}: prompt {longest.id} has {len(longest.input_ids)} tokens, which "
                f"with eval.max_new_tokens={max_new_tokens} is more than the {room} that the "
                "server has room for. Raise server.args.context_length (and max_total_tokens), "
                "lower eval.max_new_tokens, or leave the prompt out"
            )
