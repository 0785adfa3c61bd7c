"""The texts that the benchmark sends: seeded, of real words, with exact lengths in the model's own tokens.

A *length* counts every token that the model runs, the special ones too, as `max_tokens` does.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
from tokenizers import Tokenizer

from scripts.lib.subjects import QUERY, SUBJECTS, Subject

# Lengths and shares are drawn per block, so that any whole number of blocks has exactly the same mixture: two
# measurements over different counts of texts then compare like with like.
BLOCK = 100
LEAST_WORDS = 10
SHORT_RANGE = (5, 25)
MIXED_SHORT_RANGE = (5, 30)
MIXED_LONG_RANGE = (200, 256)
MIXED_LONG_SHARE = 0.1
WORKLOADS = ("short", "mixed", "lists")

# What subword tokenizers put in front of a token that starts a word.
_WORD_MARKS = ("Ġ", "▁")


@dataclass(frozen=True)
class Body:
    """One request: JSON as it is sent, and how many texts and tokens it holds."""

    data: bytes
    texts: int
    tokens: int


@dataclass(frozen=True)
class Workload:
    """A named pool of requests, and the same texts flat, in order.

    Attributes:
        name: `short`, `mixed` or `lists`.
        bodies: the requests; a load cycles through them.
        texts: every text of every request, in order.
        lengths: tokens of each text, special ones and a query's counted.
        inputs: the texts as the yardstick runs them: with the query before each, where there is one.
    """

    name: str
    bodies: tuple[Body, ...]
    texts: tuple[str, ...]
    lengths: tuple[int, ...]
    inputs: tuple[str | tuple[str, str], ...]


class Vocabulary:
    """Words of which each is exactly one token of a tokenizer wherever it stands, so that n words are n tokens.

    Args:
        tokenizer: the model's fast tokenizer; used without truncation and padding.

    Raises:
        ValueError: the tokenizer has too few whole-word tokens to write texts with.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.special_tokens = len(tokenizer.encode("").ids)
        self.words = self._whole_words()
        if len(self.words) < LEAST_WORDS:
            raise ValueError(f"only {len(self.words)} whole words in the tokenizer's vocabulary: {LEAST_WORDS} needed")

    @classmethod
    def load(cls, model_directory: Path) -> "Vocabulary":
        """Read `tokenizer.json` of a model directory."""
        return cls(Tokenizer.from_file(str(model_directory / "tokenizer.json")))

    def _whole_words(self) -> tuple[str, ...]:
        candidates = set()
        for token in self._tokenizer.get_vocab():
            word = token.removeprefix(_WORD_MARKS[0]).removeprefix(_WORD_MARKS[1])
            if len(word) >= 3 and word.isascii() and word.isalpha() and word.islower():
                candidates.add(word)
        ordered = sorted(candidates)
        # Tried as the first word and as a later one: byte-level vocabularies tell the two apart.
        pairs = self._tokenizer.encode_batch([f"{word} {word}" for word in ordered], add_special_tokens=False)
        return tuple(word for word, pair in zip(ordered, pairs, strict=True) if len(pair.ids) == 2)

    def length(self, text: str) -> int:
        """Tokens of a text, special ones counted."""
        return len(self._tokenizer.encode(text).ids)

    def beside(self, query: str) -> int:
        """Tokens that a query adds to a text that is read together with it."""
        return len(self._tokenizer.encode(query, "").ids) - self.special_tokens

    def text(self, tokens: int, rng: random.Random) -> str:
        """Make a text of exactly `tokens` tokens, special ones counted.

        Raises:
            ValueError: `tokens` leaves no room for a word.
        """
        words = tokens - self.special_tokens
        if words < 1:
            raise ValueError(
                f"a text of {tokens} tokens has no room for a word beside {self.special_tokens} special ones"
            )
        return " ".join(rng.choices(self.words, k=words))


def short_lengths(count: int, rng: random.Random) -> list[int]:
    """Lengths in tokens of `count` short texts, uniform over 5–25."""
    return [rng.randint(*SHORT_RANGE) for _ in range(count)]


def mixed_lengths(count: int, rng: random.Random) -> list[int]:
    """Lengths in tokens of `count` mixed texts: per block of 100, 90 of 5–30 and 10 of 200–256, shuffled."""
    lengths: list[int] = []
    while len(lengths) < count:
        size = min(BLOCK, count - len(lengths))
        long = round(size * MIXED_LONG_SHARE)
        block = [rng.randint(*MIXED_LONG_RANGE) for _ in range(long)]
        block += [rng.randint(*MIXED_SHORT_RANGE) for _ in range(size - long)]
        rng.shuffle(block)
        lengths += block
    return lengths


def make_workload(
    name: str, vocabulary: Vocabulary, requests: int, seed: int = 0, subject: Subject = SUBJECTS["embedding"]
) -> Workload:
    """Make a pool of `requests` requests of a named workload; the same arguments give the same bytes.

    Args:
        name: of WORKLOADS.
        vocabulary: words of the model's own.
        requests: how many.
        seed: another one, other texts of the same mixture.
        subject: the task; where it has a query, each text is as much shorter.

    Raises:
        ValueError: an unknown name, or no requests.
    """
    if name not in WORKLOADS:
        raise ValueError(f"no workload {name!r}; there are {', '.join(WORKLOADS)}")
    if requests < 1:
        raise ValueError("a workload needs at least one request")
    rng = random.Random(f"{name}:{seed}")
    per_request = subject.list_items if name == "lists" else 1
    count = requests * per_request
    lengths = short_lengths(count, rng) if name == "short" else mixed_lengths(count, rng)
    beside = vocabulary.beside(QUERY) if subject.query else 0
    texts = [vocabulary.text(max(length - beside, vocabulary.special_tokens + 1), rng) for length in lengths]
    run = [max(length, beside + vocabulary.special_tokens + 1) for length in lengths] if beside else lengths
    bodies = [
        _body(subject, texts[start : start + per_request], sum(run[start : start + per_request]), name == "lists")
        for start in range(0, count, per_request)
    ]
    inputs = tuple((QUERY, text) for text in texts) if subject.query else tuple(texts)
    return Workload(name, tuple(bodies), tuple(texts), tuple(run), inputs)


def _body(subject: Subject, texts: Sequence[str], tokens: int, listed: bool) -> Body:
    return Body(orjson.dumps(subject.many(texts) if listed else subject.one(texts[0])), len(texts), tokens)
