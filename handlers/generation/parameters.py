"""The checks of single parameters, beside those of handlers/options.py: each returns the value to use or raises a
RequestError that says `The option` for the parameter's name.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from handlers import options
from handlers.errors import RequestError, shown

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 1000
MAX_BIASES = 1024
LARGEST_BIAS = 100.0
MAX_SCHEMA_CHARACTERS = 1 << 16
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # of a schema or a function, as OpenAI has them

Check = Callable[[Any], Any]


def above_zero(most: float) -> Check:
    """A check for numbers up to `most`, 0 not among them."""

    def check(value: Any) -> float:
        found = options.number(0, most)(value)
        if found == 0:
            raise RequestError(f"The option must be above 0 and at most {most:g}.", code="invalid_value")
        return found

    return check


def top_k(value: Any) -> int:
    """So many tokens; -1 and 0 are all."""
    return max(options.integer(-1)(value), 0)


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


def response_format(value: Any) -> Mapping[str, Any] | None:
    """The JSON schema that an answer must follow; None for any text."""
    found = options.members(value, "response_format", ["type"], ["json_schema"])
    kind, described = found["type"], found.get("json_schema")
    if kind == "json_schema":
        inside = "response_format.json_schema"
        named = options.members(described, inside, ["name"], ["description", "schema", "strict"])
        name_of(named["name"], f"{inside}.name")
        options.checked(named.get("strict", True), f"{inside}.strict", options.boolean)
        return schema(named.get("schema", ANY_OBJECT), f"{inside}.schema")
    if kind not in ("text", "json_object"):
        raise RequestError(
            f"response_format has the type {shown(kind)}; known are text, json_object and json_schema.",
            code="invalid_value",
            param="response_format.type",
        )
    return None if kind == "text" else ANY_OBJECT


def name_of(value: Any, param: str) -> str:
    """The name of a schema or a function, sent as `param`."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise RequestError(f"{param} must be 1 to 64 letters, digits, _ or -.", code="invalid_value", param=param)
    return value


def encodable(value: Any, param: str) -> None:
    """Refuse an object with texts that cannot be encoded, sent as `param`: a template writes them into a prompt."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError(
            f"{param} has a lone surrogate; it is no valid text.", code="invalid_text", param=param
        ) from None


def schema(value: Any, param: str) -> Mapping[str, Any]:
    """A JSON schema, sent as `param`; whether it can be followed, the grammar says."""
    if not isinstance(value, dict):
        raise RequestError(
            f"{param} is {options.json_type(value)}; it must be an object.", code="invalid_type", param=param
        )
    try:
        characters = len(json.dumps(value, allow_nan=False))
        encodable(value, param)
    except ValueError:
        raise RequestError(f"{param} holds a number that is none.", code="invalid_value", param=param) from None
    except RecursionError:
        characters = MAX_SCHEMA_CHARACTERS + 1
    if characters > MAX_SCHEMA_CHARACTERS:
        raise RequestError(
            f"{param} is too large or too deep; at most {MAX_SCHEMA_CHARACTERS} characters work.",
            code="schema_too_large",
            param=param,
        )
    return value
