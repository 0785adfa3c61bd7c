"""A latency objective: `p95<=200ms`, or several of such conditions with commas."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.lib.errors import UserError
from scripts.lib.load import LoadResult
from scripts.lib.stats import percentile

# The latency of a request that got no good answer, in milliseconds: longer than any bound, yet a number.
_NEVER_MS = 1e15

_CONDITION = re.compile(r"\s*(p\d{1,2}(?:\.\d+)?|max|mean)\s*<=?\s*(\d+(?:\.\d+)?)\s*(ms|s)\s*", re.IGNORECASE)
_HINT = "write it like p95<=200ms; p50 to p99.9, max or mean; ms or s; several with commas"


@dataclass(frozen=True)
class Condition:
    """One bound on latency.

    Args:
        figure: `p95`, `max`, `mean`.
        bound_ms: milliseconds that it may be at most.
    """

    figure: str
    bound_ms: float

    def of(self, latencies_ms: Sequence[float]) -> float | None:
        """The figure of some latencies, in milliseconds; None of none."""
        if not len(latencies_ms):
            return None
        if self.figure == "mean":
            return sum(latencies_ms) / len(latencies_ms)
        return percentile(latencies_ms, 100 if self.figure == "max" else float(self.figure[1:]))

    def __str__(self) -> str:
        return f"{self.figure}<={self.bound_ms:g}ms"


@dataclass(frozen=True)
class Objective:
    """Conditions that must all hold."""

    conditions: tuple[Condition, ...]

    @classmethod
    def parse(cls, text: str) -> "Objective":
        """Read an objective as a person writes it.

        Raises:
            UserError: it is none, or names a figure twice.
        """
        conditions = []
        for part in text.split(","):
            found = _CONDITION.fullmatch(part)
            if found is None:
                raise UserError(f"{part.strip() or text!r} is no objective", _HINT)
            figure, number, unit = found.groups()
            bound = float(number) * (1000 if unit.lower() == "s" else 1)
            if bound <= 0:
                raise UserError(f"{part.strip()}: no request is as fast as that", _HINT)
            if figure.lower() != "max" and figure.lower() != "mean" and float(figure[1:]) == 0:
                raise UserError(f"{part.strip()}: there is no percentile 0", _HINT)
            conditions.append(Condition(figure.lower(), bound))
        if len({condition.figure for condition in conditions}) < len(conditions):
            raise UserError(f"{text} bounds a figure twice", _HINT)
        return cls(tuple(conditions))

    def met(self, latencies_ms: Sequence[float]) -> bool:
        """Whether latencies of requests that were all answered meet it; none meet nothing."""
        values = [(condition.of(latencies_ms), condition.bound_ms) for condition in self.conditions]
        return all(value is not None and value <= bound for value, bound in values)

    def margin(self, latencies_ms: Sequence[float]) -> float | None:
        """The smallest share of a bound that is left, negative where one is passed; None of no latencies."""
        values = [(condition.of(latencies_ms), condition.bound_ms) for condition in self.conditions]
        shares = [1 - value / bound for value, bound in values if value is not None]
        return min(shares) if len(shares) == len(self.conditions) else None

    @property
    def limit_ms(self) -> float:
        """What a single request may take to count as good: the loosest bound but for max, which binds each."""
        bounds = {condition.figure: condition.bound_ms for condition in self.conditions}
        return bounds.get("max", max(bounds.values()))

    def __str__(self) -> str:
        return ",".join(map(str, self.conditions))


@dataclass(frozen=True)
class Goodput:
    """What of a load met its objective.

    Attributes:
        requests: answered within `Objective.limit_ms`.
        share: of all that were due and did not outlive the measurement; None of none.
        per_s: per second.
        met: whether the whole window met the objective, errors and shed requests counted as never answered.
    """

    requests: int
    share: float | None
    per_s: float
    met: bool


def judged_ms(result: LoadResult) -> list[float]:
    """The latencies of a window in milliseconds, as an objective counts them: what failed or was shed never came."""
    return [sample.latency_s * 1e3 if sample.ok else _NEVER_MS for sample in result.samples]


def goodput(result: LoadResult, objective: Objective) -> Goodput:
    """Judge the samples of a window."""
    latencies = judged_ms(result)
    good = sum(latency <= objective.limit_ms for latency in latencies)
    share = good / len(latencies) if latencies else None
    return Goodput(good, share, good / result.wall_s, objective.met(latencies))
