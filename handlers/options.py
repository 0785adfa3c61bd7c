"""Checks of request options: each returns the value to use or raises a RequestError without `param`."""

from typing import Any

from handlers.errors import RequestError


def boolean(value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise RequestError("The option must be true or false.", code="invalid_type")
    return value


def positive_integer(value: Any) -> int:
    """A whole number from 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError("The option must be a whole number.", code="invalid_type")
    if value < 1:
        raise RequestError("The option must be at least 1.", code="invalid_value")
    return value


def string(value: Any) -> str:
    """A text that can be encoded."""
    if not isinstance(value, str):
        raise RequestError("The option must be a string.", code="invalid_type")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RequestError("The option has a lone surrogate; it is no valid text.", code="invalid_text") from None
    return value
