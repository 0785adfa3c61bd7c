"""Token classification: the entities of a text, such as names, with their places in it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from handlers import windows
from handlers.base import TransformerHandler
from handlers.entities import STRATEGIES, Entities
from handlers.errors import RequestError, TooLarge
from handlers.options import any_strings, integer, one_of
from handlers.request import Nouns, Request
from handlers.scores import labels_of
from handlers.tokens import Encoding, Text

# Of rendering one token: by itself, and in groups, whose words are spelt
TOKEN_SECONDS, GROUPED_SECONDS = 6e-6, 5e-5

ENTITY_BYTES = 60  # that one takes at least: {"entity_group":"","score":0.5,"word":"","start":0,"end":1}


class TokenClassificationHandler(TransformerHandler):
    """A list of entities per text, as transformers' token-classification pipeline gives it.

    Request options: `aggregation_strategy` (`none`: every token by itself; `simple`: neighbours of one tag together;
    `first`, `average`, `max`: likewise, with one label for all tokens of a word), `ignore_labels` (left out of the
    answer; `["O"]` unless given), `stride` (tokens that the windows of a long text share). Nothing is cut off: a text
    that is longer than the model takes is read in overlapping windows.
    """

    nouns = Nouns("entities", "entities")
    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        "aggregation_strategy": one_of(*STRATEGIES),
        "ignore_labels": any_strings,
        "stride": integer(0),
    }
    inputs_alone = True
    architecture = "AutoModelForTokenClassification"
    reads = "tokens"

    def setup(self) -> None:
        """Learn the labels."""
        self.labels = labels_of(self.model.net.config)
        self.entities = Entities(self.model.tokens.tokenizer, self.labels)

    def parse(self, request: Request) -> Request:
        """Refuse a stride that would leave windows in their place."""
        room = self.model.tokens.room
        if request.options.get("stride", 0) >= room:
            raise RequestError(
                f"stride is {request.options['stride']}; a window holds {room} tokens, so it must be less.",
                code="invalid_value",
                param="stride",
            )
        return request

    def texts(self, request: Request) -> Sequence[Text]:
        """Each item, in windows where it is too long."""
        stride = request.options.get("stride", windows.overlap(self.model.tokens.room))
        strategy = request.options.get("aggregation_strategy", "none")
        return [
            Text(item, param=request.param(i), stride=stride, sourced=True, options=strategy)
            for i, item in enumerate(request.items)
        ]

    def forward(self, encodings: Sequence[Encoding], precise: bool) -> Sequence[Tensor]:
        """Logits of each text, (tokens, labels)."""
        logits, layout = self.model.logits(encodings, precise=precise)
        return layout.split(logits)

    def render(self, request: Request, rows: Sequence[Tensor], encodings: Sequence[Encoding]) -> Sequence[Any]:
        """The entities of each text."""
        strategy = request.options.get("aggregation_strategy", "none")
        ignored = request.options.get("ignore_labels", ("O",))
        results = []
        room = self.settings.max_response_bytes
        for text, own in zip(request.items, windows.per_text(encodings), strict=True):
            results.append(self.entities.of(text, encodings[own], rows[own], strategy=strategy, ignored=ignored))
            room -= ENTITY_BYTES * len(results[-1])
            if room < 0:  # before yet more are made
                raise TooLarge(
                    "The answer is larger than TorchServe can send; send less text.",
                    code="answer_too_large",
                    param=request.field or None,
                )
        return results

    def seconds(self, encodings: Sequence[Encoding]) -> float:
        """Predicted time of running these encodings and of finding the entities in what comes out."""
        finding = sum(
            len(encoding) * (TOKEN_SECONDS if encoding.options == "none" else GROUPED_SECONDS) for encoding in encodings
        )
        return super().seconds(encodings) + finding

    def card(self) -> dict[str, Any]:
        """What is served: the pipeline's card and the labels."""
        return {**super().card(), "labels": self.labels}
