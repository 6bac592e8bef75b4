"""What a configuration may hold beyond its types, checked before anything starts: numbers in their
ranges, by one table, and no secrets where they would be written down.

What depends on the target, the data or another value is checked where that is known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from operator import attrgetter
from typing import Any

from eagle3.config import Config, ServerConfig
from eagle3.errors import UserError

SECRET = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD|CREDENTIALS)$", re.IGNORECASE)
"""Names of variables and flags that hold one."""

BENCHMARK = re.compile(r"[^\W_][\w.-]{0,63}")
CREDENTIALS = re.compile(r"\w+://[^/]*@")
OURS = {
    "model_path": "target.path", "model": "target.path", "host": "server.host",
    "port": "server.port",
}  # fmt: skip
"""Flags of a server that the launcher sets -> from what."""

RANGES: dict[str, tuple[Callable[[float], bool], tuple[str, ...]]] = {
    "1 or more": (
        lambda x: x >= 1,
        (
            "server.replicas", "data.limit", "data.max_length", "respond.limit",
            "respond.concurrency", "respond.max_new_tokens", "respond.samples_per_prompt",
            "extract.concurrency", "extract.shard_bytes", "draft.intermediate_size",
            "draft.num_attention_heads", "draft.num_key_value_heads", "draft.head_dim",
            "draft.num_layers", "train.max_steps",
            "train.tokens_per_batch", "train.accumulation", "train.ttt_steps", "train.log_every",
            "train.validate_every", "train.save_every", "train.keep_checkpoints",
            "eval.concurrency", "eval.max_new_tokens", "eval.num_steps", "eval.offline_samples",
        ),
    ),
    "0 or more": (
        lambda x: x >= 0,
        (
            "respond.skip", "respond.temperature", "verify.recapture", "server.patience_s",
            "extract.max_rejected",
            "optimizer.weight_decay", "train.step_decay", "train.simulate_samples", "eval.warmup",
        ),
    ),
    "0 or more and below 2^63": (lambda x: 0 <= x < 2**63, ("seed",)),
    "above 0": (
        lambda x: x > 0,
        (
            "server.deadline_s", "server.timeout_s", "server.memory_gb", "server.stall_s",
            "extract.tokens_per_s", "extract.max_hours", "optimizer.lr",
            "train.epochs", "train.peak_tflops",
        ),
    ),
    "above 0 and at most 1": (lambda x: 0 < x <= 1, ("respond.top_p",)),
    "0 or more and below 1": (
        lambda x: 0 <= x < 1,
        (
            "optimizer.beta1", "optimizer.beta2", "optimizer.momentum", "train.validation_ratio",
        ),
    ),
}  # fmt: skip
"""What it must be -> whether it is, and the keys; in a list, each item."""


def require(config: Config) -> None:
    """Refuse secrets, and numbers that nothing could be done with; None is none.

    Raises:
        UserError: names the key, the value and what it may be.
    """
    _require_no_secret(config.server)
    _require_no_flag_of_ours(config.server)
    for url in (*config.server.urls, config.eval.plain_url, config.eval.speculative_url):
        if url and CREDENTIALS.match(url):
            raise UserError(
                "a server's URL holds a user or password, and URLs are written into manifests and "
                "reports: put the token into server.api_key, or a proxy between"
            )
    if not config.run_name:
        raise UserError("run_name is empty: give the run's folder under runs_dir a name")
    for words, (holds, keys) in RANGES.items():
        for key in keys:
            _require(key, attrgetter(key)(config), words, holds)
    words = "1 or more"
    for name, benchmark in config.benchmark.items():
        if not BENCHMARK.fullmatch(name):
            raise UserError(
                f"benchmark.{name}: names have up to 64 letters, digits, '_', '.' and '-', and "
                "begin with a letter or digit; they are files, and cells of tables"
            )
        _require(f"benchmark.{name}.limit", benchmark.limit, words, RANGES[words][0])
    for key, value in _numbers("", asdict(config)):
        if not math.isfinite(value):
            raise UserError(f"{key}={value} must be a finite number")


def _numbers(key: str, value: Any) -> Iterator[tuple[str, float]]:
    """Every float of a configuration, with its key."""
    if isinstance(value, float):
        yield key, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _numbers(f"{key}.{name}" if key else str(name), part)
    elif isinstance(value, list):
        for part in value:
            yield from _numbers(key, part)


def _require(key: str, value: Any, words: str, holds: Callable[[float], bool]) -> None:
    if value == []:
        raise UserError(f"{key}=[] must name at least one")
    for one in value if isinstance(value, list) else [value]:
        if one is not None and not holds(one):
            raise UserError(f"{key}={value} must be {words}")


def _require_no_flag_of_ours(server: ServerConfig) -> None:
    for name in server.args:
        if "-" in name:
            plain = name.lstrip("-").replace("-", "_")
            raise UserError(f"server.args.{name}: write flags with underscores, {plain}")
        if instead := OURS.get(name):
            raise UserError(f"server.args.{name} is decided by {instead}; remove it")


def _require_no_secret(server: ServerConfig) -> None:
    """Whatever is set for servers is written into manifests, reports, trackers and commands."""
    for key, names in (("env", server.env), ("args", server.args)):
        if found := [name for name in names if SECRET.search(name)]:
            raise UserError(
                f"server.{key} holds {found}, and everything there is written into manifests and "
                "launch commands. Export secrets in the shell that runs this command: its servers "
                "inherit them; a server that is started here needs no API key"
            )
