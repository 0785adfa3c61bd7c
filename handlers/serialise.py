"""Values → the bytes of JSON, and float32 arrays in the forms that clients ask for."""

import base64
import contextlib
import json
from typing import Any

orjson: Any = None
with contextlib.suppress(ImportError):  # an archive needs nothing beyond torchserve, torch and transformers
    import orjson


def dumps(value: Any) -> bytes:
    """Strict compact JSON; float32 arrays as the shortest decimals that read back to the same float32.

    NaN and infinity have no JSON; the runner lets none through.

    Raises:
        TypeError: something that is no JSON.
    """
    if orjson is not None:
        packed: bytes = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
        return packed
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_plain).encode()


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
