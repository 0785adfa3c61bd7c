"""Whether a window under way can still meet an objective: one that can't is stopped, which saves a search its time."""

import asyncio
import bisect
import math
import time
from collections.abc import Sequence

from scripts.lib.load import Sample
from scripts.lib.objective import Condition, Objective

TICK_S = 0.25


def allowed_misses(condition: Condition, requests: int) -> float:
    """How many of so many requests may take longer than the bound; a mean doesn't tell."""
    if condition.figure == "mean":
        return math.inf
    share = 100.0 if condition.figure == "max" else float(condition.figure[1:])
    # The percentile is the value at this place of the sorted ones (see stats.percentile), the first one at least
    return requests - max(1, math.ceil(requests * share / 100 - 1e-9))


class Watch:
    """Counts what a window has already lost.

    Args:
        objective: to be met.
        due: when each request is due, seconds from the start, ascending.
        stop: set when the objective can no longer be met.
    """

    def __init__(self, objective: Objective, due: Sequence[float], stop: asyncio.Event) -> None:
        self._due = due
        self._stop = stop
        self._bounds = [(each, each.bound_ms / 1e3, allowed_misses(each, len(due))) for each in objective.conditions]
        self._late = [0] * len(self._bounds)
        self._in_time = [0] * len(self._bounds)
        self._spent_s = 0.0
        self._failed = 0

    def add(self, sample: Sample) -> None:
        """Take in a sample."""
        self._failed += not sample.ok
        self._spent_s += sample.latency_s
        for place, (_, bound_s, _) in enumerate(self._bounds):
            if sample.ok and sample.latency_s <= bound_s:
                self._in_time[place] += 1
            else:
                self._late[place] += 1
        self.look(sample.due_s + sample.latency_s)

    def look(self, now_s: float) -> None:
        """Stop the window if what was answered late, or is overdue at this moment, is too much already."""
        for place, (condition, bound_s, misses) in enumerate(self._bounds):
            overdue = bisect.bisect_left(self._due, now_s - bound_s) - self._in_time[place]
            if condition.figure == "mean":
                lost = self._failed > 0 or self._spent_s > bound_s * len(self._due)
            else:
                lost = max(self._late[place], overdue) > misses
            if lost:
                self._stop.set()

    async def tick(self) -> None:
        """Look now and then, beginning now, until cancelled: a server that answers nothing sends no samples."""
        start = time.perf_counter()
        while True:
            await asyncio.sleep(TICK_S)
            self.look(time.perf_counter() - start)
