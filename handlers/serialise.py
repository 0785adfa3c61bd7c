"""Values → the bytes of JSON, and float32 arrays in the forms that clients ask for."""

import base64
import contextlib
import json
import math
from typing import Any

# Longest float32 as orjson or json writes it, and its comma: -1234567800000000.0, in a unit vector -0.0000063184107
FLOAT_BYTES, UNIT_FLOAT_BYTES = 20, 17

orjson: Any = None
with contextlib.suppress(ImportError):  # an archive needs nothing beyond torchserve, torch and transformers
    import orjson


def dumps(value: Any) -> bytes:
    """Strict compact JSON; float32 arrays as the shortest decimals that read back to the same float32.

    NaN and infinity have no JSON: `is_finite` tells.

    Raises:
        TypeError: something that is no JSON.
    """
    if orjson is not None:
        packed: bytes = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
        return packed
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_plain).encode()


def is_finite(value: Any) -> bool:
    """Whether there is neither NaN nor infinity in a JSON value or array: they have no JSON, and orjson writes null."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_finite, value))
    # An array: its least and greatest are NaN where one is
    if not hasattr(value, "dtype") or value.size == 0:
        return True
    return math.isfinite(value.max()) and math.isfinite(value.min())


def _plain(value: Any) -> Any:
    """An array as numbers; float32 as floats whose shortest repr is that of the float32."""
    if type(value).__module__ != "numpy":
        raise TypeError(f"a {type(value).__name__} is no JSON")
    if value.ndim:
        return [_plain(entry) for entry in value]
    return float(str(value)) if value.dtype.kind == "f" else value.item()


def base64_array(array: Any) -> str:
    """An array as base64 of its little-endian bytes: OpenAI's `encoding_format: base64`."""
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return base64.b64encode(little.tobytes()).decode("ascii")
