"""text-embeddings-inference's routes, with its request and response shapes and its statuses."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from handlers.codecs.codec import Codec, Draft, as_list, as_object
from handlers.decoding import Call
from handlers.errors import Overloaded, RequestError
from handlers.options import is_integer, one_of
from handlers.request import Request, Task, Usage
from handlers.serialise import dumps

# Its error types, by what is wrong
_TYPES = {"empty_list": "Empty", "empty_text": "Empty", "invalid_token": "Tokenizer", "too_long": "Validation"}


class _Tei(Codec):
    """What the routes share: errors, and the side that truncation cuts, which the model decides."""

    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {"truncation_direction": one_of("right", "Right")}

    def status(self, error: RequestError) -> int:
        """Its statuses: 400 empty or no JSON, 413 too long or too many, 422 invalid, 424 failed, 429 overloaded."""
        kind = self._type(error)
        if kind == "Overloaded":
            return 429
        if kind == "Backend":
            return 424
        if error.code == "too_long":
            return 413
        return 422 if error.status == 400 and kind != "Empty" and error.code != "malformed_json" else error.status

    def complaint(self, error: RequestError, echo: Mapping[str, Any]) -> dict[str, Any]:
        """`error` and `error_type`, and what ours tells beside them."""
        return {"error": error.message, "error_type": self._type(error), "code": error.code, "param": error.param}

    def _type(self, error: RequestError) -> str:
        if isinstance(error, Overloaded):
            return "Overloaded"
        return "Backend" if error.status >= 500 else _TYPES.get(error.code, "Validation")


class Embed(_Tei):
    """`embed`: `{"inputs": "…" or ["…", …] or token ids}` → `[[…], …]`."""

    def read(self, call: Call, task: Task) -> Draft:
        """One input, or a list of them: texts or token ids. Vectors are normalised unless the client says otherwise."""
        body = as_object(call, "inputs")
        inputs = body.pop("inputs")
        if "normalize" in task.options:
            body = {"normalize": True, **body}
        if not isinstance(inputs, list) or (inputs and is_integer(inputs[0])):
            return Draft([inputs], body, "inputs")
        return Draft(as_list(inputs, "inputs"), body, "inputs", listed=True)

    def write(self, request: Request, results: Sequence[Any], task: Task, model: str, usage: Usage) -> bytes:
        """A list, also of one."""
        return dumps(list(results))


class EmbedSparse(Embed):
    """`embed_sparse`: as `embed` → `[[{"index", "value"}, …], …]`."""

    growth = 2.0  # the names of both, for each of them

    def read(self, call: Call, task: Task) -> Draft:
        """As `embed`; the answer has no place for the words."""
        draft = super().read(call, task)
        if draft.options.pop("return_tokens", None) is not None:
            raise RequestError(
                "embed_sparse answers with indices and weights alone; the model's plain route has return_tokens.",
                code="unknown_option",
                param="return_tokens",
            )
        return draft

    def write(self, request: Request, results: Sequence[Any], task: Task, model: str, usage: Usage) -> bytes:
        """A list, also of one."""
        columns = [zip(result["indices"], result["values"], strict=True) for result in results]
        return dumps([[{"index": index, "value": value} for index, value in column] for column in columns])


class Predict(_Tei):
    """`predict`: a text, a pair `["a", "b"]`, or a list of `["a"]` and `["a", "b"]` → labels by descending score."""

    def read(self, call: Call, task: Task) -> Draft:
        """A list of texts is a pair here; a batch is a list of lists. All labels are answered."""
        body = as_object(call, "inputs")
        inputs = body.pop("inputs")
        body = {"top_k": None, **body}
        if not isinstance(inputs, list) or (inputs and not isinstance(inputs[0], list)):
            return Draft([inputs], body, "inputs")
        return Draft(as_list(inputs, "inputs"), body, "inputs", listed=True)

    def write(self, request: Request, results: Sequence[Any], task: Task, model: str, usage: Usage) -> bytes:
        """The labels of a single input bare, else a list of them."""
        return dumps(list(results) if request.listed else results[0])


class Rerank(_Tei):
    """`rerank`: `{"query", "texts", "return_text", "raw_scores"}` → `[{"index", "score", "text"}, …]`, best first."""

    def read(self, call: Call, task: Task) -> Draft:
        """The query and the texts; `return_text` is `return_documents` here."""
        body = as_object(call, "query", "texts")
        instance = {"query": body.pop("query"), "texts": body.pop("texts")}
        if "return_text" in body:
            body["return_documents"] = body.pop("return_text")
        return Draft([instance], body, "")

    def write(self, request: Request, results: Sequence[Any], task: Task, model: str, usage: Usage) -> bytes:
        """One list."""
        return dumps([_ranked(entry) for entry in results[0]])


def _ranked(entry: Mapping[str, Any]) -> dict[str, Any]:
    found = {"index": entry["index"], "score": entry["score"]}
    return {**found, "text": entry["document"]["text"]} if "document" in entry else found
