"""A batch on its way through the pipeline: one slot per row, in which an error stays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from handlers.codecs.codec import Codec
from handlers.codecs.plain import Plain
from handlers.errors import HandlerFault, RequestError
from handlers.request import Request
from handlers.serialise import is_finite
from handlers.tokens import Encoding, Text


@dataclass
class Slot:
    """One row of the batch.

    Args:
        codec: of the shape that the client spoke, as far as is known.
        writer: of the answer's shape, which an Accept header may ask for.
        echo: what the codec needs again.
        request: what the client asks; None for a describe request.
        error: why it cannot be answered.
        texts: what to tokenise for the request.
        encodings, outputs: of its texts, in order.
        params: what errors call each encoding's text.
    """

    codec: Codec = field(default_factory=Plain)
    writer: Codec = field(default_factory=Plain)
    echo: Mapping[str, Any] = field(default_factory=dict)
    request: Request | None = None
    error: RequestError | None = None
    texts: Sequence[Text] = ()
    encodings: list[Encoding] = field(default_factory=list)
    params: list[str] = field(default_factory=list)
    outputs: list[Tensor | RequestError] = field(default_factory=list)


@dataclass
class Work:
    """A batch on its way through the pipeline: one slot per row."""

    slots: list[Slot]
    started: float


def placed(error: RequestError, param: str) -> RequestError:
    """The error of one text, naming it."""
    message = error.message
    if message[:1].islower():  # «the text's 90 tokens …», «token 3 is …»: said of a text
        message = f"{param}: {message}"
    return type(error)(message, code=error.code, param=param)


def rendered(results: Any, request: Request) -> Sequence[Any]:
    """What `render` made of a request's rows, if it is a result for each item that JSON can hold."""
    if not hasattr(results, "__len__") or isinstance(results, str | bytes | Mapping):
        raise HandlerFault(f"render returned a {type(results).__name__}; it must return a list")
    if len(results) != len(request.items):
        raise HandlerFault(f"render returned {len(results)} results for {len(request.items)} items")
    if not all(map(is_finite, results)):
        raise HandlerFault("render returned NaN or infinity")
    found: Sequence[Any] = results
    return found
