"""How many workers, devices and TorchServes a load needs, by simulation."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from scripts.lib.costs import Profile, Request, batch_seconds
from scripts.lib.objective import Objective
from scripts.lib.schedule import POISSON, steady
from scripts.lib.simulation import ClosedLoop, OpenLoop, Outcome, Setup, simulate

SHED_SHARE = 0.001  # requests that may be refused where the objective counts as met
FRONTEND_SHARE = 0.7  # of the rate that a frontend can pass on, beyond which its own queue would show
RATE_STEPS = 7  # halvings in the search for the highest rate
LARGEST_RATE = 100_000  # requests per second up to which growth is shown


@dataclass(frozen=True)
class Need:
    """What a rate needs.

    Args:
        rate: requests per second.
        instances: TorchServes, each with its own assembler of batches; a balancer spreads requests among them.
        setup: of each of them.
        outcome: of one of them, at its share of the rate.
    """

    rate: float
    instances: int
    setup: Setup
    outcome: Outcome

    @property
    def workers(self) -> int:
        """Of all instances."""
        return self.instances * self.setup.workers

    @property
    def devices(self) -> int:
        """Of all instances."""
        return self.instances * self.setup.devices


@dataclass(frozen=True)
class Planner:
    """Answers questions about one archive's costs and one kind of load.

    Args:
        profile: the costs.
        requests: token lengths of the texts of each request.
        setup: batch size, delay, queue and workers per device; the number of workers is sought.
        objective: to be met.
        devices_per_instance: that one TorchServe may have at most.
        arrivals: poisson or constant.
        count: requests to simulate at each rate.
        seed: of arrivals and order.
    """

    profile: Profile
    requests: Sequence[Request]
    setup: Setup
    objective: Objective
    devices_per_instance: int = 1
    arrivals: str = POISSON
    count: int = 50_000
    seed: int = 0

    def outcome(self, load: OpenLoop | ClosedLoop, workers: int) -> Outcome:
        """What a load meets at so many workers."""
        setup = replace(self.setup, workers=workers)
        seconds = batch_seconds(self.profile)
        return simulate(setup, seconds, self.requests, load, frontend_s=self.profile.frontend_s, seed=self.seed)

    def at(self, rate: float, workers: int) -> Outcome:
        """What a steady rate (requests per second) meets at so many workers."""
        return self.outcome(OpenLoop(list(steady(rate, self.count / rate, self.arrivals, self.seed).times())), workers)

    def met(self, outcome: Outcome) -> bool:
        """Whether an outcome is within the objective, with hardly a request refused."""
        return outcome.shed_share <= SHED_SHARE and self.objective.met(outcome.latencies_ms.tolist())

    @property
    def most_workers(self) -> int:
        """Of one TorchServe."""
        return self.devices_per_instance * self.setup.workers_per_device

    def bound(self, workers: int) -> float:
        """Requests per second that so many workers can't pass, their batches full or the frontend busy."""
        rng, size = random.Random(f"full:{self.seed}"), self.setup.batch_size
        seconds, busy = batch_seconds(self.profile), min(workers, self.setup.workers_per_device)
        times = [seconds(rng.choices(self.requests, k=size), busy) for _ in range(30)]
        frontend = FRONTEND_SHARE * self.profile.frontend_requests_per_s
        return min(frontend, workers * size * len(times) / max(sum(times), 1e-9))

    @cached_property
    def best_rate(self) -> float:
        """The highest rate at which one TorchServe with all its devices meets the objective; 0 where none does."""
        high = self.bound(self.most_workers)
        if self.met(self.at(high, self.most_workers)):
            return high
        low = 0.0
        for _ in range(RATE_STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.met(self.at(middle, self.most_workers)) else (low, middle)
        return low

    def smallest(self, load: OpenLoop | ClosedLoop) -> tuple[Setup, Outcome] | None:
        """The fewest devices of one TorchServe with which a load meets the objective; None where all don't suffice."""
        each, found = self.setup.workers_per_device, None
        low, high = 1, self.devices_per_instance
        while low <= high:
            middle = (low + high) // 2
            outcome = self.outcome(load, middle * each)
            if self.met(outcome):
                found, high = (replace(self.setup, workers=middle * each), outcome), middle - 1
            else:
                low = middle + 1
        return found

    def need(self, rate: float) -> Need | None:
        """The fewest TorchServes, and then the fewest devices of each, for a rate; None where no number is enough."""
        if not self.best_rate:
            return None
        instances = math.ceil(rate / self.best_rate)
        while True:  # ends: fewer requests for each are met sooner or later, as best_rate was
            share = rate / instances
            times = list(steady(share, self.count / share, self.arrivals, self.seed).times())
            found = self.smallest(OpenLoop(times))
            if found is not None:
                return Need(rate, instances, *found)
            instances += max(1, instances // 50)

    def growth(self, rate: float) -> list[float]:
        """The rates to show: the one asked for, and powers of ten beyond it."""
        beyond = [10.0**power for power in range(6) if rate < 10.0**power <= LARGEST_RATE]
        return [rate, *beyond]

    def floor(self) -> Outcome:
        """What lone requests meet: no number of workers is faster."""
        alone = ClosedLoop(1, min(self.count, 2000))
        return self.outcome(alone, 1)
