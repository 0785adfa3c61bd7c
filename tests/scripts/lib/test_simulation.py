import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scripts.lib.costs import Request
from scripts.lib.schedule import steady
from scripts.lib.simulation import TAKE_S, ClosedLoop, OpenLoop, Outcome, Setup, simulate

setups = st.builds(
    Setup,
    workers=st.integers(1, 4),
    batch_size=st.integers(1, 6),
    max_batch_delay=st.integers(1, 20),
    queue=st.integers(1, 12),
    workers_per_device=st.integers(1, 3),
)
times = st.lists(st.floats(0, 0.3), min_size=1, max_size=60).map(sorted)
ONE: list[Request] = [(1,)]


def cost(requests: Sequence[Request], busy: int) -> float:
    """Some cost that depends on everything it may depend on."""
    return 0.002 + 0.001 * len(requests) + 1e-5 * sum(map(sum, requests)) * busy


def run(setup: Setup, sent: Sequence[float]) -> Outcome:
    return simulate(setup, cost, [(7,), (90,), (3, 4)], OpenLoop(sent), frontend_s=0.001)


@given(setups, times)
def test_every_request_is_answered_once_or_refused_by_a_full_queue(setup: Setup, sent: list[float]) -> None:
    outcome = run(setup, sent)
    refused = np.isnan(outcome.answered)
    assert outcome.sizes.sum() + refused.sum() == len(sent)
    assert ((outcome.batch < 0) == refused).all()
    assert (np.bincount(outcome.batch[~refused], minlength=len(outcome.sizes)) == outcome.sizes).all()
    for number in np.flatnonzero(refused):
        moment = outcome.sent[number]
        waiting = sum(
            outcome.sent[other] <= moment <= outcome.dispatched[outcome.batch[other]]
            for other in range(number)
            if outcome.batch[other] >= 0
        )
        assert waiting >= setup.queue


@given(setups, times)
def test_the_order_of_arrival_is_kept(setup: Setup, sent: list[float]) -> None:
    batches = [b for b in run(setup, sent).batch if b >= 0]
    assert batches == sorted(batches)


@given(setups, times)
def test_batches_keep_to_size_and_delay_and_to_one_assembler(setup: Setup, sent: list[float]) -> None:
    outcome = run(setup, sent)
    assert outcome.sizes.max() <= setup.batch_size
    waited = outcome.dispatched - outcome.taken
    # the clock that the delay is counted by has whole milliseconds
    assert (waited <= (setup.max_batch_delay + 1) * 1e-3 + setup.batch_size * TAKE_S).all()
    assert (outcome.taken[1:] >= outcome.dispatched[:-1]).all()
    assert 0 < outcome.utilisation <= 1


@example(Setup(1, 4, 1, queue=1), [0.0, 1e-193, 6.103515625e-05, 0.0009, 0.0078125])
@given(setups, times)
def test_no_more_batches_run_at_once_than_there_are_workers(setup: Setup, sent: list[float]) -> None:
    outcome = run(setup, sent)
    # the first answer leaves when its batch is done, the others while the next one runs already
    ends = np.array([np.nanmin(outcome.answered[outcome.batch == b]) - 0.001 for b in range(len(outcome.sizes))])
    for start in outcome.dispatched:
        assert ((outcome.dispatched <= start) & (ends > start + 1e-9)).sum() <= setup.workers
    assert (ends > outcome.dispatched).all()


@given(st.integers(1, 4), times)
def test_with_single_requests_another_worker_makes_none_later(workers: int, sent: list[float]) -> None:
    fewer, more = (
        simulate(Setup(count, 1, 1), lambda batch, busy: 0.01, ONE, OpenLoop(sent)) for count in (workers, workers + 1)
    )
    assert (more.answered <= fewer.answered + 1e-9).all()


def test_more_workers_bring_batches_of_many_under_load_down_in_time() -> None:
    load = OpenLoop(list(steady(400, 10).times()))
    p95 = [
        simulate(Setup(count, 8, 2), lambda b, _: 0.01 + 0.002 * len(b), ONE, load).latency_ms(95)
        for count in (2, 3, 4)
    ]
    assert None not in p95
    assert p95 == sorted(p95, reverse=True)  # type: ignore[type-var]


@given(setups, st.integers(1, 12), st.integers(1, 80))
def test_a_closed_loop_sends_all_and_never_more_at_once_than_it_has_clients(
    setup: Setup, clients: int, requests: int
) -> None:
    if clients > setup.queue:
        with pytest.raises(ValueError, match="queue"):
            simulate(setup, cost, ONE, ClosedLoop(clients, requests))
        return
    outcome = simulate(setup, cost, ONE, ClosedLoop(clients, requests, think_s=0.001), frontend_s=0.002)
    assert not np.isnan(outcome.answered).any()
    for moment in outcome.sent:
        assert ((outcome.sent <= moment) & (outcome.answered + 0.001 > moment + 1e-12)).sum() <= clients


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_single_requests_of_one_worker_wait_as_the_formula_says(load: float) -> None:
    """M/D/1: the mean wait is ρ·s / 2(1 - ρ) (Pollaczek and Khinchine)."""
    seconds = 0.01
    sent = list(steady(load / seconds, 60_000 * seconds / load, seed=3).times())
    outcome = simulate(Setup(1, 1, 1, queue=100_000), lambda batch, busy: seconds, ONE, OpenLoop(sent))
    expected = load * seconds / (2 * (1 - load))
    assert np.mean(outcome.latencies_ms) / 1e3 - seconds == pytest.approx(expected, rel=0.08)
    assert outcome.utilisation == pytest.approx(load, rel=0.03)


def test_a_lone_client_waits_out_the_delay_every_time() -> None:
    outcome = simulate(Setup(2, 8, 20), lambda batch, busy: 0.005, ONE, ClosedLoop(1, 50, 0.0001), frontend_s=0.001)
    assert outcome.latencies_ms == pytest.approx([26.0] * len(outcome.latencies_ms), abs=0.1)
    assert outcome.batch_size == 1


def test_the_answers_of_a_batch_leave_one_after_the_other() -> None:
    """Else the clients of a closed loop would ask again at one moment, and meet in one batch for ever."""
    outcome = simulate(Setup(1, 3, 1), lambda batch, busy: 0.1, ONE, OpenLoop([0.0, 0.0, 0.0]), frontend_s=0.002)
    assert np.diff(outcome.answered) == pytest.approx([0.001, 0.001])
    setup = Setup(2, 8, 1, workers_per_device=2)
    outcome = simulate(setup, lambda batch, busy: 0.05, ONE, ClosedLoop(8, 400), frontend_s=0.002)
    assert outcome.batch_size < 6


def test_the_delay_counts_from_the_first_job_and_in_the_clocks_milliseconds() -> None:
    sent = [0.0109, 0.0112, 0.0140, 0.0141]  # the clock says 10, 11, 14, 14
    outcome = simulate(Setup(1, 8, 3), lambda batch, busy: 0.5, ONE, OpenLoop(sent))
    # 1 ms is used up by the second; the third comes 2.8 ms later, and 2 ms after the second the batch is closed
    assert list(outcome.sizes[:1]) == [2]
    assert outcome.dispatched[0] == pytest.approx(0.0112 + 0.002, abs=1e-5)


def test_a_full_batch_goes_at_once() -> None:
    outcome = simulate(Setup(1, 3, 50), lambda batch, busy: 0.01, ONE, OpenLoop([0.1, 0.101, 0.102]))
    assert outcome.dispatched[0] == pytest.approx(0.102, abs=1e-4)


def test_while_one_worker_assembles_the_others_wait() -> None:
    outcome = simulate(Setup(3, 2, 30), lambda batch, busy: 1.0, ONE, OpenLoop([0.0, 0.001, 0.002, 0.003]))
    assert list(outcome.batch) == [0, 0, 1, 1]


def test_workers_of_one_device_slow_each_other_down_and_those_of_others_do_not() -> None:
    seen: dict[int, list[int]] = {}
    for each in (1, 2, 4):
        busy: list[int] = []

        def seconds(batch: Sequence[Request], count: int, busy: list[int] = busy) -> float:
            busy.append(count)
            return 1.0

        simulate(Setup(4, 1, 1, workers_per_device=each), seconds, ONE, OpenLoop([0.0, 0.1, 0.2, 0.3]))
        seen[each] = busy
    assert seen == {1: [1, 1, 1, 1], 2: [1, 2, 1, 2], 4: [1, 2, 3, 4]}


@settings(max_examples=20)
@given(st.integers(0, 5))
def test_the_same_seed_gives_the_same_outcome(seed: int) -> None:
    sent = list(steady(300, 0.5, seed=seed).times()) or [0.0]
    requests = [(length,) for length in range(1, 30)]
    one, other = (simulate(Setup(2, 4, 2), cost, requests, OpenLoop(sent), seed=seed) for _ in range(2))
    assert np.array_equal(one.answered, other.answered, equal_nan=True)


def test_requests_that_match_the_load_keep_their_order() -> None:
    lengths: list[int] = []

    def seconds(batch: Sequence[Request], busy: int) -> float:
        lengths.extend(request[0] for request in batch)
        return 0.001

    requests = [(random.Random(i).randint(1, 99),) for i in range(20)]
    simulate(Setup(2, 3, 1), seconds, requests, OpenLoop([i / 100 for i in range(20)]))
    assert lengths == [request[0] for request in requests]


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing is sent"):
        simulate(Setup(1, 1, 1), cost, ONE, OpenLoop([]))
    with pytest.raises(ValueError, match="nothing is sent"):
        simulate(Setup(1, 1, 1), cost, [], OpenLoop([0.0]))
    with pytest.raises(ValueError, match="impossible"):
        Setup(0, 1, 1)


def test_an_overloaded_server_refuses_what_passes_its_capacity() -> None:
    sent = list(steady(200, 100).times())
    outcome = simulate(Setup(1, 1, 1, queue=10), lambda batch, busy: 0.01, ONE, OpenLoop(sent))
    assert outcome.shed_share == pytest.approx(0.5, abs=0.03)
    assert outcome.requests_per_s == pytest.approx(100, rel=0.03)
    assert outcome.utilisation == pytest.approx(1, abs=0.02)
    worst = outcome.latency_ms(100)
    assert worst is not None
    assert worst <= 110.1  # ten wait before it, and one runs
    assert math.isnan(outcome.answered[outcome.batch < 0][0])
