"""Tasks for the tests of the codecs, and a client that speaks to them without a model."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from handlers import options, protocol
from handlers.codecs.codec import Codec
from handlers.decoding import Call
from handlers.errors import RequestError
from handlers.request import Nouns, Request, Task, Usage
from tests.handlers.test_protocol import TASK as EMBEDDING


def top_k(value: Any) -> int | None:
    """A number of labels; null is all of them."""
    return None if value is None else options.positive_integer(value)


CLASSIFICATION = Task(
    Nouns("label", "labels"),
    ("text", "text_pair"),
    {
        "top_k": top_k,
        "function_to_apply": options.one_of("none", "softmax", "sigmoid"),
        "truncate": options.boolean,
    },
    ("predict",),
    options.text_or_pair,
    nullable=("top_k",),
)


def candidates(value: Any, param: str) -> tuple[str, tuple[str, ...]]:
    """A query and its documents, as the reranking task reads them."""
    names = ("documents", "texts")
    name = next((name for name in names if name in value), "documents") if isinstance(value, dict) else "documents"
    found = options.members(value, param, ["query", name])
    return options.text(found["query"], "query"), options.strings(found[name])


RERANKING = Task(
    Nouns("ranking", "rankings"),
    ("query", "documents", "texts"),
    {"top_n": options.positive_integer, "return_documents": options.boolean, "raw_scores": options.boolean},
    ("rerank", "v1/rerank", "v2/rerank"),
    candidates,
)
TASKS = (EMBEDDING, CLASSIFICATION, RERANKING)


def codec_of(body: Any, task: Task, route: str = "", kind: str = "application/json") -> Codec:
    """The codec of a request."""
    return protocol.by_body(protocol.by_route(route, kind, task), Call(body, route), task)


def read(body: Any, task: Task = EMBEDDING, route: str = "", kind: str = "application/json") -> Request:
    """A body → what the handler sees."""
    return protocol.read(Call(body, route), codec_of(body, task, route, kind), task)


def fault(body: Any, task: Task = EMBEDDING, route: str = "", kind: str = "application/json", **limits: int) -> Any:
    """A body that is refused → (status, code, param) as its client sees them, and the answer's body."""
    codec = codec_of(body, task, route, kind)
    with pytest.raises(RequestError) as caught:
        protocol.read(Call(body, route), codec, replace(task, **limits))
    error = caught.value
    return (codec.status(error), error.code, error.param), json.loads(codec.refuse(error, codec.echo(Call(body))))


def write(
    body: Any, results: Sequence[Any], task: Task = EMBEDDING, route: str = "", kind: str = "application/json"
) -> bytes:
    """A body and the results → the answer's body."""
    codec = codec_of(body, task, route, kind)
    return codec.write(protocol.read(Call(body, route), codec, task), results, task, "tiny", Usage(7, 0))
