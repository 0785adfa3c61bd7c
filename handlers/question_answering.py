"""Extractive question answering: a question and a context → the stretch of the context that answers it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from handlers import spans, windows
from handlers.base import TransformerHandler
from handlers.errors import RequestError
from handlers.options import boolean, integer, members, text
from handlers.request import Nouns, Pair, Request, inside
from handlers.tokens import Encoding, Text

MOST_OVERLAP = 128  # tokens that windows share by default, but at most half of the model's length; as transformers 4
MOST_TOKENS = 15  # of an answer, as in transformers 4


class QuestionAnsweringHandler(TransformerHandler):
    """`answer`, `score`, `start` and `end` (in characters of the context), as transformers 4's pipeline called them.

    A context that does not fit is read in overlapping windows. See `spans` for what a score is and how windows compare.

    Request options: `top_k` (the best N answers in a list, where N is over 1), `max_answer_len` (tokens), `doc_stride`
    (tokens that windows share), `handle_impossible_answer` (an empty answer may be the best), `align_to_words` (whole
    words; true unless said otherwise).
    """

    nouns = Nouns("answer", "answers")
    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        "top_k": integer(1, 100),
        "max_answer_len": integer(1, 512),
        "doc_stride": integer(0),
        "handle_impossible_answer": boolean,
        "align_to_words": boolean,
    }
    fields = ("question", "context")
    inputs_alone = True
    architecture = "AutoModelForQuestionAnswering"
    reads = "spans"

    def setup(self) -> None:
        """Learn how windows overlap."""
        self.stride = min(MOST_OVERLAP, self.settings.max_tokens // 2)

    def item(self, value: Any, param: str) -> Pair:
        """A question and a context, neither blank."""
        if isinstance(value, str) and param in self.fields:  # the body's one field
            value, param = {param: value}, ""
        found = members(value, param, self.fields)
        for name in self.fields:
            where = inside(param, name)
            if not text(found[name], where).strip():
                raise RequestError(f"{where} is blank.", code="empty_string", param=where)
        return Pair(found["question"], found["context"])

    def parse(self, request: Request) -> Request:
        """Refuse an overlap that no window has room for."""
        if request.options.get("doc_stride", 0) >= self.settings.max_tokens:
            raise RequestError(
                f"doc_stride is {request.options['doc_stride']}; the model takes {self.settings.max_tokens} tokens.",
                code="invalid_value",
                param="doc_stride",
            )
        return request

    def texts(self, request: Request) -> Sequence[Text]:
        """Each question with its context, in windows where that is too long."""
        stride = request.options.get("doc_stride", self.stride)
        return [
            Text(item, param=request.param(i), cut="only_second", stride=stride, sourced=True)
            for i, item in enumerate(request.items)
        ]

    def forward(self, encodings: Sequence[Encoding], precise: bool) -> Sequence[Tensor]:
        """Start and end logits of each window: (tokens, 2)."""
        logits, layout = self.model.logits(encodings, precise=precise)
        return [logits[start : start + length] for start, length in zip(layout.starts, layout.lengths, strict=True)]

    def render(self, request: Request, rows: Sequence[Tensor], encodings: Sequence[Encoding]) -> Sequence[Any]:
        """The best answers of each item's windows."""
        options = request.options
        limit = options.get("top_k", 1)
        results = []
        for i, own in enumerate(windows.per_text(encodings)):
            best = spans.of_context(
                [(encoding, row.numpy()) for encoding, row in zip(encodings[own], rows[own], strict=True)],
                self.model.tokens.tokenizer.cls_token_id,
                limit=limit,
                longest=options.get("max_answer_len", MOST_TOKENS),
                align_to_words=options.get("align_to_words", True),
                impossible=options.get("handle_impossible_answer", False),
            )
            if not best:
                where = request.param(i, "context")
                raise RequestError(f"{where} has no tokens for this model.", code="empty_text", param=where)
            context = request.items[i].text_pair
            answers = [
                {"answer": context[start:end], "score": score, "start": start, "end": end} for score, start, end in best
            ]
            results.append(answers if limit > 1 else answers[0])
        return results

    def sample(self) -> Any:
        """A question and a context."""
        return {"question": "Where does she live?", "context": "My sister lives in Berlin."}

    def card(self) -> dict[str, Any]:
        """What is served: the pipeline's card and the defaults of its options."""
        return {**super().card(), "doc_stride": self.stride, "max_answer_len": MOST_TOKENS}
