"""A model's scores of tokens → entities, grouped as transformers' token-classification pipeline groups them."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from handlers.tokens import Encoding

#: How tokens become entities: each its own; neighbours of one tag; likewise, with one label for all tokens of a word.
STRATEGIES = ("none", "simple", "first", "average", "max")

Scores = npt.NDArray[np.float32]


@dataclass(frozen=True)
class _Tokens:
    """Consecutive tokens of a text, without the special ones.

    Args:
        ids: of the vocabulary.
        offsets: (start, end) of each in the text, in characters.
        scores: (tokens, labels), each row a distribution.
        index: place of the first one among all tokens of the text, special ones counted.
    """

    ids: list[int]
    offsets: list[tuple[int, int]]
    scores: Scores
    index: int

    def between(self, start: int, end: int) -> "_Tokens":
        """Those at the places from `start` to `end`."""
        own = slice(start - self.index, end - self.index)
        return _Tokens(self.ids[own], self.offsets[own], self.scores[own], start)


@dataclass(frozen=True)
class _Tagged:
    """A token, or a word of several, with its label."""

    label: str
    score: np.float32
    start: int
    end: int
    tokens: list[str]


class Entities:
    """Finds the entities of texts.

    Args:
        tokenizer: transformers' tokenizer of the model.
        labels: the model's labels, by index.
    """

    def __init__(self, tokenizer: Any, labels: Sequence[str]) -> None:
        self._labels = labels
        self._token = tokenizer.convert_ids_to_tokens
        self._spelt = tokenizer.convert_tokens_to_string
        self._unknown = tokenizer.unk_token_id
        self._marks_subwords = bool(getattr(tokenizer.backend_tokenizer.model, "continuing_subword_prefix", None))

    def of(
        self,
        text: str,
        windows: Sequence[Encoding],
        logits: Sequence[Tensor],
        *,
        strategy: str = "none",
        ignored: Collection[str] = ("O",),
    ) -> list[dict[str, Any]]:
        """The entities of a text, in its order.

        Args:
            text: as sent.
            windows: its encodings with their sources: one, or several that overlap.
            logits: (tokens, labels) of each.
            strategy: one of STRATEGIES.
            ignored: labels, of groups those without B- and I-, that are left out.

        Returns:
            As the pipeline: `entity`, `index` of tokens, `entity_group` of groups; `score`, `word`, and `start` and
            `end` in characters of the text. Of a long text: tokens once, each from the window in which it is furthest
            from a cut; groups that overlap are one, the longest or else the one with the best score, as with the
            pipeline's `stride`.
        """
        pieces = [_own(encoding, rows) for encoding, rows in zip(windows, logits, strict=True)]
        if strategy == "none":
            return [entity for piece in _once(pieces) for entity in self._tokens(text, piece, ignored)]
        found = []
        for piece in pieces:
            tagged = self._simple(text, piece) if strategy == "simple" else self._by_word(text, piece, strategy)
            found += self._groups(list(tagged), ignored, by_word=strategy != "simple")
        return _longest(found) if len(pieces) > 1 else found

    def _tokens(self, text: str, tokens: _Tokens, ignored: Collection[str]) -> Iterator[dict[str, Any]]:
        """What the strategy none returns."""
        for at, tagged in enumerate(self._simple(text, tokens)):
            if tagged.label not in ignored:
                yield {
                    "entity": tagged.label,
                    "score": float(tagged.score),
                    "index": tokens.index + at,
                    "word": tagged.tokens[0],
                    "start": tagged.start,
                    "end": tagged.end,
                }

    def _simple(self, text: str, tokens: _Tokens) -> Iterator[_Tagged]:
        """Each token with its best label."""
        best = tokens.scores.argmax(-1)
        scores = tokens.scores[np.arange(len(best)), best]
        for token, (start, end), label, score in zip(tokens.ids, tokens.offsets, best.tolist(), scores, strict=True):
            yield _Tagged(self._labels[label], score, start, end, [self._word(text, token, start, end)])

    def _word(self, text: str, token: int, start: int, end: int) -> str:
        """What the token is called; an unknown one as it stands in the text."""
        return text[start:end] if token == self._unknown else str(self._token(token))

    def _by_word(self, text: str, tokens: _Tokens, strategy: str) -> Iterator[_Tagged]:
        """Each word with the label that its tokens get together."""
        words = [self._word(text, token, *span) for token, span in zip(tokens.ids, tokens.offsets, strict=True)]
        begins = [
            at for at in range(len(words)) if not (at and self._is_subword(text, tokens.ids[at], tokens.offsets[at]))
        ]
        for begin, end in pairwise([*begins, len(words)]):
            scores = _together(tokens.scores[begin:end], strategy)
            best = int(scores.argmax())
            first, last = tokens.offsets[begin], tokens.offsets[end - 1]
            yield _Tagged(self._labels[best], scores[best], first[0], last[1], words[begin:end])

    def _is_subword(self, text: str, token: int, span: tuple[int, int]) -> bool:
        """Whether a token goes on with the word before it: by its marks where the vocabulary has them, else by spaces.

        It is the pipeline's rule: a marked token is longer than what it stands for.
        """
        start, end = span
        if token == self._unknown:
            return False
        if self._marks_subwords:
            return len(self._token(token)) != len(text[start:end])
        return start > 0 and " " not in text[start - 1 : start + 1]

    def _groups(self, tagged: list[_Tagged], ignored: Collection[str], *, by_word: bool) -> list[dict[str, Any]]:
        """Neighbours of one tag together; B- begins a new group."""
        begins = [
            at
            for at, piece in enumerate(tagged)
            if not at or piece.label.startswith("B-") or _tag(piece.label) != _tag(tagged[at - 1].label)
        ]
        groups = []
        for begin, end in pairwise([*begins, len(tagged)]):
            group = tagged[begin:end]
            name = group[0].label.split("-", 1)[-1]
            if name in ignored:
                continue
            words = [self._spelt(piece.tokens) if by_word else piece.tokens[0] for piece in group]
            groups.append(
                {
                    "entity_group": name,
                    "score": float(np.mean([piece.score for piece in group])),
                    "word": self._spelt(words),
                    "start": group[0].start,
                    "end": group[-1].end,
                }
            )
        return groups


def _own(encoding: Encoding, logits: Tensor) -> _Tokens:
    """The tokens of an encoding that are the text's own, with the softmax of their logits."""
    assert encoding.source is not None
    places = [at for at, sequence in enumerate(encoding.source.sequences) if sequence is not None]
    exponents = np.exp(logits.numpy()[places] - logits.numpy()[places].max(-1, keepdims=True))
    return _Tokens(
        [encoding.ids[at] for at in places],
        [encoding.source.offsets[at] for at in places],
        exponents / exponents.sum(-1, keepdims=True),
        encoding.start + (places[0] if places else 0),
    )


def _once(pieces: Sequence[_Tokens]) -> list[_Tokens]:
    """Windows without their overlaps: each half of an overlap goes to the window that reaches further around it."""
    cuts = [(after.index + before.index + len(before.ids) + 1) // 2 for before, after in pairwise(pieces)]
    bounds = [pieces[0].index, *cuts, pieces[-1].index + len(pieces[-1].ids)]
    return [piece.between(*span) for piece, span in zip(pieces, pairwise(bounds), strict=True)]


def _together(scores: Scores, strategy: str) -> Scores:
    """The scores of a word, (labels,), from those of its tokens."""
    if strategy == "first":
        one: Scores = scores[0]
    elif strategy == "max":
        one = scores[scores.max(-1).argmax()]
    else:
        one = scores.mean(0)
    return one


def _tag(label: str) -> str:
    return label[2:] if label.startswith(("B-", "I-")) else label


def _longest(entities: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups of several windows, of those that overlap the longest or best, as the pipeline chooses."""
    kept: list[dict[str, Any]] = []
    for entity in sorted(entities, key=lambda entity: int(entity["start"])):
        previous = kept[-1] if kept else entity
        if not kept or not previous["start"] <= entity["start"] < previous["end"]:
            kept.append(entity)
        elif _rank(entity) > _rank(previous):
            kept[-1] = entity
    return kept


def _rank(entity: dict[str, Any]) -> tuple[int, float]:
    return entity["end"] - entity["start"], entity["score"]
