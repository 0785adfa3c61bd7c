"""When requests are due in an open loop: seconds from the start, ascending. The same seed gives the same times.

An open loop sends by the clock whether or not earlier requests are answered, as independent users do; a closed loop
slows down with the server and hides its queue (the coordinated omission that Gil Tene named).
"""

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.lib.errors import UserError

POISSON, CONSTANT = "poisson", "constant"


@dataclass(frozen=True)
class Phase:
    """A stretch of time over which the rate goes linearly from one value to another.

    Args:
        seconds: how long.
        rate: requests per second at its start.
        rate_end: at its end; the same where the rate is steady.
    """

    seconds: float
    rate: float
    rate_end: float

    def expected(self, seconds: float) -> float:
        """Requests expected in the phase's first `seconds`."""
        slope = (self.rate_end - self.rate) / self.seconds
        return self.rate * seconds + slope * seconds * seconds / 2

    def moment(self, count: float) -> float:
        """When `count` requests are expected to have been sent: the inverse of `expected`."""
        if count <= 0:
            return 0.0
        slope = (self.rate_end - self.rate) / self.seconds
        if abs(slope) < 1e-12:
            return count / self.rate
        # the root that is positive for both signs of the slope, in the form that does not cancel
        return 2 * count / (self.rate + math.sqrt(max(0.0, self.rate * self.rate + 2 * slope * count)))


@dataclass(frozen=True)
class Schedule:
    """Arrivals over one phase or several, one after the other.

    Args:
        phases: in order.
        arrivals: poisson (exponential gaps, as of many independent users) or constant (even gaps).
        seed: of the gaps.
    """

    phases: tuple[Phase, ...]
    arrivals: str = POISSON
    seed: int = 0

    @property
    def seconds(self) -> float:
        """From the first phase's start to the last one's end."""
        return sum(phase.seconds for phase in self.phases)

    def times(self) -> Iterator[float]:
        """When each request is due, in seconds from the start.

        A unit-rate process is stretched by the inverse of the expected count, which makes a Poisson process of any
        rate, also one that changes (Çinlar, Introduction to Stochastic Processes, 1975).
        """
        rng = random.Random(f"arrivals:{self.seed}")
        poisson = self.arrivals == POISSON
        passed, start = 0.0, 0.0
        count = rng.expovariate(1.0) if poisson else 0.0  # an even process starts at once
        for phase in self.phases:
            whole = phase.expected(phase.seconds)
            while count - passed < whole:
                yield start + phase.moment(count - passed)
                count += rng.expovariate(1.0) if poisson else 1.0
            passed += whole
            start += phase.seconds


def steady(rate: float, seconds: float, arrivals: str = POISSON, seed: int = 0) -> Schedule:
    """One rate all the time."""
    return Schedule((Phase(seconds, rate, rate),), arrivals, seed)


def parse_phases(text: str) -> tuple[Phase, ...]:
    """Read `50x30,100x30` (steps: requests per second × seconds) and `10-200x60` (a ramp).

    Raises:
        UserError: it is none of these.
    """
    hint = "steps are RATExSECONDS, a ramp RATE-RATExSECONDS, several with commas: 20x30,20-200x60"
    phases = []
    for part in text.split(","):
        rates, _, seconds = part.strip().partition("x")
        low, _, high = rates.partition("-")
        try:
            phase = Phase(float(seconds), float(low), float(high or low))
        except ValueError:
            raise UserError(f"{part.strip() or text!r} is no step of a load", hint) from None
        finite = all(map(math.isfinite, (phase.seconds, phase.rate, phase.rate_end)))
        if not finite or phase.seconds <= 0 or min(phase.rate, phase.rate_end) < 0 or phase.rate + phase.rate_end <= 0:
            raise UserError(f"{part.strip()}: rates and seconds must be above 0", hint)
        phases.append(phase)
    return tuple(phases)


@dataclass(frozen=True)
class Arrival:
    """One request of a trace.

    Args:
        at: when it is due, in seconds from the start.
        body: what is sent.
        headers: of this request alone.
    """

    at: float
    body: bytes
    headers: dict[str, str]


def read_trace(path: Path) -> list[Arrival]:
    """Read a trace: a JSON object a line with `at` (seconds), `body` (JSON, or a string sent as it is), `headers`.

    Times are counted from the first line's; lines may come in any order.

    Raises:
        UserError: the file can't be read, or a line is no such object; it is named.
    """
    arrivals = []
    for number, value in _lines(path):
        if not isinstance(value, dict) or not isinstance(value.get("at"), int | float) or "body" not in value:
            raise UserError(f"{path}, line {number}: no object with `at` (seconds) and `body`", "see bench --help")
        headers = value.get("headers") or {}
        if not isinstance(headers, dict) or not all(isinstance(text, str) for text in headers.values()):
            raise UserError(f"{path}, line {number}: `headers` must map names to texts", "")
        if not math.isfinite(value["at"]):
            raise UserError(f"{path}, line {number}: `at` is no time", "")
        arrivals.append(Arrival(float(value["at"]), as_body(value["body"]), headers))
    if not arrivals:
        raise UserError(f"{path} holds no requests", "a trace has a JSON object a line")
    arrivals.sort(key=lambda arrival: arrival.at)
    first = arrivals[0].at
    return [Arrival(arrival.at - first, arrival.body, arrival.headers) for arrival in arrivals]


def read_bodies(path: Path) -> list[bytes]:
    """Read request bodies: a JSON value a line, sent as it stands there.

    Raises:
        UserError: the file can't be read, is empty, or a line is no JSON.
    """
    bodies = [as_body(value) for _, value in _lines(path)]
    if not bodies:
        raise UserError(f"{path} holds no requests", "a JSON value a line, each a request's body")
    return bodies


def as_body(value: Any) -> bytes:
    """A body as bytes: JSON, or a string as it is."""
    return value.encode() if isinstance(value, str) else json.dumps(value, ensure_ascii=False).encode()


def _lines(path: Path) -> Sequence[tuple[int, Any]]:
    found = []
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} can't be read: {error}", "") from error
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append((number, json.loads(line)))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number} is not JSON: {error}", "one JSON value a line") from error
    return found
