"""Figures from raw samples: percentiles that were really observed, and rates of what really succeeded."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scripts.lib.load import LoadResult


def percentile(values: Sequence[float], q: float) -> float | None:
    """The smallest observed value that at least q % of the values don't exceed; None of no values.

    Never interpolated: what it returns is one of the values.

    Raises:
        ValueError: q outside 0–100.
    """
    if not 0 <= q <= 100:
        raise ValueError(f"a percentile lies between 0 and 100, not at {q}")
    if not len(values):
        return None
    return float(np.percentile(np.asarray(values, dtype=np.float64), q, method="inverted_cdf"))


@dataclass(frozen=True)
class Summary:
    """One measured window in figures. Latencies are of successful requests, in milliseconds; None where none was.

    Attributes:
        requests: how many were sent.
        errors: how many were not answered with 2xx.
        errors_by_status: how many per HTTP status; 0 is no answer at all.
        texts: texts of successful requests.
        wall_s: length of the window in seconds.
        requests_per_s: successful requests per second.
        texts_per_s: texts of successful requests per second.
        tokens_per_s: their tokens per second.
    """

    requests: int
    errors: int
    errors_by_status: dict[int, int]
    texts: int
    wall_s: float
    requests_per_s: float
    texts_per_s: float
    tokens_per_s: float
    mean_ms: float | None
    p50_ms: float | None
    p90_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    max_ms: float | None


def summarize(result: LoadResult) -> Summary:
    """Summarise the samples of a window; failed requests count as errors and enter no rate and no latency."""
    good = [sample for sample in result.samples if sample.ok]
    failed = Counter(sample.status for sample in result.samples if not sample.ok)
    latencies = [sample.latency_s * 1e3 for sample in good]
    texts = sum(sample.texts for sample in good)
    return Summary(
        requests=len(result.samples),
        errors=sum(failed.values()),
        errors_by_status=dict(sorted(failed.items())),
        texts=texts,
        wall_s=result.wall_s,
        requests_per_s=len(good) / result.wall_s,
        texts_per_s=texts / result.wall_s,
        tokens_per_s=sum(sample.tokens for sample in good) / result.wall_s,
        mean_ms=float(np.mean(latencies)) if latencies else None,
        p50_ms=percentile(latencies, 50),
        p90_ms=percentile(latencies, 90),
        p95_ms=percentile(latencies, 95),
        p99_ms=percentile(latencies, 99),
        max_ms=percentile(latencies, 100),
    )


@dataclass(frozen=True)
class Spread:
    """A figure measured in several rounds: its median and its extremes."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Spread of at least one value.

        Raises:
            ValueError: no values.
        """
        if not len(values):
            raise ValueError("no values")
        return cls(float(np.median(values)), min(values), max(values))
