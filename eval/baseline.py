"""A bigram predictor: what acceptance costs nothing, and so the least a drafter must beat."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from eagle3.walk import walk


class Bigram:
    """Drafts the token that most often followed the previous one in the training text."""

    def __init__(self, texts: Iterable[Sequence[int]]) -> None:
        follows: dict[int, Counter[int]] = defaultdict(Counter)
        for tokens in texts:
            for token, following in zip(tokens, tokens[1:], strict=False):
                follows[token][following] += 1
        self.next = {
            token: min(counts, key=lambda t: (-counts[t], t)) for token, counts in follows.items()
        }

    def draft(self, token: int, num_steps: int) -> list[int]:
        """The chain after `token`; -1 where the token was never seen."""
        chain = []
        for _ in range(num_steps):
            token = self.next.get(token, -1)
            chain.append(token)
        return chain

    def histogram(self, output_ids: Sequence[int], num_steps: int) -> list[int]:
        """As `walk`, over one generated answer."""
        return walk(
            output_ids,
            (0, len(output_ids)),
            lambda last, steps: self.draft(output_ids[last], steps),
            num_steps,
        )
