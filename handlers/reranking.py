"""Reranking: a cross-encoder scores documents for a query, as sentence-transformers' CrossEncoder does."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from handlers import prompts, scores
from handlers.base import TransformerHandler
from handlers.errors import RequestError
from handlers.options import boolean, positive_integer
from handlers.request import Item, Nouns, Pair, Request, inside
from handlers.scores import DOCUMENTS, CandidateDocuments
from handlers.serialise import dumps
from handlers.tokens import Encoding, Text

# {"index":1000000,"score":-1.2345678901234567e-38,"document":{"text":…}}, and a comma
RANKED_BYTES = 78


class RerankingHandler(TransformerHandler):
    """One ranking per query, best first; documents of equal score stay in the order in which they came.

    Request options: `top_n` (the best N), `return_documents` (bool), `raw_scores` (true: without the model's
    activation), `truncate` (bool: the longer text of a pair loses tokens first), `prompt_name` or `prompt` (put before
    the query).

    A model with several labels ranks nothing: it answers every document's scores in order, as `predict` does, and has
    neither `top_n` nor other servers' routes.
    """

    nouns = Nouns("ranking", "rankings")
    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        "top_n": positive_integer,
        "return_documents": boolean,
        "raw_scores": boolean,
        "truncate": boolean,
        **prompts.OPTIONS,
    }
    fields = ("query", *DOCUMENTS)
    routes = ("rerank", "v1/rerank", "v2/rerank")
    architecture = "AutoModelForSequenceClassification"
    reads = "texts"

    def setup(self) -> None:
        """Learn the labels and the activation."""
        self.labels = scores.labels_of(self.model.net.config)
        self.label_bytes = sum(scores.labels_bytes(self.labels))
        self.activation = scores.activation(self.settings.activation)
        if len(self.labels) > 1:
            self.task = replace(self.task, routes=())

    def item(self, value: Any, param: str) -> Item:
        """A query and its documents."""
        if isinstance(value, str):  # a query alone, in a field of its own or as an instance
            value, param = {"query": value}, "" if param == "query" else param
        return scores.candidate_documents(value, param)

    def parse(self, request: Request) -> Request:
        """Check the options that depend on the model."""
        prompts.check(request.options, self.settings)
        if "top_n" in request.options and len(self.labels) > 1:
            raise RequestError(
                f"The model has {len(self.labels)} labels, so that it ranks nothing; leave out top_n.",
                code="invalid_value",
                param="top_n",
            )
        return request

    def prompt(self, request: Request) -> str:
        """The request's own prompt, the one it names, or the model's default."""
        return prompts.chosen(request.options, self.settings)

    def texts(self, request: Request) -> Sequence[Text]:
        """Every document behind its query."""
        prompt = self.prompt(request)
        truncate = request.options.get("truncate", True)
        return [
            Text(Pair(item.query, document), prompt, truncate, inside(request.param(i, item.field), j))
            for i, item in enumerate(request.items)
            for j, document in enumerate(item.documents)
        ]

    def forward(self, encodings: Sequence[Encoding], precise: bool) -> Tensor:
        """Logits: (pairs, labels)."""
        return self.model.logits(encodings, precise=precise)[0]

    def render(self, request: Request, rows: Sequence[Tensor], encodings: Sequence[Encoding]) -> Sequence[Any]:
        """Each query's documents by descending score."""
        logits = torch.stack(list(rows))
        activated = iter((logits if request.options.get("raw_scores") else self.activation(logits)).tolist())
        tokens = iter(encodings)
        return [
            self._ranking(item, [(next(tokens), next(activated)) for _ in item.documents], request.options)
            for item in request.items
        ]

    def _ranking(
        self, item: CandidateDocuments, scored: Sequence[tuple[Encoding, list[float]]], options: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        ranks = len(self.labels) == 1
        # Equal pairs: in another place of a batch the last bits differ
        same: dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]] = {}
        entries: list[dict[str, Any]] = []
        for index, (encoding, found) in enumerate(scored):
            row = same.setdefault((tuple(encoding.ids), tuple(encoding.type_ids)), found)
            entries.append({"index": index})
            entries[-1] |= {"score": row[0]} if ranks else {"scores": scores.labelled(self.labels, row)}
            if options.get("return_documents"):
                entries[-1]["document"] = {"text": item.documents[index]}
        return scores.best_first(entries)[: options.get("top_n")] if ranks else entries

    def item_bytes(self, request: Request) -> int:
        """An upper bound on average: the documents that are sent back as they are, every score at its longest."""
        total = sum(self._ranking_bytes(item, request) for item in request.items)
        return -(-total // len(request.items))

    def _ranking_bytes(self, item: CandidateDocuments, request: Request) -> int:
        each = RANKED_BYTES + (self.label_bytes if len(self.labels) > 1 else 0)
        sizes = [0] * len(item.documents)
        if request.options.get("return_documents"):
            sizes = sorted((len(dumps(document)) for document in item.documents), reverse=True)
        sizes = sizes[: request.options.get("top_n")]
        return each * len(sizes) + sum(sizes) + 2

    def sample(self) -> Any:
        """A query and two documents."""
        return {"query": "hello", "documents": ["hello", "good morning"]}

    def card(self) -> dict[str, Any]:
        """What is served: the pipeline's card, the labels, the activation and the prompts."""
        return {
            **super().card(),
            "labels": self.labels,
            "activation": self.settings.activation,
            "prompts": dict(self.settings.prompts),
        }
