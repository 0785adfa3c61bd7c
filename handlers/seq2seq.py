"""Text to text with an encoder-decoder: translation, summarisation and what else T5, BART and others are made for."""

import itertools
import secrets
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from handlers.base import TransformerHandler
from handlers.batching import Limits
from handlers.decoding_options import OPTIONS, Decoding, chosen
from handlers.errors import RequestError, nearest, shown
from handlers.generator import Generator
from handlers.options import boolean, string
from handlers.request import Nouns, Request
from handlers.runner import Tally
from handlers.serialise import dumps
from handlers.tokens import Encoding, Text

# Start of a task's name → what transformers' pipeline for it calls a text
KEYS = {"summarization": "summary_text", "translation": "translation_text", "text2text-generation": "generated_text"}


class Seq2SeqHandler(TransformerHandler):
    """One written text per text, as the model's `generate` gives it for that text alone.

    Request options: those of `decoding_options.OPTIONS`; `task` (summarization, translation, text2text-generation, or
    one of the model's `task_specific_params`, whose prefix and settings then hold), `prefix` (text put before the
    input), `truncate` (bool).
    """

    nouns = Nouns("text", "texts")
    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        **OPTIONS,
        "task": string,
        "prefix": string,
        "truncate": boolean,
    }
    architecture = "AutoModelForSeq2SeqLM"

    def setup(self) -> None:
        """Learn what the model does by itself, and what its tasks set."""
        self.generator = Generator(self.model, self.settings.max_new_tokens)
        self.tasks: dict[str, dict[str, Any]] = dict(getattr(self.model.net.config, "task_specific_params", None) or {})
        backend = self.model.tokens.tokenizer.backend_tokenizer
        pieces = backend.decode_batch([[i] for i in range(self.model.tokens.vocabulary)], skip_special_tokens=False)
        self.piece_bytes = max(len(dumps(piece)) for piece in pieces) - 1  # without its quotes, with a space
        self._numbers = itertools.count()

    def fit(self) -> None:
        """Warm up and time the encoder, then the decoder."""
        super().fit()
        self.generator.fit()

    def parse(self, request: Request) -> Request:
        """Check the options together and against the model."""
        name = request.options.get("task")
        known = sorted({*self.tasks, *KEYS})
        if name is not None and name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near!r}?" if near else f"it has {', '.join(known)}."
            raise RequestError(f"The model has no task {shown(name)}; {hint}", code="invalid_value", param="task")
        self._decoding(request)
        return request

    def prompt(self, request: Request) -> str:
        """The request's own prefix, or its task's."""
        specific = self.tasks.get(request.options.get("task", ""), {})
        return str(request.options.get("prefix", specific.get("prefix", "")))

    def texts(self, request: Request) -> Sequence[Text]:
        """The items; what is drawn at random is written alone, so that only its seed decides."""
        decoding = self._decoding(request)
        return [replace(text, key=self._key(decoding)) for text in super().texts(request)]

    def limits(self, key: Hashable) -> Limits:
        """What may be written together: beams and new tokens take room, too."""
        assert isinstance(key, Decoding)
        return self.generator.limits(key)

    def seconds(self, encodings: Sequence[Encoding]) -> float:
        """Predicted time of encoding and decoding, in seconds."""
        return self.generator.seconds(encodings)

    def learn(self, tally: Tally, seconds: float) -> None:
        """Correct the costs of both by what a batch has just taken."""
        self.generator.learn(tally.tokens, tally.micro_batches, seconds)

    def forward(self, encodings: Sequence[Encoding], precise: bool) -> Sequence[Tensor | RequestError]:
        """Write: the new tokens' ids per text."""
        return self.generator.write(encodings, precise, self.deadline)

    def render(self, request: Request, rows: Sequence[Tensor], encodings: Sequence[Encoding]) -> Sequence[Any]:
        """Ids → texts, as the tokenizer's own `decode` cleans them up."""
        tokenizer = self.model.tokens.tokenizer
        return [tokenizer.decode(row.tolist(), skip_special_tokens=True) for row in rows]

    def pipeline_value(self, request: Request, value: Any) -> Any:
        """The text under the name that the task's pipeline gives it."""
        sole = next(iter(self.tasks)) if len(self.tasks) == 1 else ""
        name = request.options.get("task", sole)
        return {next((key for start, key in KEYS.items() if name.startswith(start)), "generated_text"): value}

    def item_bytes(self, request: Request) -> int:
        """As many tokens as are asked for, each the longest of the vocabulary."""
        return self._decoding(request).max_length * self.piece_bytes + 32

    def card(self) -> dict[str, Any]:
        """What is served: the pipeline's card, and how the model writes."""
        decoding = self.generator.defaults({})
        limits = self.limits(decoding)
        return {
            **super().card(),
            "micro_batch_tokens": limits.max_tokens,
            "micro_batch_items": limits.max_items,
            "max_new_tokens": self.generator.limit,
            "generation": {name: value for name, value in decoding.settings().items() if value is not None},
            "tasks": {name: specific.get("prefix", "") for name, specific in self.tasks.items()},
            "step_cost_tokens": round(self.generator.pace.step, 2),
            "row_cost_tokens": round(self.generator.pace.row, 2),
        }

    def _decoding(self, request: Request) -> Decoding:
        specific = self.tasks.get(request.options.get("task", ""), {})
        return chosen(request.options, self.generator.defaults(specific), self.generator.limit)

    def _key(self, decoding: Decoding) -> Decoding:
        if not (decoding.do_sample or self.generator.apart):
            return decoding
        seed = secrets.randbelow(1 << 63) if decoding.do_sample and decoding.seed is None else decoding.seed
        return replace(decoding, seed=seed, apart=next(self._numbers))
