import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.lib.hopeless import Watch, allowed_misses
from scripts.lib.load import LoadResult, Sample
from scripts.lib.objective import Objective, judged_ms

OBJECTIVES = ["p95<=100ms", "p50<=50ms,p99<=200ms", "max<=150ms", "p99.9<=100ms", "mean<=80ms", "p1<=10ms"]


def sample(due_s: float, latency_s: float, status: int = 200) -> Sample:
    return Sample(due_s, latency_s, status, 10, 1, 5)


@given(
    st.sampled_from(OBJECTIVES),
    st.lists(st.tuples(st.floats(0, 10), st.floats(0.001, 0.3), st.sampled_from([200] * 9 + [503])), min_size=1),
)
def test_a_window_is_stopped_if_it_misses_and_only_then(text: str, requests: list[tuple[float, float, int]]) -> None:
    samples = [sample(*request) for request in requests]
    objective, stop = Objective.parse(text), asyncio.Event()
    watch = Watch(objective, sorted(each.due_s for each in samples), stop)
    for each in sorted(samples, key=lambda each: each.due_s + each.latency_s):
        watch.add(each)
    met = objective.met(judged_ms(LoadResult(tuple(samples), 1, 10.0, 0.1, 0.1)))
    if abs(sum(each.latency_s for each in samples) / len(samples) - 0.08) > 1e-9:  # a mean on its bound may round
        assert stop.is_set() == (not met)


def test_it_is_stopped_as_soon_as_too_much_is_lost() -> None:
    stop = asyncio.Event()
    watch = Watch(Objective.parse("p95<=100ms"), [float(number) for number in range(100)], stop)
    for number in range(5):
        watch.add(sample(float(number), 0.2))
        assert not stop.is_set()
    watch.add(sample(5.0, 0.2))
    assert stop.is_set()


def test_a_server_that_answers_nothing_is_noticed() -> None:
    stop = asyncio.Event()
    watch = Watch(Objective.parse("p95<=100ms"), [0.1 * number for number in range(100)], stop)
    watch.look(0.55)
    assert not stop.is_set(), "five requests of a hundred may be late"
    watch.look(0.65)
    assert stop.is_set()


def test_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.lib.hopeless.TICK_S", 0.01)

    async def wait() -> None:
        stop = asyncio.Event()
        ticking = asyncio.ensure_future(Watch(Objective.parse("max<=1ms"), [0.0], stop).tick())
        await asyncio.wait_for(stop.wait(), 5)
        ticking.cancel()

    asyncio.run(wait())


@pytest.mark.parametrize(
    ("text", "requests", "allowed"),
    [("p95<=1s", 100, 5), ("p95<=1s", 19, 0), ("p50<=1s", 3, 1), ("max<=1s", 50, 0), ("p99.9<=1s", 2000, 2)],
)
def test_allowed_misses(text: str, requests: int, allowed: int) -> None:
    assert allowed_misses(Objective.parse(text).conditions[0], requests) == allowed
