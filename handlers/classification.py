"""Text classification: texts or pairs of texts → labels and scores, as transformers' pipeline gives them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from handlers import scores
from handlers.base import TransformerHandler
from handlers.errors import RequestError
from handlers.options import boolean, integer, one_of, text_or_pair
from handlers.request import Item, Nouns, Pair, Request
from handlers.tokens import Encoding


class ClassificationHandler(TransformerHandler):
    """The best label of each text or pair, as `pipeline("text-classification")` gives it.

    Request options: `top_k` (the best N labels in a list, null for all), `function_to_apply` (`sigmoid`, `softmax` or
    `none`; by default what suits the model's kind of problem), `raw_scores` (true: `none`, as text-embeddings-inference
    calls it), `truncate` (bool).
    """

    nouns = Nouns("prediction", "predictions")
    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        "top_k": integer(1),
        "function_to_apply": one_of(*scores.FUNCTIONS),
        "raw_scores": boolean,
        "truncate": boolean,
    }
    nullable = ("top_k",)
    fields = ("text", "text_pair")
    routes = ("predict",)
    architecture = "AutoModelForSequenceClassification"
    reads = "texts"

    def setup(self) -> None:
        """Learn the labels, and what the model's kind of problem makes of its logits."""
        config = self.model.net.config
        self.labels = scores.labels_of(config)
        self.label_bytes = sorted(scores.labels_bytes(self.labels), reverse=True)
        self.function = scores.default_function(config)

    def item(self, value: Any, param: str) -> Item:
        """A text or a pair; an empty second text counts as none, as in the pipeline."""
        item = text_or_pair(value, param)
        return item.text if isinstance(item, Pair) and not item.text_pair else item

    def parse(self, request: Request) -> Request:
        """Refuse two functions at once."""
        if request.options.get("raw_scores") and request.options.get("function_to_apply", "none") != "none":
            raise RequestError(
                "raw_scores are those without a function; send function_to_apply or raw_scores.",
                code="ambiguous_input",
                param="raw_scores",
            )
        return request

    def forward(self, encodings: Sequence[Encoding], precise: bool) -> Tensor:
        """Logits: (texts, labels)."""
        return self.model.logits(encodings, precise=precise)[0]

    def render(self, request: Request, rows: Sequence[Tensor], encodings: Sequence[Encoding]) -> Sequence[Any]:
        """The best label of each text, or a list of the best ones where `top_k` says so."""
        default = "none" if request.options.get("raw_scores") else self.function
        function = scores.FUNCTIONS[request.options.get("function_to_apply", default)]
        ranked = [
            scores.best_first(scores.labelled(self.labels, row)) for row in function(torch.stack(list(rows))).tolist()
        ]
        if "top_k" not in request.options:
            return [entries[0] for entries in ranked]
        return [entries[: request.options["top_k"]] for entries in ranked]

    def item_bytes(self, request: Request) -> int:
        """An upper bound: the longest labels, as many as are asked for."""
        return sum(self.label_bytes[: request.options.get("top_k", 1)]) + 2

    def card(self) -> dict[str, Any]:
        """What is served: the pipeline's card, the labels and the function that is applied by default."""
        return {**super().card(), "labels": self.labels, "function_to_apply": self.function}
