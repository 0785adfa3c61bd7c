"""This project's own shape: a text, a list of texts, or the fields of one instance; options beside them."""

from collections.abc import Sequence
from typing import Any

from handlers.codecs.codec import Codec, Draft, as_list, with_parameters
from handlers.decoding import Call
from handlers.errors import RequestError
from handlers.options import json_type
from handlers.request import Request, Task, Usage
from handlers.serialise import dumps

LIST = "texts"


class Plain(Codec):
    """`"…"` or `{"text": …}` → `{"embedding": …}`; `[…]` or `{"texts": […]}` → `{"embeddings": […]}`."""

    def read(self, call: Call, task: Task) -> Draft:
        """A body of this shape, also one that is a bare text or list."""
        body = call.body
        if isinstance(body, str):
            return Draft([body], field=task.fields[0])
        if isinstance(body, list):
            return Draft(as_list(body, LIST), field=LIST, listed=True)
        if not isinstance(body, dict):
            raise RequestError(
                f"The body is {json_type(body)}; send a string, a list or an object.", code="invalid_type"
            )
        named = [name for name in task.fields if name in body]
        lists = LIST in body and LIST not in task.fields
        if lists and named:
            raise RequestError(f"The body has {named[0]} and {LIST}; send one.", code="ambiguous_input", param=LIST)
        rest = with_parameters({name: value for name, value in body.items() if name not in named and name != LIST})
        if lists:
            return Draft(as_list(body[LIST], LIST), rest, LIST, listed=True)
        if not named:
            wanted = ", ".join(repr(name) for name in dict.fromkeys([task.fields[0], LIST, "inputs", "instances"]))
            raise RequestError(f"The body needs one of {wanted}.", code="missing_field", param=task.fields[0])
        if named == [task.fields[0]] and isinstance(body[named[0]], str):
            return Draft([body[named[0]]], rest, named[0])
        if len(task.fields) == 1:
            raise RequestError(
                f"{named[0]!r} is {json_type(body[named[0]])}; it must be a string.",
                code="invalid_type",
                param=named[0],
            )
        return Draft([{name: body[name] for name in named}], rest, "")

    def write(self, request: Request, results: Sequence[Any], task: Task, model: str, usage: Usage) -> bytes:
        """An object whose one field is the task's noun."""
        return dumps({task.nouns.many: list(results)} if request.listed else {task.nouns.one: results[0]})
