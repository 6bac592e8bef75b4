"""Every figure we report about acceptance, defined once.

A histogram [K + 1] counts verify steps by how many of their K drafts were accepted. From it:

    marginal_k    share of verify steps with more than k accepted drafts, k = 0..K-1
    step-0 acceptance = marginal_0
    conditional_k = marginal_k / marginal_{k-1}, conditional_0 = marginal_0
    accept length = 1 + sum of marginals: tokens gained by one verify step

Intervals come from a bootstrap over requests, since the verify steps of one answer are not
independent. One request says nothing of how much others differ: its interval is all there can be.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from eagle3.walk import marginals

RESAMPLES = 2000


@dataclass(kw_only=True, slots=True)
class Acceptance:
    """Acceptance figures of a set of requests, with 95% intervals."""

    step0: float
    step0_ci95: list[float]
    marginal: list[float]
    conditional: list[float]
    accept_length: float
    accept_length_ci95: list[float]
    verify_steps: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def acceptance(histograms: list[list[int]], seed: int = 0) -> Acceptance:
    """Figures of one histogram per request, all of the same length.

    What does not vary independently (the turns of a conversation, the answers to one prompt) counts
    as one request: hand over its sum.

    Raises:
        ValueError: no request, or histograms of different lengths.
    """
    if not histograms or len({len(h) for h in histograms}) != 1:
        raise ValueError("acceptance needs histograms of one length")
    table = np.asarray(histograms, dtype=np.int64)
    marginal = marginals(table.sum(axis=0))
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(table), size=(RESAMPLES, len(table)))
    sampled = marginals(np.stack([table[pick].sum(axis=0) for pick in picks]))
    step0 = np.percentile(sampled[:, 0], [2.5, 97.5])
    length = np.percentile(1 + sampled.sum(axis=1), [2.5, 97.5])
    if len(table) == 1:
        step0, length = np.array([0.0, 1.0]), np.array([1.0, table.shape[1]])
    before = np.concatenate([[1.0], marginal[:-1]])
    conditional = np.divide(marginal, before, out=np.zeros_like(marginal), where=before > 0)
    return Acceptance(
        step0=float(marginal[0]),
        step0_ci95=step0.tolist(),
        marginal=marginal.tolist(),
        conditional=conditional.tolist(),
        accept_length=float(1 + marginal.sum()),
        accept_length_ci95=length.tolist(),
        verify_steps=int(table.sum()),
    )
