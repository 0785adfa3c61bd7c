"""Texts → encodings, and encodings → packed or padded tensors."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from tokenizers import normalizers
from torch import Tensor

from handlers.errors import RequestError
from handlers.request import Pair

CHUNK_CHARACTERS = 300_000  # tokenised in one call
MOST_WINDOWS = 8  # that share a token: else the little room beside a long text makes windows without end


class Source(NamedTuple):
    """Where an encoding's tokens come from.

    Args:
        offsets: (start, end) of each token in its text, in characters.
        sequences: 0 or 1 for a token of the first or second text, None for a special token.
        words: which word of its text each token is in, None for a special token.
    """

    offsets: list[tuple[int, int]]
    sequences: list[int | None]
    words: list[int | None]

    def without(self, gaps: list[tuple[int, int]]) -> "Source":
        """The source of the tokens outside these stretches."""
        return Source(_without(self.offsets, gaps), _without(self.sequences, gaps), _without(self.words, gaps))


@dataclass(frozen=True)
class Encoding:
    """One tokenised text or pair, or one window of a long one.

    Args:
        ids: token ids, special tokens included.
        type_ids: segment of each token.
        cut: tokens lost to truncation.
        skip: leading tokens that pooling leaves out.
        key: encodings with different keys never share a forward pass.
        window: which window of its text this is, from 0.
        source: where its tokens come from, for tasks that ask.
        start: tokens of the windowed text before this window.
        options: what the request asks of it, for forward passes that have to know.
    """

    ids: list[int]
    type_ids: list[int]
    cut: int = 0
    skip: int = 0
    key: Hashable = None
    window: int = 0
    source: Source | None = None
    start: int = 0
    options: Any = None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Text:
    """What to tokenise for one input of the model, and how.

    Args:
        item: a text, the ids of one, or two texts.
        prompt: text put before it; ignored for token ids.
        truncate: whether to cut what is too long; else it is an error.
        param: what errors call it.
        key: passed on to its encodings.
        cut: which text of a pair loses tokens: the longer one, or only the first or second.
        stride: instead of cutting, windows that overlap by this many tokens; of a pair, over the text named by `cut`.
            They overlap by less where each would bring less than 1 / MOST_WINDOWS of the model's length.
        sourced: whether its encodings tell where their tokens come from.
        options: passed on to its encodings, which share a forward pass all the same.
    """

    item: str | tuple[int, ...] | Pair
    prompt: str = ""
    truncate: bool = True
    param: str = "text"
    key: Hashable = None
    cut: Literal["longest_first", "only_first", "only_second"] = "longest_first"
    stride: int | None = None
    sourced: bool = False
    options: Any = None

    def __len__(self) -> int:
        """Characters to tokenise, or token ids."""
        if isinstance(self.item, Pair):
            return len(self.prompt) + len(self.item.text) + len(self.item.text_pair)
        return len(self.item) + (len(self.prompt) if isinstance(self.item, str) else 0)

    def spelt(self) -> str | tuple[str, str] | None:
        """What the tokenizer gets; None for token ids."""
        if isinstance(self.item, Pair):
            return self.prompt + self.item.text, self.item.text_pair
        return self.prompt + self.item if isinstance(self.item, str) else None


def _without(values: list[Any], gaps: list[tuple[int, int]]) -> list[Any]:
    """`values` but for these stretches, which are in order."""
    kept: list[Any] = []
    at = 0
    for start, end in gaps:
        kept += values[at:start]
        at = max(at, end)
    return kept + values[at:]


def _longest_first(sizes: list[int], room: int) -> list[int]:
    """Tokens that each text of a pair keeps: the longer one loses until both are equal."""
    low, high = min(sizes), max(sizes)
    high = low if low > room else max(low, room - low)
    if low + high > room:
        low = room // 2
        high = low + room % 2
    return [low, high] if sizes[0] <= sizes[1] else [high, low]


def _chunks(texts: Sequence[Text]) -> Iterator[list[Text]]:
    """Texts in order, about CHUNK_CHARACTERS at a time: an encoding takes 600 bytes a token until it is cut."""
    chunk: list[Text] = []
    characters = 0
    for text in texts:
        chunk.append(text)
        characters += len(text)
        if characters > CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


class Tokens:
    """A fast tokenizer of transformers with the model's own limits.

    Args:
        tokenizer: a `PreTrainedTokenizerFast`.
        max_tokens: longest encoding in tokens, special tokens counted.
        lower_case: lower-case before the tokenizer's own normaliser, as sentence-transformers' `do_lower_case`.
        include_prompt: whether pooling counts a prompt's tokens.
        rows: rows of the model's embedding table, where a tokenizer may know more ids than the model has.

    Attributes:
        tokenizer: the tokenizer, for what tokens are called; encoding with it would set its truncation anew.
        room: tokens of a single text that fit beside the special ones.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_tokens: int,
        *,
        lower_case: bool = False,
        include_prompt: bool = True,
        rows: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.include_prompt = include_prompt
        self.pad_id = tokenizer.pad_token_id or 0
        self.vocabulary = min(len(tokenizer), rows or len(tokenizer))
        self._typed = "token_type_ids" in tokenizer.model_input_names  # else the model sees one segment
        self._unembedded = len(tokenizer) > self.vocabulary
        self.special = set(tokenizer.all_special_ids)
        self._left = tokenizer.truncation_side == "left"
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        if lower_case:
            own = self._backend.normalizer
            self._backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *([own] if own else [])])
        probe = self._backend.encode("a")
        mask = probe.special_tokens_mask
        before = mask.index(0) if 0 in mask else len(mask)
        after = mask[::-1].index(0) if 0 in mask else 0
        self._prefix = probe.ids[:before]
        self._suffix = probe.ids[len(mask) - after :] if after else []
        self._types = (probe.type_ids[:before] or [0], probe.type_ids[before:-after] if after else [0])
        self._prompts: dict[str, int] = {}
        if max_tokens <= before + after:
            raise ValueError(f"max_tokens is {max_tokens}; the special tokens alone are {before + after}")
        self.room = max_tokens - before - after

    def encode(self, texts: Sequence[Text]) -> list[list[Encoding] | RequestError]:
        """Tokenise; cut or take apart what is too long. Per text, in order: its encodings (one but for windows)."""
        slots: list[list[Encoding] | RequestError] = []
        for chunk in _chunks(texts):
            spelt = [(text, text.spelt()) for text in chunk]
            found = iter(self._backend.encode_batch([words for _, words in spelt if words is not None]))
            for text, words in spelt:
                if words is not None:
                    encoding = next(found)
                    types = encoding.type_ids if self._typed else [0] * len(encoding.ids)
                    slots.append(self._fitted(encoding.ids, types, text, encoding))
                elif isinstance(text.item, tuple):
                    wrapped = self._wrapped(text.item)
                    slots.append(wrapped if isinstance(wrapped, RequestError) else self._fitted(*wrapped, text, None))
        return slots

    def _wrapped(self, ids: tuple[int, ...]) -> tuple[list[int], list[int]] | RequestError:
        """Token ids with the model's special tokens around them, unless they are there already."""
        for i, token in enumerate(ids):
            if not 0 <= token < self.vocabulary:
                return RequestError(
                    f"token {i} is {token if abs(token) < 1 << 62 else 'huge'}; "
                    f"the model's ids go from 0 to {self.vocabulary - 1}.",
                    code="invalid_token",
                )
        inner = list(ids)
        before, after = self._prefix, self._suffix
        there = inner[: len(before)] == before and (not after or inner[-len(after) :] == after)
        if not (there and len(inner) >= len(before) + len(after)):
            inner = [*before, *inner, *after]
        return inner, [0] * len(inner)

    def _fitted(self, ids: list[int], type_ids: list[int], text: Text, encoding: Any) -> list[Encoding] | RequestError:
        if not ids:
            return RequestError("the text has no tokens for this model.", code="empty_text")
        if self._unembedded and max(ids) >= self.vocabulary:
            return RequestError("the text has a token that the model has no embedding for.", code="invalid_token")
        source = Source(encoding.offsets, encoding.sequence_ids, encoding.word_ids) if text.sourced else None
        skip = 0 if self.include_prompt or not text.prompt else self._prompt_tokens(text.prompt)
        cut = max(0, len(ids) - self.max_tokens)
        if not cut:
            return [Encoding(ids, type_ids, 0, min(skip, len(ids) - 1), text.key, 0, source, 0, text.options)]
        if text.stride is None and not text.truncate:
            return RequestError(
                f"{len(ids)} tokens are over the model's limit of {self.max_tokens}, and truncate is false.",
                code="too_long",
            )
        spans = self._spans(len(ids), text, encoding)
        pieces = self._windows(spans, text) if text.stride is not None else self._cuts(spans, cut, text)
        if isinstance(pieces, RequestError):
            return pieces
        lost = 0 if text.stride is not None else cut
        return [
            Encoding(
                _without(ids, gaps),
                _without(type_ids, gaps),
                lost,
                min(skip, self.max_tokens - 1),
                text.key,
                window,
                source.without(gaps) if source else None,
                gaps[0][1] - gaps[0][0] if text.stride is not None else 0,
                text.options,
            )
            for window, gaps in enumerate(pieces)
        ]

    def _spans(self, length: int, text: Text, encoding: Any) -> list[tuple[int, int]]:
        """Where the tokens of the text, or of both of a pair, lie among the special ones."""
        if not isinstance(text.item, Pair):
            return [(len(self._prefix), length - len(self._suffix))]
        sequences = encoding.sequence_ids
        spans = []
        for which in (0, 1):
            places = [i for i, sequence in enumerate(sequences) if sequence == which]
            spans.append((places[0], places[-1] + 1) if places else (0, 0))
        return spans

    def _cuts(self, spans: list[tuple[int, int]], cut: int, text: Text) -> list[list[tuple[int, int]]] | RequestError:
        """The stretches to leave out, as the tokenizers library's truncation strategies choose them."""
        sizes = [end - start for start, end in spans]
        if len(sizes) == 1:
            kept = [sizes[0] - cut]
        elif text.cut == "longest_first":
            kept = _longest_first(sizes, sum(sizes) - cut)
        else:
            losing = 0 if text.cut == "only_first" else 1
            kept = [size - cut if i == losing else size for i, size in enumerate(sizes)]
        if min(kept) < 0 or (text.cut != "longest_first" and len(kept) == 2 and min(kept) == 0):
            return self._no_room()
        if self._left:
            return [[(start, end - size) for (start, end), size in zip(spans, kept, strict=True)]]
        return [[(start + size, end) for (start, end), size in zip(spans, kept, strict=True)]]

    def _windows(self, spans: list[tuple[int, int]], text: Text) -> list[list[tuple[int, int]]] | RequestError:
        """The stretches to leave out for each window, the windows being those of the tokenizers library."""
        start, end = spans[-1] if text.cut == "only_second" else spans[0]
        rest = (sum(b - a for a, b in spans) - (end - start)) + self._special_tokens(len(spans))
        width = self.max_tokens - rest
        step = max(width - (text.stride or 0), -(-self.max_tokens // MOST_WINDOWS))
        if step > width:
            return self._no_room()
        last = max(0, -(-(end - start - width) // step))
        spans = [(at, min(at + width, end)) for at in range(start, start + step * last + 1, step)]
        if self._left:  # the tokenizer then counts windows from the end; the text's order is kept here
            spans = [(max(start, at - width), at) for at in range(end - step * last, end + 1, step)]
        return [[(start, first), (after, end)] for first, after in spans]

    def _no_room(self) -> RequestError:
        return RequestError(
            f"the tokens of its other text alone leave no room within the model's limit of {self.max_tokens}.",
            code="too_long",
        )

    def _special_tokens(self, texts: int) -> int:
        return int(self._backend.num_special_tokens_to_add(texts == 2))

    def _prompt_tokens(self, prompt: str) -> int:
        """Tokens of a prompt alone, as sentence-transformers counts them: less one special token at the end."""
        if prompt not in self._prompts:
            ids = self._backend.encode(prompt).ids
            if len(self._prompts) >= 1024:  # prompts come from clients
                self._prompts.clear()
            self._prompts[prompt] = len(ids) - (1 if ids and ids[-1] in self.special else 0)
        return self._prompts[prompt]


@dataclass(frozen=True)
class Layout:
    """Where each text's tokens lie in a tensor of shape (tokens, …).

    Args:
        starts: first token of each text.
        lengths: tokens of each text.
        skips: leading tokens that pooling leaves out.
        packed: whether the texts follow each other without padding.
    """

    starts: list[int]
    lengths: list[int]
    skips: list[int]
    packed: bool


def _positions(ids: list[int], padding: int | None) -> Iterable[int]:
    """Positions within a text: from 0, or by RoBERTa's rule where `padding` is its padding id.

    That rule counts from the padding id + 1 and leaves out padding tokens, also one that the text itself spells out.
    """
    if padding is None:
        return range(len(ids))
    if padding not in ids:
        return range(padding + 1, padding + 1 + len(ids))
    counts = accumulate(token != padding for token in ids)
    return [padding if token == padding else padding + count for token, count in zip(ids, counts, strict=True)]


def collate(
    encodings: Sequence[Encoding],
    pad_id: int,
    *,
    packed: bool,
    multiple_of: int = 1,
    positions_skip: int | None = None,
) -> tuple[dict[str, Tensor], Layout]:
    """Encodings → what a transformers model takes, on the CPU.

    Args:
        encodings: texts in the order they run.
        pad_id: what padding is filled with.
        packed: one row without padding, or one row a text.
        multiple_of: padded lengths are rounded up to a multiple of this.
        positions_skip: packed: the padding id of a model that numbers positions by RoBERTa's rule.

    Returns:
        Padded: `input_ids`, `attention_mask`, `token_type_ids` of shape (texts, longest). Packed: `input_ids`,
        `position_ids` (anew in each text), `token_type_ids` of shape (1, tokens). And where each text lies.
    """
    lengths = [len(encoding) for encoding in encodings]
    skips = [encoding.skip for encoding in encodings]
    if packed:
        starts = [0]
        for length in lengths[:-1]:
            starts.append(starts[-1] + length)
        tensors = {
            "input_ids": [token for encoding in encodings for token in encoding.ids],
            "position_ids": [p for encoding in encodings for p in _positions(encoding.ids, positions_skip)],
            "token_type_ids": [kind for encoding in encodings for kind in encoding.type_ids],
        }
        return {k: torch.tensor([v]) for k, v in tensors.items()}, Layout(starts, lengths, skips, packed=True)
    width = -(-max(lengths) // multiple_of) * multiple_of
    padded = {
        "input_ids": [e.ids + [pad_id] * (width - len(e)) for e in encodings],
        "attention_mask": [[1] * len(e) + [0] * (width - len(e)) for e in encodings],
        "token_type_ids": [e.type_ids + [0] * (width - len(e)) for e in encodings],
    }
    starts = [i * width for i in range(len(encodings))]
    return {k: torch.tensor(v) for k, v in padded.items()}, Layout(starts, lengths, skips, packed=False)
