from typing import Any

import pytest

from scripts.lib.capacity import FRONTEND_SHARE, SHED_SHARE, Need, Planner
from scripts.lib.objective import Objective
from scripts.lib.simulation import ClosedLoop, Setup
from tests.scripts.lib.profiles import profile

# A batch takes 1 ms + 1 ms for its launch + 0.2 ms a text
REQUESTS = [(20,)]


def planner(objective: str = "p95<=50ms", **changes: Any) -> Planner:
    setup = changes.pop("setup", Setup(1, 8, 2))
    costs = changes.pop("profile", profile())
    return Planner(costs, REQUESTS, setup, Objective.parse(objective), **{"count": 3000, **changes})


def test_the_bound_is_full_batches_back_to_back_or_the_frontend() -> None:
    assert planner().bound(1) == pytest.approx(8 / (0.002 + 8 * 0.0002))
    assert planner(setup=Setup(1, 8, 2, workers_per_device=3)).bound(3) == pytest.approx(3 * 8 / 0.0036, rel=0.3)
    slow = profile(frontend_requests_per_s=100.0)
    assert planner(profile=slow).bound(1) == pytest.approx(FRONTEND_SHARE * 100)


def test_the_best_rate_is_met_and_a_higher_one_is_not() -> None:
    asked = planner("p99<=12ms")
    assert asked.met(asked.at(asked.best_rate, 1))
    assert not asked.met(asked.at(asked.best_rate * 1.1, 1))
    assert 0.5 * asked.bound(1) < asked.best_rate < asked.bound(1)


def test_a_load_gets_the_fewest_devices_that_meet_the_objective() -> None:
    asked = planner("p99<=12ms", devices_per_instance=4)
    need = asked.need(4000)
    assert need is not None
    assert need.instances == 1
    assert asked.met(need.outcome)
    assert need.workers > 1
    assert not asked.met(asked.at(4000, need.workers - 1))


def test_beyond_what_one_server_can_take_there_are_several() -> None:
    asked = planner("p99<=12ms", devices_per_instance=2)
    needs = [need for rate in (1000, 10_000, 100_000) if (need := asked.need(rate)) is not None]
    assert len(needs) == 3
    assert needs[0].instances == 1
    assert needs[2].instances >= 100_000 / asked.best_rate
    devices = [need.devices for need in needs]
    assert devices == sorted(devices)
    assert devices[2] == pytest.approx(10 * devices[1], rel=0.2), "far from the first server, cost grows with the rate"
    for need in needs:
        assert need.instances * need.outcome.requests_per_s == pytest.approx(need.rate, rel=0.1)
        assert need.outcome.shed_share <= SHED_SHARE


def test_the_frontend_limits_a_server_however_many_devices_it_has() -> None:
    asked = planner(devices_per_instance=64, profile=profile(frontend_requests_per_s=1000.0))
    need = asked.need(7000)
    assert need is not None
    assert need.instances == 10


def test_workers_of_one_device_are_counted_as_one_device() -> None:
    asked = planner("p99<=12ms", setup=Setup(1, 8, 2, workers_per_device=2), devices_per_instance=4)
    need = asked.need(4000)
    assert need is not None
    assert need.workers == 2 * need.devices
    assert need.setup.workers % 2 == 0


def test_what_no_number_of_workers_can_do_is_not_promised() -> None:
    asked = planner("p50<=4ms", devices_per_instance=8)  # alone a text takes 4.2 ms: 2 of them the delay
    assert asked.best_rate == 0
    assert asked.need(1) is None
    assert asked.smallest(ClosedLoop(1, 100)) is None
    assert asked.floor().latency_ms(50) == pytest.approx(4.2, abs=0.1)


def test_a_closed_loop_gets_the_fewest_devices_too() -> None:
    asked = planner("p95<=6ms", devices_per_instance=8)
    found = asked.smallest(ClosedLoop(16, 1000))
    assert found is not None
    setup, outcome = found
    assert asked.met(outcome)
    assert not asked.met(asked.outcome(ClosedLoop(16, 1000), setup.workers - 1))


def test_growth_goes_on_to_internet_scale() -> None:
    assert planner().growth(50) == [50, 100, 1000, 10_000, 100_000]
    assert planner().growth(1000) == [1000, 10_000, 100_000]
    assert planner().growth(200_000) == [200_000]


def test_need_counts_all_servers() -> None:
    need = Need(10, 3, Setup(5, 8, 2, workers_per_device=2), planner().floor())
    assert (need.workers, need.devices) == (15, 9)
