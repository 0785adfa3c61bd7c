"""Who waits is let in some day, whatever comes meanwhile; a clock of the test's own."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from handlers.generation import scheduler
from handlers.generation.scheduler import PATIENCE, SECONDS_PER_LEVEL, PriorityScheduler


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(scheduler, "time", made)
    return made


class Queue:
    """A scheduler's waiting sequences alone: the cache and the network have no say in their order."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._scheduler: Any = object.__new__(PriorityScheduler)
        self._scheduler.tickets = {}
        self._scheduler.waiting_requests = {}
        self._scheduler.waiting_requests_order = deque()
        self._scheduler._head = None

    def add(self, id: str, priority: int = 0) -> None:
        self._scheduler.tickets[id] = (priority, self._clock.now)
        self._scheduler.waiting_requests[id] = SimpleNamespace(request_id=id, is_cpu_offloaded=False)
        self._scheduler.waiting_requests_order.append(id)

    def take(self, id: str) -> None:
        del self._scheduler.waiting_requests[id]
        self._scheduler.waiting_requests_order.remove(id)

    def candidates(self) -> list[str]:
        return [state.request_id for state in self._scheduler._get_waiting_candidates()]


def test_a_lower_number_goes_first_and_equals_as_they_came(clock: Clock) -> None:
    queue = Queue(clock)
    for id, priority in (("b", 0), ("late", 3), ("c", 0), ("soon", -2)):
        queue.add(id, priority)
        clock.now += 0.001
    assert queue.candidates() == ["soon", "b", "c", "late"]


def test_no_stream_of_better_priorities_starves_one_that_waits(clock: Clock) -> None:
    """Ten a second come before it, of which one is let in: after its levels' time it is the first, and goes in."""
    levels, queue = 4, Queue(clock)
    queue.add("old", levels)
    begun, number = clock.now, 0
    first = ""
    while first != "old":
        assert clock.now - begun < levels * SECONDS_PER_LEVEL + 1
        queue.add(f"new{number}")
        number += 1
        first = queue.candidates()[0]
        queue.take(first)
        clock.now += 0.1
    assert clock.now - begun > levels * SECONDS_PER_LEVEL - 1  # nor does it overtake before


def test_nobody_overtakes_a_head_that_does_not_fit_for_long(clock: Clock) -> None:
    """A long sequence needs more blocks than are ever free while short ones take them as they come."""
    queue = Queue(clock)
    begun = clock.now
    queue.add("long")
    queue.add("short0")
    for number in range(1, 100):
        found = queue.candidates()
        if clock.now - begun > PATIENCE:
            assert found == ["long"]
        else:  # they may, for a while
            assert found == ["long", f"short{number - 1}"]
            queue.take(found[1])
            queue.add(f"short{number}")
        clock.now += 0.5
    queue.take("long")
    assert all(id.startswith("short") for id in queue.candidates())
    assert queue.candidates()
