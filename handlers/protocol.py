"""Body → Request, and results → bytes in the shape that the client spoke.

| shape     | body                                | answer                                                      |
| text      | "…" or {"text": …}                  | {"embedding": […]}                                          |
| texts     | […] or {"texts": […]}               | {"embeddings": [[…], …]}                                    |
| inputs    | {"inputs": "…" or […]}              | [[…], …], as Hugging Face's inference API                   |
| instances | {"instances": […]}                  | {"predictions": [[…], …]}, as KServe v1 and Vertex AI       |
| openai    | {"input": …}, on `v1/embeddings`    | {"object": "list", "data": […], "usage": …}                 |

The singular and plural nouns are the task's (`Nouns`); everything else here holds for every task.
"""

import base64
import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, NamedTuple

from handlers.decoding import Call
from handlers.errors import RequestError, TooLarge, UnknownRoute, nearest, shown

orjson: Any = None
with contextlib.suppress(ImportError):  # an archive needs nothing beyond torchserve, torch and transformers
    import orjson

Item = str | tuple[int, ...]

OPENAI_ROUTE = "v1/embeddings"
_SHAPES = {"text": "text", "texts": "texts", "inputs": "inputs", "instances": "instances", "input": "openai"}


class Nouns(NamedTuple):
    """The task's words for one result and for several, such as embedding and embeddings."""

    one: str
    many: str


class Usage(NamedTuple):
    """Tokens run for a request, and tokens that truncation cut off."""

    tokens: int
    cut: int


@dataclass(frozen=True)
class Request:
    """What one client asks.

    Args:
        items: texts, or token ids, in the client's order.
        options: the options it set, checked for type by the handler.
        shape: how it spoke and wants to be answered, a value of the table above.
        field: the field that held the items, for errors.
        listed: whether that field was a list.
    """

    items: tuple[Item, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    shape: str = "text"
    field: str = "text"
    listed: bool = False

    def param(self, index: int) -> str:
        """What errors call the item at `index`."""
        return f"{self.field}[{index}]" if self.listed else self.field

    def with_items(self, items: Iterable[Item]) -> "Request":
        """The same request over other items, as many as before."""
        changed = tuple(items)
        if len(changed) != len(self.items):
            raise ValueError(f"{len(self.items)} items became {len(changed)}")
        return replace(self, items=changed)


def check_route(route: str) -> None:
    """Refuse a path that is none of ours, whatever the body.

    Raises:
        UnknownRoute: with the path that there is.
    """
    if route not in ("", OPENAI_ROUTE):
        raise UnknownRoute(f"There is no route {shown(route)}; there is {OPENAI_ROUTE}.")


def parse(call: Call, options: Iterable[str], max_items: int) -> Request:
    """Find the items, the options and the shape in a decoded body.

    Args:
        call: the decoded request.
        options: names of the options that the task knows.
        max_items: most items in one request.

    Raises:
        UnknownRoute, TooLarge, RequestError: see their messages.
    """
    check_route(call.route)
    openai = call.route == OPENAI_ROUTE
    body = call.body
    if isinstance(body, str):
        body = {"text": body}
    elif isinstance(body, list):
        body = {"texts": body}
    if not isinstance(body, dict):
        raise RequestError(f"The body is {_json_type(body)}; send a string, a list or an object.", code="invalid_type")
    shapes = ["input"] if openai else list(_SHAPES)
    present = [name for name in shapes if name in body]
    if not present:
        wanted = "'input'" if openai else "one of " + ", ".join(map(repr, shapes))
        raise RequestError(f"The body needs {wanted}.", code="missing_field", param=shapes[0])
    if len(present) > 1:
        raise RequestError(f"The body has {' and '.join(present)}; send one.", code="ambiguous_input", param=present[1])
    name = present[0]
    shape = _SHAPES[name]
    given = {key: value for key, value in body.items() if key != name}
    if shape in ("inputs", "instances"):
        given = _with_parameters(given)
    known = [*options, "encoding_format", "user", "model"] if shape == "openai" else list(options)
    for key in given:
        if key not in known:
            near = nearest(key, known)
            hint = f"; did you mean {near!r}?" if near else f"; known are {', '.join(sorted(known))}."
            raise RequestError(f"Unknown option {shown(key)}{hint}", code="unknown_option", param=_name(key))
    items, listed = _items(body[name], name, max_items)
    chosen = {key: value for key, value in given.items() if value is not None}
    if shape == "openai":
        _check_openai(items, chosen, name, listed)
    return Request(items, chosen, shape, name, listed)


def _with_parameters(given: dict[str, Any]) -> dict[str, Any]:
    parameters = given.pop("parameters", None)
    if parameters is None:
        return given
    if not isinstance(parameters, dict):
        raise RequestError("'parameters' must be an object.", code="invalid_type", param="parameters")
    return {**parameters, **given}


def _items(value: Any, name: str, max_items: int) -> tuple[tuple[Item, ...], bool]:
    """The items under the field `name`, and whether they were a list."""
    if isinstance(value, str) and name not in ("texts", "instances"):
        return (_text(value, name),), False
    if not isinstance(value, list) or name == "text":
        allowed = "a string" if name == "text" else "a list" if name in ("texts", "instances") else "a string or a list"
        raise RequestError(f"{name!r} is {_json_type(value)}; it must be {allowed}.", code="invalid_type", param=name)
    if not value:
        raise RequestError(f"{name!r} is an empty list.", code="empty_list", param=name)
    if name == "input" and _is_int(value[0]):
        return (_token_ids(value, name),), False
    if len(value) > max_items:
        raise TooLarge(
            f"{name!r} holds {len(value)} items; at most {max_items} fit in one request.",
            code="too_many_items",
            param=name,
        )
    return tuple(_item(item, f"{name}[{i}]", name) for i, item in enumerate(value)), True


def _item(item: Any, param: str, name: str) -> Item:
    if name == "instances" and isinstance(item, dict):
        fields = [key for key in ("text", "data") if key in item]
        if len(item) != 1 or not fields:
            raise RequestError(
                "An instance is a string or an object with 'text' alone.", code="invalid_type", param=param
            )
        item, param = item[fields[0]], f"{param}.{fields[0]}"
    if name == "input" and isinstance(item, list):
        return _token_ids(item, param)
    if not isinstance(item, str):
        wanted = "a string or a list of token ids" if name == "input" else "a string"
        raise RequestError(f"{param} is {_json_type(item)}; it must be {wanted}.", code="invalid_type", param=param)
    return _text(item, param)


def _text(text: str, param: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{param} has a lone surrogate at character {error.start}; it is no valid text.",
                code="invalid_text",
                param=param,
            ) from None
    return text


def _token_ids(value: list[Any], param: str) -> tuple[int, ...]:
    if not value:
        raise RequestError(f"{param} is an empty list of token ids.", code="empty_list", param=param)
    for i, token in enumerate(value):
        if not _is_int(token):
            raise RequestError(
                f"{param}[{i}] is {_json_type(token)}; it must be a token id.",
                code="invalid_type",
                param=f"{param}[{i}]",
            )
    return tuple(value)


def _check_openai(items: Sequence[Item], options: Mapping[str, Any], name: str, listed: bool) -> None:
    for i, item in enumerate(items):
        if item == "":
            param = f"{name}[{i}]" if listed else name
            raise RequestError(f"{param} is an empty string.", code="empty_string", param=param)
    if options.get("encoding_format", "float") not in ("float", "base64"):
        raise RequestError(
            "'encoding_format' must be 'float' or 'base64'.", code="invalid_value", param="encoding_format"
        )
    for key in ("user", "model"):
        if not isinstance(options.get(key, ""), str):
            raise RequestError(f"{key!r} must be a string.", code="invalid_type", param=key)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _json_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _name(key: str) -> str:
    """A key of the client's, fit for `param`: ASCII and short."""
    return shown(key)[1:-1]


def answer(request: Request, results: Sequence[Any], nouns: Nouns, model: str, usage: Usage) -> bytes:
    """The body of a successful answer: strict compact JSON.

    Args:
        results: one per item, JSON values or float32 arrays; on the OpenAI shape they may be base64 texts.
        model: name under which the model is served.
    """
    match request.shape:
        case "text":
            return dumps({nouns.one: results[0]})
        case "texts":
            return dumps({nouns.many: list(results)})
        case "inputs":
            return dumps(list(results))
        case "instances":
            return dumps({"predictions": list(results)})
    counted: dict[str, int] = {"prompt_tokens": usage.tokens, "total_tokens": usage.tokens}
    if usage.cut:
        counted["truncated_tokens"] = usage.cut
    data = [{"object": nouns.one, "index": i, nouns.one: result} for i, result in enumerate(results)]
    return dumps({"object": "list", "data": data, "model": model, "usage": counted})


def error_answer(error: RequestError, *, openai: bool) -> bytes:
    """The body of a failed answer: code, message and param, in OpenAI's form for its clients."""
    content: dict[str, Any] = {"code": error.code, "message": error.message, "param": error.param}
    if openai:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        content = {"error": {**content, "type": kind}}
    # ASCII: nothing that a client put into a field's name can break this answer
    return json.dumps(content, separators=(",", ":")).encode()


def phrase(status: int) -> str:
    """The reason phrase of a status, one ASCII line as TorchServe's framing needs it."""
    return HTTPStatus(status).phrase


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
    """A float32 array as floats whose shortest repr is that of the float32."""
    return [float(text) for text in value.astype(str)]


def base64_floats(vector: Any) -> str:
    """A float32 array as base64 of its little-endian bytes: OpenAI's `encoding_format: base64`."""
    return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode("ascii")
