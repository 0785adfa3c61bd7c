"""Fill-mask: the words that a masked language model would put in the place of a text's mask."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import Tensor

from handlers.base import TransformerHandler
from handlers.errors import RequestError, TooLarge
from handlers.masks import Masks, best_words
from handlers.options import boolean, positive_integer, strings
from handlers.request import Nouns, Request
from handlers.tokens import Encoding, Text

MASKS_AT_ONCE = 128  # whose scores of the whole vocabulary are in memory: 128 MB of 250,000 words
CANDIDATE_BYTES = 53  # {"score":0.5,"token":7,"token_str":"","sequence":""}, and its comma
# Of one candidate and of one token of its text, to decode them
CANDIDATE_SECONDS, TOKEN_SECONDS = 3e-5, 1.5e-6

logger = logging.getLogger(__name__)


class FillMaskHandler(TransformerHandler):
    """The likeliest words for a text's mask, as transformers' fill-mask pipeline gives them; a list for each of many.

    Request options: `top_k` (5 unless given), `targets` (only these words; of one that is not in the vocabulary its
    first token), `truncate` (what is too long is cut, but never a mask with it).
    """

    nouns = Nouns("predictions", "predictions")
    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        "top_k": positive_integer,
        "targets": strings,
        "truncate": boolean,
    }
    inputs_alone = True
    architecture = "AutoModelForMaskedLM"

    def setup(self) -> None:
        """Learn the vocabulary, and whether the head may run on masked tokens alone."""
        probe = [Encoding([0, 0, 0], [0, 0, 0])]
        whole = self.model.logits(probe)[0]
        self.vocabulary = whole.shape[-1]
        self.masks = Masks(self.model.tokens.tokenizer, self.vocabulary)
        self.alone = self._runs_alone(self.model.hidden(probe)[0][1:2], whole[1:2])
        if not self.alone:
            logger.warning("This model's head does not run on single tokens: it runs on all of a text's")

    def _runs_alone(self, states: Tensor, expected: Tensor) -> bool:
        try:
            found = self.model.head(states)
        except Exception:  # noqa: BLE001 - whatever such a head does not like, the whole model still works
            return False
        return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-2, atol=1e-2)

    def parse(self, request: Request) -> Request:
        """Check the masks and `top_k`; find the targets' tokens."""
        for i, text in enumerate(request.items):
            self.masks.check(text, request.param(i))
        options = request.options
        if options.get("top_k", 1) > self.vocabulary:
            raise RequestError(
                f"top_k is {options['top_k']}; the vocabulary has {self.vocabulary} words.",
                code="invalid_value",
                param="top_k",
            )
        targets = options.get("targets")
        if targets is None:
            return request
        if len(targets) > self.settings.max_items:
            raise TooLarge(
                f"There are {len(targets)} targets; at most {self.settings.max_items} fit in one request.",
                code="too_many_items",
                param="targets",
            )
        return replace(request, options={**options, "targets": self.masks.targets(targets)})

    def _wanted(self, request: Request) -> tuple[int, tuple[int, ...] | None]:
        """How many words for each mask, and of which."""
        targets = request.options.get("targets")
        return min(request.options.get("top_k", 5), len(targets) if targets else self.vocabulary), targets

    def texts(self, request: Request) -> Sequence[Text]:
        """Each item; what is wanted goes along, since nothing else of its scores is kept."""
        truncate, wanted = request.options.get("truncate", True), self._wanted(request)
        return [
            Text(item, truncate=truncate, param=request.param(i), options=wanted)
            for i, item in enumerate(request.items)
        ]

    def forward(self, encodings: Sequence[Encoding], precise: bool) -> Sequence[Tensor]:
        """The best words for each mask of each text, (masks, words, 2): see `best_words`."""
        masked = [(i, at) for i, encoding in enumerate(encodings) for at in self.masks.places(encoding)]
        found: list[list[Tensor]] = [[torch.zeros(0, encoding.options[0], 2)] for encoding in encodings]
        run = self.model.hidden if self.alone else self.model.logits
        states, layout = run(encodings, precise=precise)
        for begin in range(0, len(masked), MASKS_AT_ONCE):
            chunk = masked[begin : begin + MASKS_AT_ONCE]
            picked = states[[layout.starts[i] + at for i, at in chunk]]
            logits = self.model.head(picked) if self.alone else picked
            for i, places in groupby(enumerate(chunk), key=lambda numbered: numbered[1][0]):
                own = [row for row, _ in places]
                found[i].append(best_words(logits[own], *encodings[i].options).cpu())
        return [torch.cat(parts) for parts in found]

    def render(self, request: Request, rows: Sequence[Tensor], encodings: Sequence[Encoding]) -> Sequence[Any]:
        """The words for each text's mask, or a list for each of its masks."""
        results = []
        room = self.settings.max_response_bytes
        for i, (text, row, encoding) in enumerate(zip(request.items, rows, encodings, strict=True)):
            if self.masks.lost(text, encoding):
                raise RequestError(
                    f"{request.param(i)} has a mask behind the {self.settings.max_tokens} tokens that are read.",
                    code="too_long",
                    param=request.param(i),
                )
            places = self.masks.places(encoding)
            filled: list[list[dict[str, Any]]] = []
            for at, best in zip(places, row, strict=True):
                filled.append(list(self.masks.filled(encoding, at, best, alone=len(places) == 1)))
                room -= sum(len(candidate["sequence"]) for candidate in filled[-1])
                if room < 0:  # before yet more is decoded
                    raise TooLarge(
                        "The answer is larger than TorchServe can send; lower top_k.", code="answer_too_large"
                    )
            results.append(filled[0] if len(filled) == 1 else filled)
        return results

    def seconds(self, encodings: Sequence[Encoding]) -> float:
        """Predicted time of running these encodings and of decoding the texts that their words make."""
        decoding: float = sum(
            len(self.masks.places(encoding)) * encoding.options[0] * (CANDIDATE_SECONDS + TOKEN_SECONDS * len(encoding))
            for encoding in encodings
        )
        return super().seconds(encodings) + decoding

    def item_bytes(self, request: Request) -> int:
        """What an item takes at least, on average; one whose texts are long may turn out too large later."""
        masks: int = sum(text.count(self.masks.token) for text in request.items)
        return CANDIDATE_BYTES * self._wanted(request)[0] * masks // len(request.items)

    def sample(self) -> Any:
        """A mask behind a word."""
        return {"text": f"hello {self.masks.token}"}

    def card(self) -> dict[str, Any]:
        """What is served: the pipeline's card, the mask and the size of the vocabulary."""
        return {**super().card(), "mask_token": self.masks.token, "vocabulary": self.vocabulary}
