"""Figures from raw samples: percentiles that were really observed, and rates of what really succeeded."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from scripts.lib.load import LoadResult, Sample

# Statuses of a server that refuses a request because it has too many: load that is shed, not an error.
SHED = frozenset({429, 503})
# Shares of the requests, in per cent, at which a distribution is drawn: denser where the tail is.
SHARES = (*range(0, 100, 2), 99, 99.5, 99.9, 99.99, 100)


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
        errors: how many were not answered with 2xx, those that were shed apart.
        errors_by_status: how many per HTTP status; 0 is no answer at all.
        texts: texts of successful requests.
        wall_s: length of the window in seconds.
        requests_per_s: successful requests per second.
        texts_per_s: texts of successful requests per second.
        tokens_per_s: their tokens per second.
        shed: how many the server refused because it has too many (`SHED`).
        first_token_p50_ms, first_token_p95_ms: from when a request was due to its first token, of streamed answers.
        generated_per_s: tokens written per second; None where the server doesn't count them.
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
    shed: int = 0
    first_token_p50_ms: float | None = None
    first_token_p95_ms: float | None = None
    generated_per_s: float | None = None


def summarize(result: LoadResult) -> Summary:
    """Summarise the samples of a window; what failed or was shed enters no rate and no latency."""
    good = [sample for sample in result.samples if sample.ok]
    refused = Counter(sample.status for sample in result.samples if not sample.ok)
    failed = {status: count for status, count in sorted(refused.items()) if status not in SHED}
    firsts = [sample.first_s * 1e3 for sample in good if sample.first_s is not None]
    generated = [sample.generated for sample in good if sample.generated is not None]
    latencies = [sample.latency_s * 1e3 for sample in good]
    texts = sum(sample.texts for sample in good)
    return Summary(
        requests=len(result.samples),
        errors=sum(failed.values()),
        errors_by_status=failed,
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
        shed=refused.total() - sum(failed.values()),
        first_token_p50_ms=percentile(firsts, 50),
        first_token_p95_ms=percentile(firsts, 95),
        generated_per_s=sum(generated) / result.wall_s if generated else None,
    )


@dataclass(frozen=True)
class Second:
    """One second of a window.

    Attributes:
        at: seconds from the start of the window to the start of this second.
        due: requests that were due in it.
        answered, errors, shed: requests that ended in it, by how they ended.
        p95_ms: of those answered in it; None where none was.
    """

    at: int
    due: int
    answered: int
    errors: int
    shed: int
    p95_ms: float | None


def timeline(samples: Iterable[Sample]) -> tuple[Second, ...]:
    """What was due and what ended in each second, from the window's start to the last answer, quiet ones too."""
    due, ended = Counter[int](), Counter[tuple[int, str]]()
    latencies: dict[int, list[float]] = {}
    last = -1
    for sample in samples:
        start, end = (max(0, int(moment)) for moment in (sample.due_s, sample.due_s + sample.latency_s))
        due[start] += 1
        ended[end, "ok" if sample.ok else "shed" if sample.status in SHED else "error"] += 1
        if sample.ok:
            latencies.setdefault(end, []).append(sample.latency_s * 1e3)
        last = max(last, start, end)
    return tuple(
        Second(
            at, due[at], ended[at, "ok"], ended[at, "error"], ended[at, "shed"], percentile(latencies.get(at, ()), 95)
        )
        for at in range(last + 1)
    )


def distribution(samples: Iterable[Sample]) -> tuple[tuple[float, float], ...]:
    """The latencies of answered requests as (milliseconds, share of requests within), ascending in both."""
    latencies = [sample.latency_s * 1e3 for sample in samples if sample.ok]
    if not latencies:
        return ()
    drawn = np.percentile(np.asarray(latencies), SHARES, method="inverted_cdf")
    return tuple((float(value), share / 100) for value, share in zip(drawn, SHARES, strict=True))


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
