"""Text embedding: a sentence-transformers model, or any encoder with a pooling, behind TorchServe."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from handlers import prompts
from handlers.base import TransformerHandler
from handlers.errors import RequestError
from handlers.options import boolean, one_of, positive_integer
from handlers.pooling import Head, finish
from handlers.quantization import CALIBRATED, DTYPES, Calibration, quantize, width
from handlers.request import Nouns, Request
from handlers.serialise import FLOAT_BYTES, UNIT_FLOAT_BYTES, base64_array
from handlers.tokens import Encoding

# Longest number of these, and its comma
_WRITTEN = {"int8": 5, "uint8": 4, "binary": 5, "ubinary": 4}


class EmbeddingHandler(TransformerHandler):
    """One vector per text, as sentence-transformers' `encode` gives it.

    Request options: `normalize` (bool), `truncate` (bool), `dimensions` (cut to the first N, renormalised),
    `prompt_name` (one of the model's prompts) or `prompt` (any text put before the input), `output_dtype` (`float32`,
    `int8` or `uint8` where the archive was calibrated, `binary` or `ubinary`: one bit a dimension), `encoding_format`
    (`float`: numbers, or `base64` of their little-endian bytes).
    """

    nouns = Nouns("embedding", "embeddings")
    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        "normalize": boolean,
        "truncate": boolean,
        "dimensions": positive_integer,
        **prompts.OPTIONS,
        "output_dtype": one_of(*DTYPES),
        "encoding_format": one_of("float", "base64"),
    }
    routes = ("v1/embeddings", "embed")
    token_ids = True
    arrays = True

    def setup(self) -> None:
        """Load the pooling head and the calibration, and learn the length of a vector."""
        dense = [self.directory / path for path in self.settings.dense]
        self.head = Head(self.settings.pooling, dense).to(self.device).eval()
        self.dimension: int = self.forward([Encoding([0], [0])], False).shape[-1]
        path = self.settings.calibration
        home = Path(self.context.system_properties["model_dir"])
        self.calibration = Calibration(home / path, self.dimension) if path is not None else None

    def parse(self, request: Request) -> Request:
        """Check the options that depend on the model."""
        options = request.options
        if options.get("dimensions", 1) > self.dimension:
            raise RequestError(
                f"dimensions is {options['dimensions']}; the model has {self.dimension}.",
                code="invalid_value",
                param="dimensions",
            )
        prompts.check(options, self.settings)
        if options.get("output_dtype") in CALIBRATED and self.calibration is None:
            raise RequestError(
                f"This archive was not calibrated for {options['output_dtype']} (batchserve build --calibrate); "
                "it has float32, binary and ubinary.",
                code="not_calibrated",
                param="output_dtype",
            )
        return request

    def prompt(self, request: Request) -> str:
        """The request's own prompt, the one it names, or the model's default."""
        return prompts.chosen(request.options, self.settings)

    def forward(self, encodings: Sequence[Encoding], precise: bool) -> Tensor:
        """Encode and pool: (texts, dimension)."""
        hidden, layout = self.model.hidden(encodings, precise=precise)
        vectors: Tensor = self.head(hidden, layout)
        return vectors

    def render(self, request: Request, rows: Sequence[Tensor], encodings: Sequence[Encoding]) -> Sequence[Any]:
        """Cut, normalise, quantise, and make arrays or base64 of the rows."""
        dtype = request.options.get("output_dtype", "float32")
        form = {
            "normalize": request.options.get("normalize", self.settings.normalize),
            "dimensions": request.options.get("dimensions"),
        }
        ranges = self.calibration.ranges(**form) if self.calibration is not None and dtype in CALIBRATED else None
        vectors = quantize(finish(torch.stack(list(rows)), **form).numpy(), dtype, ranges)
        if request.options.get("encoding_format") == "base64":
            return [base64_array(vector) for vector in vectors]
        return list(vectors)

    def item_bytes(self, request: Request) -> int:
        """An upper bound: every number at its longest."""
        dtype = request.options.get("output_dtype", "float32")
        count = width(request.options.get("dimensions", self.dimension), dtype)
        if request.options.get("encoding_format") == "base64":
            return count * (4 if dtype == "float32" else 1) * 4 // 3 + 4
        if dtype in _WRITTEN:
            return count * _WRITTEN[dtype]
        unit = request.options.get("normalize", self.settings.normalize)
        return count * (UNIT_FLOAT_BYTES if unit else FLOAT_BYTES)

    def card(self) -> dict[str, Any]:
        """What is served: the pipeline's card and the embedding's own settings."""
        return {
            **super().card(),
            "dimensions": self.dimension,
            "pooling": list(self.settings.pooling),
            "normalize": self.settings.normalize,
            "prompts": dict(self.settings.prompts),
            "output_dtypes": [dtype for dtype in DTYPES if dtype not in CALIBRATED or self.calibration is not None],
        }
