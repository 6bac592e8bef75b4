"""Settings of speculative decoding: what SGLang drafts and verifies at a time."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from eagle3.config import TuneConfig
from eagle3.errors import UserError

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True, frozen=True)
class Speculation:
    """num_steps: draft steps before each verification. topk: branches of each step; 1 is a chain.
    draft_tokens: tokens verified at a time, among them the last one generated (the root)."""

    num_steps: int
    topk: int
    draft_tokens: int

    @classmethod
    def chain(cls, num_steps: int) -> Speculation:
        """One draft a step, all of them verified."""
        return cls(num_steps=num_steps, topk=1, draft_tokens=num_steps + 1)

    @property
    def name(self) -> str:
        """For files."""
        return f"steps{self.num_steps}_topk{self.topk}_tokens{self.draft_tokens}"

    @property
    def tree_size(self) -> int:
        """Tokens there are to choose from: the root, topk children of it, and at each later step
        topk children of each of the topk best (SGLang, `select_top_k_tokens`)."""
        return 1 + self.topk + (self.num_steps - 1) * self.topk**2

    def server_args(self, drafter: Path) -> dict[str, Any]:
        """SGLang flags that serve a drafter folder so."""
        return {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(drafter),
            "speculative_num_steps": self.num_steps,
            "speculative_eagle_topk": self.topk,
            "speculative_num_draft_tokens": self.draft_tokens,
        }


def combinations(config: TuneConfig) -> list[Speculation]:
    """Every combination of the lists, by num_steps, topk, draft tokens as listed.

    A tree with fewer tokens than are to be verified is left out with a line in the log.

    Raises:
        UserError: a list is empty, names a value twice or one that cannot be, or holds one that no
            combination is left with; draft_tokens is missing, or set without need.
    """
    wanted = {
        "num_steps": config.num_steps,
        "topk": config.topk,
        "draft_tokens": config.draft_tokens or [],
    }
    for key, values in wanted.items():
        least = 2 if key == "draft_tokens" else 1
        if wrong := [v for v in values if v < least]:
            raise UserError(f"tune.{key} holds {wrong}: at least {least} is needed")
        if len(set(values)) < len(values):
            raise UserError(f"tune.{key}={values} names a value twice")
    if not config.num_steps or not config.topk:
        raise UserError("tune.num_steps and tune.topk must each name a value")
    trees = [k for k in config.topk if k > 1]
    if trees and not config.draft_tokens:
        raise UserError(
            f"tune.topk={trees} drafts trees: set tune.draft_tokens, how many tokens of a tree the "
            "target checks at a time, for example [4,8,16]"
        )
    if config.draft_tokens and not trees:
        raise UserError(
            f"tune.draft_tokens={config.draft_tokens} is for tune.topk > 1; a chain always has "
            "num_steps + 1: leave it out, or name a topk > 1"
        )
    found = []
    for num_steps, topk in product(config.num_steps, config.topk):
        if topk == 1:
            found.append(Speculation.chain(num_steps))
            continue
        for draft_tokens in config.draft_tokens or []:
            one = Speculation(num_steps=num_steps, topk=topk, draft_tokens=draft_tokens)
            if draft_tokens <= one.tree_size:
                found.append(one)
            else:
                log.info("%s is left out: its tree has %d tokens", one.name, one.tree_size)
    for key, values in wanted.items():
        used = {getattr(s, key) for s in found if key != "draft_tokens" or s.topk > 1}
        if unused := [v for v in values if v not in used]:
            raise UserError(
                f"tune.{key}: {unused} fits no combination, since a tree has "
                "1 + topk + (num_steps - 1) * topk^2 tokens; name fewer draft tokens or more steps"
            )
    return found
