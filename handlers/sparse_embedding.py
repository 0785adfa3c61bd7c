"""Sparse embedding: a SPLADE model, or any masked language model as one, behind TorchServe."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from handlers import prompts
from handlers.base import TransformerHandler
from handlers.options import boolean, positive_integer
from handlers.pooling import splade
from handlers.request import Nouns, Request
from handlers.serialise import FLOAT_BYTES, dumps
from handlers.tokens import Encoding


class SparseEmbeddingHandler(TransformerHandler):
    """A weight for each word of the vocabulary that a text calls up, as sentence-transformers' `SparseEncoder`.

    A value is `{"indices": […], "values": […]}`, indices ascending, values above 0.

    Request options: `top_k` (only the largest weights; the library's `max_active_dims`), `return_tokens` (the words as
    `tokens` beside the indices), `truncate` (bool), `prompt_name` (one of the model's prompts) or `prompt` (any text
    put before the input).
    """

    nouns = Nouns("sparse_embedding", "sparse_embeddings")
    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        "top_k": positive_integer,
        "return_tokens": boolean,
        "truncate": boolean,
        **prompts.OPTIONS,
    }
    routes = ("embed_sparse",)
    token_ids = True
    architecture = "AutoModelForMaskedLM"

    def setup(self) -> None:
        """Learn the vocabulary's size and its words, and have the head timed with the encoder."""
        self.vocabulary = self.model.head(self.model.hidden([Encoding([0], [0])])[0]).shape[-1]
        self.words: list[str | None] = self.model.tokens.tokenizer.convert_ids_to_tokens(range(self.vocabulary))
        self.longest_word = max(len(dumps(word)) for word in self.words)
        self.model.work = lambda encodings: self.forward(encodings, False)

    def parse(self, request: Request) -> Request:
        """Check the prompt."""
        prompts.check(request.options, self.settings)
        return request

    def prompt(self, request: Request) -> str:
        """The request's own prompt, the one it names, or the model's default."""
        return prompts.chosen(request.options, self.settings)

    @torch.inference_mode()
    def forward(self, encodings: Sequence[Encoding], precise: bool) -> list[Tensor]:
        """Score the vocabulary and pool: per text (2, words), indices and their weights.

        Indices are exact in fp32 up to 2 ** 24.
        """
        hidden, layout = self.model.hidden(encodings, precise=precise)
        pooled = splade(
            hidden,
            layout,
            self.model.head,
            vocabulary=self.vocabulary,
            strategy=self.settings.splade_strategy,
            activation=self.settings.splade_activation,
        )
        return [torch.stack([(at := row.nonzero().squeeze(1)).float(), row[at]]) for row in pooled]

    def render(self, request: Request, rows: Sequence[Tensor], encodings: Sequence[Encoding]) -> Sequence[Any]:
        """The largest weights of each text."""
        return [self._value(row, request.options) for row in rows]

    def _value(self, row: Tensor, options: Mapping[str, Any]) -> dict[str, Any]:
        most = self._most(options)
        if most is not None and row.shape[1] > most:
            largest = row[1].argsort(descending=True, stable=True)[:most]
            row = row[:, largest.sort().values]
        indices = row[0].int()
        value: dict[str, Any] = {"indices": indices.numpy(), "values": row[1].numpy()}
        if options.get("return_tokens"):
            value["tokens"] = [self.words[index] for index in indices.tolist()]
        return value

    def _most(self, options: Mapping[str, Any]) -> int | None:
        most: int | None = options.get("top_k", self.settings.max_active_dims)
        return most

    def item_bytes(self, request: Request) -> int:
        """An upper bound where the number of words is limited; without a limit it cannot be told."""
        most = self._most(request.options)
        if most is None:
            return 0
        entry = len(f"{self.vocabulary},") + FLOAT_BYTES
        if request.options.get("return_tokens"):
            entry += self.longest_word + 1
        return len('{"indices":[],"values":[],"tokens":[]}') + min(most, self.vocabulary) * entry

    def card(self) -> dict[str, Any]:
        """What is served: the pipeline's card and the sparse embedding's own settings."""
        return {
            **super().card(),
            "dimensions": self.vocabulary,
            "pooling": self.settings.splade_strategy,
            "activation": self.settings.splade_activation,
            "max_active_dims": self.settings.max_active_dims,
            "prompts": dict(self.settings.prompts),
        }
