"""95% intervals of a mean over seeds (Student's t)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 8: 2.36, 10: 2.26}
"""97.5% points for the mean of n values."""


def interval(values: Sequence[float]) -> list[float]:
    """95% interval of the mean; of paired differences, give it the differences."""
    half = T95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    mean = statistics.mean(values)
    return [mean - half, mean + half]
