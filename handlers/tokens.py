"""Texts → encodings, and encodings → packed or padded tensors."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from tokenizers import normalizers
from torch import Tensor

from handlers.errors import RequestError

CHUNK_CHARACTERS = 300_000  # tokenised in one call


@dataclass(frozen=True)
class Encoding:
    """One tokenised text.

    Args:
        ids: token ids, special tokens included.
        type_ids: segment of each token.
        cut: tokens lost to truncation.
        skip: leading tokens that pooling leaves out.
    """

    ids: list[int]
    type_ids: list[int]
    cut: int = 0
    skip: int = 0

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Text:
    """What to tokenise: a text with its prompt, or the ids of one, and the request's wish for truncation.

    Args:
        item: text or token ids.
        prompt: text put before it; ignored for token ids.
        truncate: whether to cut what is too long; else it is an error.
    """

    item: str | tuple[int, ...]
    prompt: str = ""
    truncate: bool = True

    def __len__(self) -> int:
        """Characters to tokenise, or token ids."""
        return len(self.item) + (len(self.prompt) if isinstance(self.item, str) else 0)


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
        self.max_tokens = max_tokens
        self.include_prompt = include_prompt
        self.pad_id = tokenizer.pad_token_id or 0
        self.vocabulary = min(len(tokenizer), rows or len(tokenizer))
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

    def encode(self, texts: Sequence[Text]) -> list[Encoding | RequestError]:
        """Tokenise, truncate where wished; one slot per text, in order."""
        slots: list[Encoding | RequestError] = []
        for chunk in _chunks(texts):
            found = iter(self._backend.encode_batch([t.prompt + t.item for t in chunk if isinstance(t.item, str)]))
            for text in chunk:
                if isinstance(text.item, str):
                    encoding = next(found)
                    slots.append(self._fitted(encoding.ids, encoding.type_ids, text))
                else:
                    wrapped = self._wrapped(text.item)
                    slots.append(wrapped if isinstance(wrapped, RequestError) else self._fitted(*wrapped, text))
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

    def _fitted(self, ids: list[int], type_ids: list[int], text: Text) -> Encoding | RequestError:
        if not ids:
            return RequestError("the text has no tokens for this model.", code="empty_text")
        if self._unembedded and max(ids) >= self.vocabulary:
            return RequestError("the text has a token that the model has no embedding for.", code="invalid_token")
        cut = max(0, len(ids) - self.max_tokens)
        if cut and not text.truncate:
            return RequestError(
                f"{len(ids)} tokens are over the model's limit of {self.max_tokens}, and truncate is false.",
                code="too_long",
            )
        if cut:
            ids, type_ids = self._truncated(ids), self._truncated(type_ids)
        skip = 0 if self.include_prompt or not text.prompt else min(self._prompt_tokens(text.prompt), len(ids) - 1)
        return Encoding(ids, type_ids, cut, skip)

    def _truncated(self, values: list[int]) -> list[int]:
        """`values` without what is too much of the text itself: the special tokens at the ends stay."""
        before, after = len(self._prefix), len(self._suffix)
        if self._left:
            return [*values[:before], *values[len(values) - (self.max_tokens - before) :]]
        return [*values[: self.max_tokens - after], *values[len(values) - after :]]

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
