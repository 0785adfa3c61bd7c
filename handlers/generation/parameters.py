"""The checks of single parameters: each returns the value to use or raises a RequestError without `param`."""

import math
from collections.abc import Callable
from typing import Any

from handlers.errors import RequestError, shown

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 1000
MAX_BIASES = 1024
LARGEST_BIAS = 100.0

Check = Callable[[Any], Any]


def number(low: float, high: float, *, above: bool = False) -> Check:
    """A check for numbers from `low` (or, where `above`, beyond it) to `high`."""

    def check(value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise RequestError("The parameter must be a number.", code="invalid_type")
        if not low <= value <= high or (above and value == low):  # NaN is not in any range
            start = f"above {low:g}" if above else f"from {low:g}"
            raise RequestError(
                f"The parameter is {shown(value)}; it must be {start} to {high:g}.", code="invalid_value"
            )
        return float(value)

    return check


def integer(low: int, high: int | None = None) -> Check:
    """A check for whole numbers from `low` to `high`."""

    def check(value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # JSON has one kind of number
        if not isinstance(value, int) or isinstance(value, bool):
            raise RequestError("The parameter must be a whole number.", code="invalid_type")
        if value < low or (high is not None and value > high):
            most = f" and at most {high}" if high is not None else ""
            given = "too large" if abs(value) >= 10**20 else value
            raise RequestError(f"The parameter is {given}; it must be at least {low}{most}.", code="invalid_value")
        return value

    return check


def boolean(value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise RequestError("The parameter must be true or false.", code="invalid_type")
    return value


def string(value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        raise RequestError("The parameter must be a string.", code="invalid_type")
    return value


def top_k(value: Any) -> int:
    """So many tokens; -1 and 0 are all."""
    count: int = integer(-1)(value)
    return max(count, 0)


def stops(value: Any) -> tuple[str, ...]:
    """A stop string, or up to 4."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(stop, str) for stop in found):
        raise RequestError("stop must be a string or a list of strings.", code="invalid_type")
    if len(found) > MAX_STOPS:
        raise RequestError(f"There are {len(found)} stop strings; at most {MAX_STOPS} work.", code="invalid_value")
    if any(not stop for stop in found):
        raise RequestError("A stop string is empty.", code="invalid_value")
    if any(len(stop) > MAX_STOP_CHARACTERS for stop in found):
        raise RequestError(f"A stop string has more than {MAX_STOP_CHARACTERS} characters.", code="invalid_value")
    return tuple(found)


def logit_bias(value: Any) -> dict[int, float]:
    """Token ids, as JSON's keys are texts, with numbers from -100 to 100."""
    if not isinstance(value, dict):
        raise RequestError("logit_bias must be an object from token ids to numbers.", code="invalid_type")
    if len(value) > MAX_BIASES:
        raise RequestError(f"logit_bias has {len(value)} entries; at most {MAX_BIASES} work.", code="invalid_value")
    biases = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10):
            raise RequestError(f"logit_bias has the key {shown(key)}, which is no token id.", code="invalid_value")
        if not isinstance(bias, int | float) or isinstance(bias, bool) or not math.isfinite(bias):
            raise RequestError(f"logit_bias of token {int(key)} is no number.", code="invalid_type")
        if abs(bias) > LARGEST_BIAS:
            raise RequestError(
                f"logit_bias of token {int(key)} is {shown(bias)}; it must be from -100 to 100.", code="invalid_value"
            )
        biases[int(key)] = float(bias)
    return biases
