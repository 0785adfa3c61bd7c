"""Token ids → text as it grows, without split characters or lost spaces; and stop strings, which no client sees.

A token's text depends on its neighbours: a character may span several tokens, and some tokenizers write the space
before a word only where a word came before. So each step decodes the last few tokens twice, without and with the new
one, and the difference is new; text that ends within a character waits for the rest.
"""

from collections.abc import Sequence
from typing import Any

CONTEXT = 6  # tokens of the prompt that say how the answer begins
_INCOMPLETE = "\ufffd"


class Detokenizer:
    """One sequence's text.

    Args:
        tokenizer: transformers' tokenizer.
        context: the prompt that the text continues; empty where it begins one of its own.
    """

    def __init__(self, tokenizer: Any, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(context[-CONTEXT:])
        self._from, self._read = 0, len(self._ids)

    def add(self, token: int) -> str:
        """The text that a further token makes sure; "" while that is none."""
        self._ids.append(token)
        before, after = self._text(self._read), self._text(len(self._ids))
        if len(after) <= len(before) or after.endswith(_INCOMPLETE):
            return ""
        self._from, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def rest(self) -> str:
        """What is left when nothing follows: a character that stays incomplete is replaced."""
        before, after = self._text(self._read), self._text(len(self._ids))
        self._read = len(self._ids)
        return after[len(before) :]

    def _text(self, end: int) -> str:
        text: str = self._tokenizer.decode(
            self._ids[self._from : end], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class StopStrings:
    """Finds the first stop string in a growing text, and holds back what may become one.

    Args:
        stops: the strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def add(self, text: str, *, watch: bool = True) -> str:
        """The text that is safe to show.

        Args:
            text: what is new.
            watch: whether a stop string that ends in it counts.
        """
        if not self._stops or self.found:
            return "" if self.found else text
        whole = self._held + text
        if not watch:
            self._held = ""
            return whole
        places = [place for stop in self._stops if (place := whole.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            return whole[: min(places)]
        keep = max(overlap(whole, stop) for stop in self._stops)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def rest(self) -> str:
        """What was held back and has not become a stop string."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, sought: str) -> int:
    """Characters at the end of `text` that `sought` begins with, fewer than all of it."""
    for length in range(min(len(sought) - 1, len(text)), 0, -1):
        if text.endswith(sought[:length]):
            return length
    return 0
