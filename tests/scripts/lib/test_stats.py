"""Percentiles are observed values in the right place, and failures enter no rate."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.lib.load import NO_ANSWER, LoadResult, Sample
from scripts.lib.stats import Spread, percentile, summarize

values = st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=300)
ranks = st.floats(0, 100)


def _result(*samples: Sample, wall_s: float = 2.0) -> LoadResult:
    return LoadResult(samples, clients=1, wall_s=wall_s, cpu_share=0.1, loop_share=0.1)


def _sample(latency_s: float, status: int = 200, texts: int = 1) -> Sample:
    return Sample(0.0, latency_s, status, received=10, texts=texts, tokens=7 * texts)


@given(values, ranks)
def test_a_percentile_is_an_observed_value_that_enough_values_do_not_exceed(observed: list[float], q: float) -> None:
    found = percentile(observed, q)
    assert found in observed
    assert np.mean(np.asarray(observed) <= found) >= q / 100 - 1e-9


@given(values, ranks)
def test_no_smaller_observed_value_would_do(observed: list[float], q: float) -> None:
    found = percentile(observed, q)
    smaller = [value for value in observed if found is not None and value < found]
    if smaller:
        assert np.mean(np.asarray(observed) <= max(smaller)) < q / 100 + 1e-9


@given(values, ranks, ranks)
def test_percentiles_grow_with_their_rank(observed: list[float], one: float, other: float) -> None:
    low, high = (percentile(observed, q) for q in sorted((one, other)))
    assert low is not None
    assert high is not None
    assert min(observed) <= low <= high <= max(observed)


@given(values, st.randoms(use_true_random=False))
def test_order_does_not_matter(observed: list[float], rng: object) -> None:
    shuffled = list(observed)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert percentile(observed, 95) == percentile(shuffled, 95)


def test_known_percentiles() -> None:
    observed = list(range(1, 101))
    assert [percentile(observed, q) for q in (0, 1, 50, 95, 99, 100)] == [1, 1, 50, 95, 99, 100]
    assert percentile([], 50) is None
    with pytest.raises(ValueError, match="between 0 and 100"):
        percentile([1.0], 101)


@given(st.lists(st.tuples(st.floats(1e-4, 10), st.sampled_from([200, 400, 503, NO_ANSWER]), st.integers(1, 32))))
def test_a_summary_counts_every_sample_once(rows: list[tuple[float, int, int]]) -> None:
    result = _result(*(_sample(*row) for row in rows))
    summary = summarize(result)
    good = [row for row in rows if row[1] == 200]
    assert summary.requests == len(rows)
    assert summary.errors == len(rows) - len(good) == sum(summary.errors_by_status.values())
    assert summary.texts == sum(row[2] for row in good)
    assert summary.requests_per_s == pytest.approx(len(good) / 2.0)
    assert summary.texts_per_s == pytest.approx(summary.texts / 2.0)
    assert summary.tokens_per_s == pytest.approx(7 * summary.texts / 2.0)
    assert (summary.p50_ms is None) == (not good)


def test_fast_failures_do_not_flatter_the_latencies() -> None:
    summary = summarize(_result(_sample(0.1), _sample(0.3), _sample(0.001, 503), _sample(0.001, NO_ANSWER)))
    assert (summary.p50_ms, summary.max_ms) == (pytest.approx(100), pytest.approx(300))
    assert summary.errors_by_status == {NO_ANSWER: 1, 503: 1}


def test_spread() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    with pytest.raises(ValueError, match="no values"):
        Spread.of([])
