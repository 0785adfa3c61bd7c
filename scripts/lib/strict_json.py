"""Results as JSON that every reader takes: no infinities, no NaNs, keys that are strings."""

import math
from typing import Any

import orjson


def strict_json(document: Any) -> bytes:
    """A document of mappings, sequences, texts and numbers, indented; what is not a number becomes null."""
    return orjson.dumps(_finite(document), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {_key(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _key(key: Any) -> str:
    if isinstance(key, float):
        return "+Inf" if math.isinf(key) else f"{key:g}"
    return str(key)
