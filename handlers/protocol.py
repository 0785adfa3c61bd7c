"""A decoded body → Request, by the codec of the shape that the client spoke; which codec that is.

| spoken                              | codec                       | by                                        |
| "…", […], {"text": …}, {"texts": …} | plain                       | the body                                  |
| {"inputs": …, "parameters": …}      | huggingface                 | the body                                  |
| {"instances": […]}                  | kserve.V1 (Vertex AI)       | the body, or v1/models/NAME:predict       |
| {"inputs": [{"datatype": …}, …]}    | kserve.V2                   | the body, or v2/models/NAME/infer         |
| {"input": …}                        | openai                      | the body of an embedding, or v1/embeddings|
| {"query", "documents"}              | cohere (Jina)               | v1/rerank, v2/rerank                      |
| embed, embed_sparse, rerank, predict| tei                         | the route                                 |
| lines of JSON, CSV                  | sagemaker                   | the content type; answers also by Accept  |
"""

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from handlers.codecs import cohere, huggingface, kserve, openai, plain, sagemaker, tei
from handlers.codecs.codec import Codec, limited
from handlers.decoding import CSV, JSON_LINES, Call
from handlers.errors import RequestError, UnknownRoute, nearest, shown
from handlers.options import checked
from handlers.request import Request, Task, inside

PLAIN = plain.Plain()
_OPENAI = openai.Embeddings()
_RERANK, _RERANK_V2 = cohere.Rerank("1"), cohere.Rerank("2")
_V1, _V2 = kserve.V1(), kserve.V2()
_HUGGING_FACE = huggingface.HuggingFace()
#: Paths of other servers' interfaces; a task says which of them it answers.
ROUTES: Mapping[str, Codec] = {
    "v1/embeddings": _OPENAI,
    "embed": tei.Embed(),
    "embed_sparse": tei.EmbedSparse(),
    "predict": tei.Predict(),
    "rerank": tei.Rerank(),
    "v1/rerank": _RERANK,
    "v2/rerank": _RERANK_V2,
}
#: Those that every task answers.
_COMMON = (
    (re.compile(r"v1/models/[^/]+:predict"), _V1),
    (re.compile(r"v2/models/[^/]+(/versions/[^/]+)?/infer"), _V2),
)
_JSON_LINES, _CSV = sagemaker.JsonLines(), sagemaker.Csv()
_TYPES: Mapping[str, Codec] = {**dict.fromkeys(JSON_LINES, _JSON_LINES), **dict.fromkeys(CSV, _CSV)}


def by_route(route: str, kind: str, task: Task) -> Codec:
    """The codec that a request's path or media type asks for, whatever its body; PLAIN where they ask for none.

    Raises:
        UnknownRoute: with the paths that there are.
    """
    if route in task.routes:
        return ROUTES[route]
    common = next((codec for pattern, codec in _COMMON if pattern.fullmatch(route)), None)
    if common is not None:
        return common
    if route:
        raise UnknownRoute(f"There is no route {shown(route)}; there are {', '.join(routes(task))}.")
    return _TYPES.get(kind, PLAIN)


def routes(task: Task) -> list[str]:
    """The paths behind the model's version that the task answers."""
    return [*task.routes, "v1/models/NAME:predict", "v2/models/NAME/infer"]


def by_body(asked: Codec, call: Call, task: Task) -> Codec:
    """The codec of a decoded body, where the path and the media type (`asked`) leave it open.

    Raises:
        RequestError: the body speaks two shapes at once.
    """
    body = call.body
    if not isinstance(body, dict):
        return asked
    if asked is ROUTES["rerank"] and "documents" in body and "texts" not in body:
        return _RERANK  # Infinity and vLLM answer Jina's shape on this path too
    if asked is not PLAIN:
        return asked
    other: dict[str, Codec] = {"instances": _V1, "inputs": _V2 if _is_tensors(body.get("inputs")) else _HUGGING_FACE}
    if "v1/embeddings" in task.routes:
        other["input"] = _OPENAI
    present = [name for name in (*task.fields[:1], plain.LIST, *other) if name in body]
    spoken = [name for name in present if name in other]
    if spoken and len(present) > 1:
        said = " and ".join(present)
        raise RequestError(f"The body has {said}; send one.", code="ambiguous_input", param=present[1])
    return other[spoken[0]] if spoken else PLAIN


def by_accept(asked: Codec, accepted: Sequence[str]) -> Codec:
    """The codec that writes the answer: `asked`, unless the client wants lines or CSV, or JSON for its lines.

    Args:
        asked: the codec of the body.
        accepted: the media types of the request's Accept header, in its order.
    """
    if asked not in (PLAIN, _HUGGING_FACE, _V1, _JSON_LINES, _CSV):
        return asked
    for kind in accepted:
        if kind in _TYPES:
            return _TYPES[kind]
        if kind == "application/json":
            return _HUGGING_FACE if asked in (_JSON_LINES, _CSV) else asked
        if kind in ("*/*", "application/*", "text/*"):
            break
    return asked


def _is_tensors(inputs: Any) -> bool:
    return isinstance(inputs, list) and bool(inputs) and isinstance(inputs[0], dict) and "datatype" in inputs[0]


def read(call: Call, codec: Codec, task: Task) -> Request:
    """Find the items and the options in a decoded body.

    Args:
        call: the decoded request.
        codec: of the shape that it speaks.
        task: what is served.

    Raises:
        TooLarge, RequestError: see their messages.
    """
    draft = codec.read(call, task)
    known = {**task.options, **codec.options}
    for name in draft.options:
        if name not in known:
            near = nearest(name, known)
            hint = f"; did you mean {near!r}?" if near else f"; known are {', '.join(sorted(known)) or 'none'}."
            raise RequestError(f"Unknown option {shown(name)}{hint}", code="unknown_option", param=_name(name))
    limited(len(draft.values), draft.field, task)
    items = tuple(
        task.item(value, inside(draft.field, i) if draft.listed else draft.field)
        for i, value in enumerate(draft.values)
    )
    options = {
        name: None if value is None else checked(value, name, known[name])
        for name, value in draft.options.items() if value is not None or name in task.nullable
    }  # fmt: skip
    own = {name: value for name, value in options.items() if name in task.options}
    return Request(items, own, draft.field, draft.listed, codec.echo(call))


def _name(key: str) -> str:
    """A key of the client's, fit for `param`: ASCII and short."""
    return shown(key)[1:-1]


def phrase(status: int) -> str:
    """The reason phrase of a status, one ASCII line as TorchServe's framing needs it."""
    return HTTPStatus(status).phrase
