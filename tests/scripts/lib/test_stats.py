"""Percentiles are observed values in the right place, and failures enter no rate."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.lib.load import NO_ANSWER, LoadResult, Sample
from scripts.lib.stats import Spread, distribution, percentile, summarize, timeline

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
    assert summary.errors + summary.shed == len(rows) - len(good)
    assert summary.errors == sum(summary.errors_by_status.values())
    assert summary.texts == sum(row[2] for row in good)
    assert summary.requests_per_s == pytest.approx(len(good) / 2.0)
    assert summary.texts_per_s == pytest.approx(summary.texts / 2.0)
    assert summary.tokens_per_s == pytest.approx(7 * summary.texts / 2.0)
    assert (summary.p50_ms is None) == (not good)


def test_fast_failures_do_not_flatter_the_latencies() -> None:
    summary = summarize(_result(_sample(0.1), _sample(0.3), _sample(0.001, 503), _sample(0.001, NO_ANSWER)))
    assert (summary.p50_ms, summary.max_ms) == (pytest.approx(100), pytest.approx(300))
    assert (summary.errors_by_status, summary.shed) == ({NO_ANSWER: 1}, 1)


def test_spread() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    with pytest.raises(ValueError, match="no values"):
        Spread.of([])


samples = st.lists(
    st.builds(
        Sample,
        due_s=st.floats(0, 20),
        latency_s=st.floats(0, 9),
        status=st.sampled_from([200, 201, NO_ANSWER, 400, 429, 503]),
        received=st.just(1),
        texts=st.integers(1, 4),
        tokens=st.integers(0, 9),
    ),
    max_size=60,
)


@given(samples)
def test_the_timeline_and_the_totals_agree(seen: list[Sample]) -> None:
    summary = summarize(_result(*seen))
    seconds = timeline(seen)
    assert [second.at for second in seconds] == list(range(len(seconds)))
    assert sum(second.due for second in seconds) == summary.requests
    assert sum(second.errors for second in seconds) == summary.errors == sum(summary.errors_by_status.values())
    assert sum(second.shed for second in seconds) == summary.shed
    answered = sum(second.answered for second in seconds)
    assert answered == summary.requests - summary.errors - summary.shed == round(summary.requests_per_s * 2)
    assert all((second.p95_ms is not None) == (second.answered > 0) for second in seconds)
    # Of fewer than 20 the p95 is the slowest
    if summary.max_ms is not None and answered < 20:
        assert max(second.p95_ms or 0 for second in seconds) == summary.max_ms


@given(samples)
def test_a_distribution_ends_at_the_slowest_and_passes_the_percentiles(seen: list[Sample]) -> None:
    summary, drawn = summarize(_result(*seen)), distribution(seen)
    assert bool(drawn) == (summary.max_ms is not None)
    assert list(drawn) == sorted(drawn)
    if drawn:
        assert drawn[-1] == (summary.max_ms, 1.0)
        assert {share: value for value, share in drawn}[0.5] == summary.p50_ms


def test_what_happens_in_which_second() -> None:
    first, second, third = timeline([_sample(0.5), _sample(2.5, 503), _sample(0.2, 500), _sample(0.1)])
    assert (first.due, first.answered, first.errors, first.shed, first.p95_ms) == (4, 2, 1, 0, 500)
    assert (second.due, second.answered, second.p95_ms) == (0, 0, None)
    assert (third.due, third.shed) == (0, 1)


def test_first_tokens_and_written_tokens_are_of_those_that_have_them() -> None:
    streamed = Sample(0.0, 1.0, 200, 10, 1, 0, first_s=0.25, generated=30)
    summary = summarize(_result(streamed, _sample(0.1)))
    assert (summary.first_token_p50_ms, summary.first_token_p95_ms, summary.generated_per_s) == (250, 250, 15)
    assert summarize(_result(_sample(0.1))).generated_per_s is None
