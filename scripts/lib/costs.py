"""What an archive's batches cost on a device: fitted where the device is, written as JSON, read where it is not."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from handlers.batching import Limits, MicroBatch, cost, plan
from scripts.lib.errors import UserError

# What TorchServe adds, measured with a null handler on 2 cores (0.12.0, Java 17): a round trip to the worker; what is
# left of a lone request's 1.7 ms beside it; and the rate beyond which the frontend, not the model, is the limit.
TRANSPORT_S = 0.0008
FRONTEND_S = 0.0009
FRONTEND_REQUESTS_PER_S = 7200.0

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
#: Tokens of each text of a request, special ones counted.
Request = Sequence[int]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Rates(_Strict):
    """Seconds that a batch takes in the worker: `per_batch_s + requests × per_request_s + cost × seconds_per_token`.

    The cost is the planner's own, in tokens: those run, padding counted, and `launch_cost` for each forward pass.
    """

    per_batch_s: Seconds
    per_request_s: Seconds
    seconds_per_token: Seconds

    def seconds(self, requests: int, tokens: float) -> float:
        """Time of a batch of `requests` requests whose plan costs `tokens`."""
        return self.per_batch_s + requests * self.per_request_s + tokens * self.seconds_per_token


class Profile(_Strict):
    """An archive's costs on one device, with the requests that they were measured on.

    Args:
        format: of this file.
        archive, task: what was profiled.
        device, device_name: `cpu` or `cuda`, and which.
        dtype: what it computes in.
        threads: torch's, of each worker.
        date: UTC, ISO 8601.
        packed: whether texts run without padding.
        micro_batch_tokens, micro_batch_items, multiple_of, launch_cost: as `handlers.batching.Limits` has them.
        max_tokens: of a text; longer ones are cut.
        rates: by the number of workers that are busy on the device at once: the first is of one alone.
        fit_error: mean distance of the fitted from the measured times, as a share of the latter.
        transport_s: per batch, between frontend and worker. Stated, not measured here.
        frontend_s: per request, in the frontend and on the network. Stated, not measured here.
        frontend_requests_per_s: that one TorchServe passes on at most. Stated, not measured here.
        requests: tokens of each text of each request that was run, as the handler read them.
    """

    format: Literal[1] = 1
    archive: str
    task: str
    device: Literal["cpu", "cuda"]
    device_name: str
    dtype: str
    threads: Count
    date: str
    packed: bool
    micro_batch_tokens: Count
    micro_batch_items: Count
    multiple_of: Count
    launch_cost: Annotated[int, Field(ge=0)]
    max_tokens: Count
    rates: Annotated[tuple[Rates, ...], Field(min_length=1)]
    fit_error: Annotated[float, Field(ge=0)]
    transport_s: Seconds = TRANSPORT_S
    frontend_s: Seconds = FRONTEND_S
    frontend_requests_per_s: Annotated[float, Field(gt=0)] = FRONTEND_REQUESTS_PER_S
    requests: Annotated[tuple[tuple[Count, ...], ...], Field(min_length=1)]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `batchserve profile` wrote.

        Raises:
            UserError: the file can't be read, or is no profile.
        """
        hint = "batchserve profile ARCHIVE --json FILE writes one"
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise UserError(f"{path} can't be read: {error.strerror}", hint) from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise UserError(f"{path} is no profile: {where + ': ' if where else ''}{first['msg']}", hint) from error

    @property
    def limits(self) -> Limits:
        """What the handler's planner keeps to."""
        return Limits(
            self.micro_batch_tokens, self.micro_batch_items, self.launch_cost, self.multiple_of, packed=self.packed
        )

    def rates_with(self, busy: int) -> Rates:
        """Rates while `busy` workers compute on the device at once.

        Beyond what was measured, a CPU's workers are taken to have cores of their own, and a GPU's to share it evenly,
        which is the worst case: it may fit two small forward passes beside each other.
        """
        known = self.rates[min(busy, len(self.rates)) - 1]
        if self.device == "cpu" or busy <= len(self.rates):
            return known
        slower = known.seconds_per_token * busy / len(self.rates)
        return known.model_copy(update={"seconds_per_token": slower})


@dataclass(frozen=True)
class Timing:
    """One batch as it was measured: its requests, what its plan costs in tokens, and how long it took."""

    requests: int
    tokens: int
    seconds: float


def plan_cost(lengths: Sequence[int], limits: Limits) -> int:
    """What the handler's plan for these texts costs, in tokens."""
    total = sum(lengths)
    if len(lengths) == 1 or (limits.packed and total <= limits.max_tokens and len(lengths) <= limits.max_items):
        # one forward pass: no need to plan it
        tokens = total if limits.packed else -(-total // limits.multiple_of) * limits.multiple_of
        return cost([MicroBatch((), 0, tokens)], limits)
    return cost(plan(lengths, limits), limits)


def batch_seconds(profile: Profile) -> Callable[[Sequence[Request], int], float]:
    """What predicts how long a worker is occupied by a batch.

    Returns:
        A function of the requests of a batch and of the number of workers busy on the device, this one counted; its
        result is in seconds, the way to the worker and back included.
    """
    limits, known = profile.limits, [profile.rates_with(busy) for busy in range(1, len(profile.rates) + 1)]

    def seconds(requests: Sequence[Request], busy: int) -> float:
        rates = known[busy - 1] if busy <= len(known) else profile.rates_with(busy)
        lengths = [length for request in requests for length in request]
        return profile.transport_s + rates.seconds(len(requests), plan_cost(lengths, limits) if lengths else 0)

    return seconds


def fit(timings: Sequence[Timing]) -> tuple[Rates, float]:
    """Rates that explain what was measured best: least squares of the relative error, none of them negative.

    Args:
        timings: of batches that differ in their number of requests and of tokens.

    Returns:
        The rates, and the mean relative error that remains.

    Raises:
        ValueError: no timings, or one that took no time.
    """
    if not timings or min(timing.seconds for timing in timings) <= 0:
        raise ValueError("costs are fitted to batches that took time")
    measured = np.array([timing.seconds for timing in timings])
    causes = np.array([[1, timing.requests, timing.tokens] for timing in timings]) / measured[:, None]
    best, error = np.zeros(3), np.inf
    # Of the solutions on all subsets of three causes, the best one that is not negative is the constrained optimum
    for size in (1, 2, 3):
        for subset in itertools.combinations(range(3), size):
            found = np.linalg.lstsq(causes[:, subset], np.ones(len(timings)), rcond=None)[0]
            left = float(np.sum((causes[:, subset] @ found - 1) ** 2))
            if min(found) >= 0 and left < error:
                best, error = np.zeros(3), left
                best[list(subset)] = found
    per_batch, per_request, per_token = map(float, best)
    rates = Rates(per_batch_s=per_batch, per_request_s=per_request, seconds_per_token=per_token)
    return rates, float(np.mean(np.abs(causes @ best - 1)))
