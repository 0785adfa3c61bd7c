"""Checks of what clients send: options, which raise a RequestError without `param`, and the texts of items."""

from collections.abc import Callable, Sequence
from typing import Any

from handlers.errors import RequestError, shown
from handlers.request import Pair, inside

LARGEST = (1 << 63) - 1  # whole number: errors quote it, and Python's may have thousands of digits


def checked(value: Any, param: str, check: Callable[[Any], Any]) -> Any:
    """What `check` makes of an option sent as the field `param`; its RequestError names the field."""
    try:
        return check(value)
    except RequestError as error:
        raise error.at(inside(param, error.param or "")) from None


def boolean(value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise RequestError("The option must be true or false.", code="invalid_type")
    return value


def positive_integer(value: Any) -> int:
    """A whole number from 1."""
    return integer(1)(value)


def integer(least: int, most: int = LARGEST) -> Callable[[Any], int]:
    """A whole number from `least` to `most`."""

    def check(value: Any) -> int:
        if not is_integer(value) and not (isinstance(value, float) and value.is_integer()):  # JSON knows one number
            raise RequestError("The option must be a whole number.", code="invalid_type")
        if not least <= value <= most:
            span = f"at least {least}" if value < least and most == LARGEST else f"from {least} to {most}"
            raise RequestError(f"The option must be {span}.", code="invalid_value")
        return int(value)

    return check


def number(least: float, most: float) -> Callable[[Any], float]:
    """A number from `least` to `most`."""

    def check(value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise RequestError("The option must be a number.", code="invalid_type")
        if not least <= value <= most:  # NaN neither
            raise RequestError(f"The option must be from {least:g} to {most:g}.", code="invalid_value")
        return float(value)

    return check


def string(value: Any) -> str:
    """A text that can be encoded."""
    if not isinstance(value, str):
        raise RequestError("The option must be a string.", code="invalid_type")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RequestError("The option has a lone surrogate; it is no valid text.", code="invalid_text") from None
    return value


def one_of(*allowed: str) -> Callable[[Any], str]:
    """One of a few words."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise RequestError(f"The option must be {' or '.join(map(repr, allowed))}.", code="invalid_value")
        return value

    return check


def strings(value: Any) -> tuple[str, ...]:
    """One text or a list of them."""
    if value == []:
        raise RequestError("The option is an empty list.", code="empty_list")
    return any_strings(value)


def any_strings(value: Any) -> tuple[str, ...]:
    """One text or a list of them, which may be empty."""
    return tuple(string(entry) for entry in (value if isinstance(value, list) else [value]))


def is_integer(value: Any) -> bool:
    """Whether JSON's `value` is a whole number; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def json_type(value: Any) -> str:
    """What JSON calls the value, with its article."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def text(value: Any, param: str, wanted: str = "a string") -> str:
    """A text that can be encoded, sent as the field `param`."""
    if not isinstance(value, str):
        raise RequestError(f"{param} is {json_type(value)}; it must be {wanted}.", code="invalid_type", param=param)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{param} has a lone surrogate at character {error.start}; it is no valid text.",
                code="invalid_text",
                param=param,
            ) from None
    return value


def token_ids(value: list[Any], param: str) -> tuple[int, ...]:
    """The token ids of a text, sent as the field `param`. Whether the model has them, its tokenizer says."""
    if not value:
        raise RequestError(f"{param} is an empty list of token ids.", code="empty_list", param=param)
    for i, token in enumerate(value):
        if not is_integer(token):
            raise RequestError(
                f"{param}[{i}] is {json_type(token)}; it must be a token id.",
                code="invalid_type",
                param=f"{param}[{i}]",
            )
    return tuple(value)


def members(value: Any, param: str, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
    """The fields of an object sent as `param`: those required, perhaps optional ones, and no others."""
    if not isinstance(value, dict):
        raise RequestError(
            f"{param} is {json_type(value)}; it must be an object with {' and '.join(map(repr, required))}.",
            code="invalid_type",
            param=param or None,
        )
    for name in required:
        if value.get(name) is None:
            where = inside(param, name)
            raise RequestError(f"{where} is missing.", code="missing_field", param=where)
    for name in value:
        if name not in required and name not in optional:
            known = ", ".join([*required, *optional])
            raise RequestError(
                f"{param or 'The body'} has the unknown field {shown(name)}; known are {known}.",
                code="unknown_field",
                param=param or None,
            )
    return {name: content for name, content in value.items() if content is not None}


def text_or_pair(value: Any, param: str) -> str | Pair:
    """A text, or two texts to read together: {"text", "text_pair"} or a list of two."""
    if isinstance(value, list):
        if len(value) == 1:
            return text(value[0], inside(param, 0))
        if len(value) != 2:
            raise RequestError(
                f"{param} is a list of {len(value)}; a pair has two texts.", code="invalid_type", param=param
            )
        return Pair(text(value[0], inside(param, 0)), text(value[1], inside(param, 1)))
    if isinstance(value, dict):
        found = members(value, param, ["text"], ["text_pair"])
        first = text(found["text"], inside(param, "text"))
        return Pair(first, text(found["text_pair"], inside(param, "text_pair"))) if "text_pair" in found else first
    return text(value, param, "a string or an object with 'text' and 'text_pair'")
