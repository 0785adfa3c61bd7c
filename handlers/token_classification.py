"""Token classification: the entities of a text, such as names, with their places in it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from handlers import windows
from handlers.base import TransformerHandler
from handlers.entities import STRATEGIES, Entities
from handlers.errors import RequestError
from handlers.options import any_strings, integer, one_of
from handlers.request import Nouns, Request
from handlers.tokens import Encoding, Text


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
        names = self.model.net.config.id2label
        self.labels = [str(names[index]) for index in range(len(names))]
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
        return [Text(item, param=request.param(i), stride=stride, sourced=True) for i, item in enumerate(request.items)]

    def forward(self, encodings: Sequence[Encoding], precise: bool) -> Sequence[Tensor]:
        """Logits of each text, (tokens, labels)."""
        logits, layout = self.model.logits(encodings, precise=precise)
        return [logits[start : start + length] for start, length in zip(layout.starts, layout.lengths, strict=True)]

    def render(self, request: Request, rows: Sequence[Tensor], encodings: Sequence[Encoding]) -> Sequence[Any]:
        """The entities of each text."""
        strategy = request.options.get("aggregation_strategy", "none")
        ignored = request.options.get("ignore_labels", ("O",))
        return [
            self.entities.of(text, encodings[own], rows[own], strategy=strategy, ignored=ignored)
            for text, own in zip(request.items, windows.per_text(encodings), strict=True)
        ]

    def card(self) -> dict[str, Any]:
        """What is served: the pipeline's card and the labels."""
        return {**super().card(), "labels": self.labels}
