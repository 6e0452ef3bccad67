"""A distribution of seconds in a few numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """Median, spread and tail, in seconds."""

    median: float
    low_quartile: float
    high_quartile: float
    minimum: float
    maximum: float
    rounds: int
    mean: float = 0.0
    p99: float = 0.0
    """The least figure that is not exceeded by 99 of 100."""

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Summary:
        """The summary of at least one figure.  Quartiles are those of ``statistics.quantiles(method="inclusive")``."""
        if not seconds:
            raise ValueError("a summary needs at least one figure, got none")
        low, median, high = (
            statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 3
        )
        in_order = sorted(seconds)
        p99 = in_order[-(-99 * len(in_order) // 100) - 1]
        return cls(median, low, high, in_order[0], in_order[-1], len(seconds), statistics.fmean(seconds), p99)

    @property
    def points(self) -> tuple[float, float, float, float]:
        """Median, quartiles, minimum: the columns of a table."""
        return self.median, self.low_quartile, self.high_quartile, self.minimum

    @property
    def spread(self) -> float:
        """How far apart the quartiles lie, as a part of the median; 0 for a median of 0."""
        return (self.high_quartile - self.low_quartile) / abs(self.median) if self.median else 0.0
