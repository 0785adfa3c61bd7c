"""OpenAI's `v1/embeddings`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from handlers.codecs.codec import Codec, Draft, as_list, as_object
from handlers.decoding import Call
from handlers.errors import RequestError
from handlers.options import is_integer, json_type, string
from handlers.request import Request, Task, Usage, inside
from handlers.serialise import dumps


class Embeddings(Codec):
    """`{"input": …}` → `{"object": "list", "data": […], "model": …, "usage": {…}}`; errors in OpenAI's form."""

    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {"user": string, "model": string}
    item_bytes = 64

    def read(self, call: Call, task: Task) -> Draft:
        """A text, a list of texts, the token ids of one or a list of those; nothing may be empty."""
        body = as_object(call, "input")
        value = body.pop("input")
        if isinstance(value, str) or (isinstance(value, list) and value and is_integer(value[0])):
            return Draft([_filled(value, "input")], body, "input")
        if not isinstance(value, list):
            raise RequestError(
                f"'input' is {json_type(value)}; it must be a string or a list.", code="invalid_type", param="input"
            )
        listed = as_list(value, "input")
        return Draft([_filled(entry, inside("input", i)) for i, entry in enumerate(listed)], body, "input", listed=True)

    def write(self, request: Request, results: Sequence[Any], task: Task, model: str, usage: Usage) -> bytes:
        """OpenAI's list, with `usage.truncated_tokens` where something was cut."""
        noun = task.nouns.one
        counted = {"prompt_tokens": usage.tokens, "total_tokens": usage.tokens}
        if usage.cut:
            counted["truncated_tokens"] = usage.cut
        data = [{"object": noun, "index": i, noun: result} for i, result in enumerate(results)]
        return dumps({"object": "list", "data": data, "model": model, "usage": counted})

    def complaint(self, error: RequestError, echo: Mapping[str, Any]) -> dict[str, Any]:
        """`error` as an object."""
        return complaint(error)


def complaint(error: RequestError) -> dict[str, Any]:
    """An error in OpenAI's form."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"code": error.code, "message": error.message, "param": error.param, "type": kind}}


def _filled(entry: Any, param: str) -> Any:
    if entry == "":
        raise RequestError(f"{param} is an empty string.", code="empty_string", param=param)
    return entry
