"""Zero-shot classification: labels of the client's own, judged by a model of entailment (NLI), behind TorchServe."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from handlers import hypotheses
from handlers.base import TransformerHandler
from handlers.errors import RequestError, TooLarge
from handlers.hypotheses import Premise
from handlers.options import boolean, checked, members, text
from handlers.request import Nouns, Pair, Request, inside
from handlers.serialise import dumps
from handlers.tokens import Encoding, Text

logger = logging.getLogger(__name__)


class ZeroShotHandler(TransformerHandler):
    """Labels by descending score, as transformers' `zero-shot-classification` pipeline gives them.

    Request options: `candidate_labels` (a list, or one string with commas), `hypothesis_template` (with `{}` where the
    label goes), `multi_label` (each label by itself; a single one always is), `truncate` (cut the text, never the
    hypothesis). The first three may be fields of an instance too, whose own win.
    """

    nouns = Nouns("classification", "classifications")
    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        "candidate_labels": hypotheses.labels,
        "hypothesis_template": hypotheses.template,
        "multi_label": boolean,
        "truncate": boolean,
    }
    inputs_alone = True
    architecture = "AutoModelForSequenceClassification"
    reads = "texts"

    def setup(self) -> None:
        """Find the class of entailment."""
        self.entailment = hypotheses.entailment_of(self.model.net.config)
        if self.entailment == -1:
            logger.warning("No label of the model starts with 'entail': its last one is taken for entailment")

    def item(self, value: Any, param: str) -> Premise:
        """A text, or an object with it and options of its own."""
        if not isinstance(value, dict):
            return Premise(text(value, param, "a string or an object with 'text'"))
        found = members(value, param, ["text"], ["candidate_labels", "hypothesis_template", "multi_label"])
        premise = text(found.pop("text"), inside(param, "text"))
        own = {name: checked(option, inside(param, name), self.options[name]) for name, option in found.items()}
        return Premise(premise, own.get("candidate_labels"), own.get("hypothesis_template"), own.get("multi_label"))

    def parse(self, request: Request) -> Request:
        """Give every text its labels."""
        asked = request.options
        items = []
        for i, item in enumerate(request.items):
            names = item.labels or asked.get("candidate_labels")
            if names is None:
                where = request.param(i, "candidate_labels") if request.listed else "candidate_labels"
                raise RequestError(f"{where} is missing.", code="missing_field", param=where)
            template = item.template or asked.get("hypothesis_template", hypotheses.TEMPLATE)
            multi = asked.get("multi_label", False) if item.multi_label is None else item.multi_label
            items.append(Premise(item.text, names, template, multi))
        pairs = sum(len(item.labels or ()) for item in items)
        if pairs > self.settings.max_items:
            raise TooLarge(
                f"The request makes {pairs} pairs of a text and a label; at most {self.settings.max_items} fit in one.",
                code="too_many_items",
                param="candidate_labels",
            )
        return request.with_items(items)

    def texts(self, request: Request) -> Sequence[Text]:
        """Each text with each of its hypotheses."""
        truncate = request.options.get("truncate", True)
        hypothesis = functools.cache(hypotheses.hypothesis)  # texts share their labels, which may be long
        return [
            Text(
                Pair(item.text, hypothesis(item.template, label)),
                truncate=truncate,
                param=request.param(i),
                cut="only_first",
            )
            for i, item in enumerate(request.items)
            for label in item.labels
        ]

    def forward(self, encodings: Sequence[Encoding], precise: bool) -> Tensor:
        """The logits of each pair: (pairs, classes)."""
        logits, _ = self.model.logits(encodings, precise=precise)
        return logits

    def render(self, request: Request, rows: Sequence[Tensor], encodings: Sequence[Encoding]) -> Sequence[Any]:
        """Rank the labels of each text."""
        left = iter(rows)
        results = []
        for item in request.items:
            logits = torch.stack([next(left) for _ in item.labels])
            independent = item.multi_label or len(item.labels) == 1
            names, scores = hypotheses.ranked(item.labels, logits, self.entailment, independent=independent)
            results.append({"sequence": item.text, "labels": names, "scores": scores})
        return results

    def item_bytes(self, request: Request) -> int:
        """An upper bound on average: the text and the labels as they are, every score at its longest."""
        size = functools.cache(lambda text: len(dumps(text)))
        total = sum(
            hypotheses.RESULT_BYTES
            + size(item.text)
            + sum(size(label) + hypotheses.SCORE_BYTES for label in item.labels)
            for item in request.items
        )
        return -(-total // len(request.items))

    def sample(self) -> Any:
        """A text and two labels."""
        return {"text": "The team won the match.", "candidate_labels": ["sport", "politics"]}

    def card(self) -> dict[str, Any]:
        """What is served: the pipeline's card and the default template."""
        return {**super().card(), "hypothesis_template": hypotheses.TEMPLATE}
