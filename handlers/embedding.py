"""Text embedding: a sentence-transformers model, or any encoder with a pooling, behind TorchServe."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from handlers.base import TransformerHandler
from handlers.errors import RequestError, nearest, shown
from handlers.options import boolean, one_of, positive_integer, string
from handlers.pooling import Head, finish
from handlers.request import Nouns, Request
from handlers.serialise import base64_array
from handlers.tokens import Encoding

# Longest float32 as orjson or json writes it, and its comma: -1234567800000000.0, in a unit vector -0.0000063184107
FLOAT_BYTES, UNIT_FLOAT_BYTES = 20, 17


class EmbeddingHandler(TransformerHandler):
    """One vector per text, as sentence-transformers' `encode` gives it.

    Request options: `normalize` (bool), `truncate` (bool), `dimensions` (cut to the first N, renormalised),
    `prompt_name` (one of the model's prompts) or `prompt` (any text put before the input), `encoding_format`
    (`float`, or `base64` of the little-endian float32).
    """

    nouns = Nouns("embedding", "embeddings")
    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        "normalize": boolean,
        "truncate": boolean,
        "dimensions": positive_integer,
        "prompt_name": string,
        "prompt": string,
        "encoding_format": one_of("float", "base64"),
    }
    routes = ("v1/embeddings", "embed")
    token_ids = True

    def setup(self) -> None:
        """Load the pooling head and learn the length of a vector."""
        dense = [self.directory / path for path in self.settings.dense]
        self.head = Head(self.settings.pooling, dense).to(self.device).eval()
        self.dimension: int = self.forward([Encoding([0], [0])], False).shape[-1]

    def parse(self, request: Request) -> Request:
        """Check the options that depend on the model."""
        options = request.options
        if options.get("dimensions", 1) > self.dimension:
            raise RequestError(
                f"dimensions is {options['dimensions']}; the model has {self.dimension}.",
                code="invalid_value",
                param="dimensions",
            )
        if "prompt" in options and "prompt_name" in options:
            raise RequestError("Send prompt or prompt_name, not both.", code="ambiguous_input", param="prompt")
        name = options.get("prompt_name")
        if name is not None and name not in self.settings.prompts:
            known = sorted(self.settings.prompts)
            near = nearest(name, known)
            hint = f"did you mean {near!r}?" if near else f"it has {', '.join(known) or 'none'}."
            raise RequestError(
                f"The model has no prompt {shown(name)}; {hint}", code="invalid_value", param="prompt_name"
            )
        return request

    def prompt(self, request: Request) -> str:
        """The request's own prompt, the one it names, or the model's default."""
        if "prompt" in request.options:
            return str(request.options["prompt"])
        name = request.options.get("prompt_name", self.settings.default_prompt_name)
        return self.settings.prompts[name] if name is not None else ""

    def forward(self, encodings: Sequence[Encoding], precise: bool) -> Tensor:
        """Encode and pool: (texts, dimension)."""
        hidden, layout = self.model.hidden(encodings, precise=precise)
        vectors: Tensor = self.head(hidden, layout)
        return vectors

    def render(self, request: Request, rows: Sequence[Tensor], encodings: Sequence[Encoding]) -> Sequence[Any]:
        """Cut, normalise, and make arrays or base64 of the rows."""
        normalize = request.options.get("normalize", self.settings.normalize)
        vectors = finish(
            torch.stack(list(rows)), normalize=normalize, dimensions=request.options.get("dimensions")
        ).numpy()
        if request.options.get("encoding_format") == "base64":
            return [base64_array(vector) for vector in vectors]
        return list(vectors)

    def item_bytes(self, request: Request) -> int:
        """An upper bound: every float at its longest."""
        dimension: int = request.options.get("dimensions", self.dimension)
        number = UNIT_FLOAT_BYTES if request.options.get("normalize", self.settings.normalize) else FLOAT_BYTES
        base64 = request.options.get("encoding_format") == "base64"
        return dimension * 16 // 3 + 4 if base64 else dimension * number

    def card(self) -> dict[str, Any]:
        """What is served: the pipeline's card and the embedding's own settings."""
        return {
            **super().card(),
            "dimensions": self.dimension,
            "pooling": list(self.settings.pooling),
            "normalize": self.settings.normalize,
            "prompts": dict(self.settings.prompts),
        }
