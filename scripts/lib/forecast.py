"""What the simulation predicts for settings: the highest rate that meets the objective, and the margin at a load."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from scripts.lib.capacity import SHED_SHARE, Planner
from scripts.lib.costs import Profile
from scripts.lib.objective import Objective
from scripts.lib.schedule import POISSON, steady
from scripts.lib.simulation import ClosedLoop, OpenLoop, Outcome, Setup
from scripts.lib.tuning import Setting

COUNT = 2000  # requests simulated at each rate
LONE = 200  # of a lone client
OVERLOADED = -10.0  # the margin of what is refused, or of what never ends

#: What costs belong to: threads of a worker, and dtype.
Costs = tuple[int | None, str | None]


@dataclass
class Forecast:
    """Predictions for one load on this machine.

    Args:
        profiles: measured costs, by threads and dtype.
        objective: to be met.
        queue: requests that may wait.
        gpus: that the workers are spread over; 0 is the CPU, which they share.
        arrivals: poisson or constant.
        times: of a trace, seconds; its requests are the profiles', in order.
        most_tokens: cut every text to so many; None leaves them.
    """

    profiles: Mapping[Costs, Profile]
    objective: Objective
    queue: int = 1000
    gpus: int = 0
    arrivals: str = POISSON
    times: Sequence[float] = ()
    most_tokens: int | None = None
    _rates: dict[Setting, float] = field(default_factory=dict)

    def rate(self, setting: Setting, at_least: float = 0.0) -> float:
        """The highest rate that meets the objective, requests per second; 0 where it lies below `at_least`."""
        if setting not in self._rates:
            planner = self._planner(setting)
            high, workers = planner.bound(setting.workers), planner.most_workers
            if high < at_least or (at_least > 0 and not planner.met(planner.at(at_least, workers))):
                return 0.0
            self._rates[setting] = planner.best_rate
        return self._rates[setting]

    def margin(self, setting: Setting, rate: float | None) -> float:
        """The smallest share of a bound that is left at a rate, or at the trace where it is None."""
        planner = self._planner(setting)
        if rate is None:
            return self._margin(planner.outcome(OpenLoop(self.times), setting.workers))
        # Far beyond what the workers can do a queue would grow without end: no need to simulate it
        if rate > 1.5 * planner.bound(setting.workers):
            return OVERLOADED
        return self._margin(planner.at(rate, setting.workers))

    def lone(self, setting: Setting) -> float:
        """The margin of one client that waits for each answer."""
        return self._margin(self._planner(setting).outcome(ClosedLoop(1, LONE), setting.workers))

    def lone_ms(self, setting: Setting) -> float:
        """The mean latency of that client, in milliseconds."""
        found = self._planner(setting).outcome(ClosedLoop(1, LONE), setting.workers).latencies_ms
        return float(found.mean())

    def cut(self, tokens: int) -> "Forecast":
        """The same with texts of at most so many tokens."""
        return replace(self, most_tokens=tokens, _rates={})

    def longest(self) -> int:
        """Tokens of the longest text."""
        return max(length for profile in self.profiles.values() for request in profile.requests for length in request)

    def workers_for(self, setting: Setting, rate: float | None, most: int) -> int | None:
        """How many workers like these meet the objective, each with cores of its own; None where `most` don't."""
        base = self._planner(setting)
        shared = base.profile.rates[-1]
        alone = base.profile.model_copy(update={"rates": (shared,)})
        planner = replace(
            base, profile=alone, devices_per_instance=most, setup=replace(base.setup, workers_per_device=1)
        )
        times = self.times if rate is None else list(steady(rate, COUNT / rate, self.arrivals).times())
        found = planner.smallest(OpenLoop(times))
        return None if found is None else found[0].workers

    def _margin(self, outcome: Outcome) -> float:
        found = self.objective.margin(outcome.latencies_ms.tolist())
        return OVERLOADED if found is None or outcome.shed_share > SHED_SHARE else max(found, OVERLOADED)

    def _planner(self, setting: Setting) -> Planner:
        known = self.profiles[setting.threads, setting.dtype]
        devices = min(self.gpus, setting.workers) or 1
        each = -(-setting.workers // devices)
        setup = Setup(
            setting.workers, setting.batch_size, setting.max_batch_delay, max(self.queue, setting.batch_size), each
        )
        requests = known.requests
        if self.most_tokens is not None:
            requests = tuple(tuple(min(length, self.most_tokens) for length in each) for each in requests)
        return Planner(known, requests, setup, self.objective, devices, self.arrivals, COUNT)
