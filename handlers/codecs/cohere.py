"""`v1/rerank` and `v2/rerank` as Cohere and Jina answer them."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from handlers.codecs.codec import Codec, Draft, as_object
from handlers.decoding import Call
from handlers.errors import RequestError
from handlers.options import string
from handlers.request import Request, Task, Usage
from handlers.serialise import dumps


class Rerank(Codec):
    """`{"query", "documents", "top_n", "return_documents"}` → `{"results": [{"index", "relevance_score"}], …}`.

    Errors carry the text as `message` (Cohere) and as `detail` (Jina).

    Args:
        version: of Cohere's interface.
    """

    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {"user": string, "model": string}
    growth = 1.5  # «score» becomes «relevance_score»

    def __init__(self, version: str) -> None:
        self.version = version

    def read(self, call: Call, task: Task) -> Draft:
        """The query and the documents."""
        body = as_object(call, "query")
        instance = {name: body.pop(name) for name in task.fields if name in body}
        return Draft([instance], body, "")

    def write(self, request: Request, results: Sequence[Any], task: Task, model: str, usage: Usage) -> bytes:
        """The ranking, with usage as Jina counts it and as Cohere bills it."""
        tokens = {"prompt_tokens": usage.tokens, "total_tokens": usage.tokens}
        if usage.cut:
            tokens["truncated_tokens"] = usage.cut
        ranking = [
            {"index": entry["index"], "relevance_score": entry["score"]}
            | ({"document": entry["document"]} if "document" in entry else {})
            for entry in results[0]
        ]
        return dumps(
            {
                "id": str(uuid.uuid4()),
                "object": "list",
                "model": model,
                "results": ranking,
                "usage": tokens,
                "meta": {"api_version": {"version": self.version}, "tokens": {"input_tokens": usage.tokens}},
            }
        )

    def complaint(self, error: RequestError, echo: Mapping[str, Any]) -> dict[str, Any]:
        """Both names of the text."""
        return {"message": error.message, "detail": error.message, "code": error.code, "param": error.param}
