"""Masks in texts, and the words of a vocabulary that fill them, as transformers' fill-mask pipeline does."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from handlers.errors import RequestError, shown
from handlers.tokens import Encoding

TOKENS = ("[MASK]", "<mask>")  # the masks of the families that there are
LONGEST_TARGET = 256  # characters


class Masks:
    """The mask and the words of a masked language model.

    Args:
        tokenizer: transformers' tokenizer of the model.
        vocabulary: how many words the model scores.

    Attributes:
        token: the mask, as texts have it.

    Raises:
        ValueError: the tokenizer has no mask.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        if tokenizer.mask_token is None:
            raise ValueError("the tokenizer has no mask token: this model cannot fill masks")
        self.token: str = tokenizer.mask_token
        self._id: int = tokenizer.mask_token_id
        self._padding = tokenizer.pad_token_id
        self._tokenizer = tokenizer
        self._words: dict[str, int] = tokenizer.get_vocab()
        self._vocabulary = vocabulary

    def check(self, text: str, param: str) -> None:
        """Raise RequestError if there is no mask in a text, sent as `param`."""
        if self.token not in text:
            other = next((token for token in TOKENS if token in text), None)
            said = f"has {other}, the mask of other models" if other else "has no mask"
            raise RequestError(f"{param} {said}; this model's is {shown(self.token)}.", code="no_mask", param=param)

    def places(self, encoding: Encoding) -> list[int]:
        """Where the masks are among an encoding's tokens."""
        return [at for at, token in enumerate(encoding.ids) if token == self._id]

    def lost(self, text: str, encoding: Encoding) -> bool:
        """Whether truncation cut off a mask."""
        return encoding.cut > 0 and len(self.places(encoding)) < text.count(self.token)

    def targets(self, words: Sequence[str]) -> tuple[int, ...]:
        """The token ids of words, each once; of words that are not in the vocabulary the first token's.

        Raises:
            RequestError: a word is too long, or none has a token.
        """
        found: list[int] = []
        for word in words:
            if len(word) > LONGEST_TARGET:
                said = f"A target has {len(word)} characters; at most {LONGEST_TARGET} are read."
                raise RequestError(said, code="invalid_value", param="targets")
            known = self._words.get(word)
            if known is None:
                found += self._tokenizer.backend_tokenizer.encode(word, add_special_tokens=False).ids[:1]
            else:
                found.append(known)
        usable = tuple(dict.fromkeys(token for token in found if token < self._vocabulary))
        if not usable:
            raise RequestError("No target has a token in the vocabulary.", code="invalid_value", param="targets")
        return usable

    def filled(self, encoding: Encoding, at: int, best: Tensor, *, alone: bool) -> Iterator[dict[str, Any]]:
        """The words of `best_words` for the mask at a place, each with the text that it makes.

        Args:
            alone: whether it is the text's only mask: the text then leaves without special tokens, else other masks
                would be lost with them.
        """
        for score, word in best.tolist():
            tokens = [*encoding.ids[:at], int(word), *encoding.ids[at + 1 :]]
            kept = [token for token in tokens if token != self._padding]
            yield {
                "score": score,
                "token": int(word),
                "token_str": self._tokenizer.decode([int(word)]),
                "sequence": self._tokenizer.decode(kept, skip_special_tokens=alone),
            }


def best_words(logits: Tensor, count: int, targets: Sequence[int] | None = None) -> Tensor:
    """The likeliest words, or the likeliest of the targets.

    Args:
        logits: (masks, vocabulary).
        count: how many.
        targets: token ids.

    Returns:
        (masks, count, 2): probability and token id, which fp32 holds exactly up to 2^24.
    """
    scores = logits.softmax(-1)
    if targets is None:
        values, ids = scores.topk(count)
    else:
        values, places = scores[:, list(targets)].topk(count)
        ids = torch.tensor(targets, device=scores.device)[places]
    return torch.stack([values, ids.float()], dim=-1)
