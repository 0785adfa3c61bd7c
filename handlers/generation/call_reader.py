"""Calls of functions in an answer as it grows, told from its text."""

from collections.abc import Callable

from handlers.generation.calls import Call, Format
from handlers.generation.detokenizer import overlap


class CallReader:
    """Tells calls from text in an answer as it grows; the grammar has seen to it that they are well-formed.

    Args:
        format: how they are written.
    """

    def __init__(self, format: Format) -> None:
        self._format = format
        self._held = ""
        self._state = self._text
        self._begin = format.mark or format.opening + format.before[:1]
        self._index = -1
        self._depth, self._quoted, self._escaped = 0, False, False
        self._calls: list[Call] = []
        self._shown: list[str] = []

    @property
    def complete(self) -> bool:
        """Whether there is a call, and the last one has an end."""
        return self._state in (self._between, self._ignored)

    def add(self, text: str) -> tuple[str, list[Call]]:
        """The text and the calls that are new."""
        self._held += text
        while self._state():
            pass
        return self._taken()

    def rest(self) -> tuple[str, list[Call]]:
        """What was held back and has not become a call; a mark that is there is no text, whatever comes of it."""
        if self._state == self._text:
            self._shown.append(self._held)
            self._held = ""
        return self._taken()

    def _taken(self) -> tuple[str, list[Call]]:
        shown, calls = "".join(self._shown), self._calls
        self._shown, self._calls = [], []
        return shown, calls

    # What is read now: each takes from what is held and says whether there may be more to do

    def _text(self) -> bool:
        place = self._held.find(self._begin)
        if not self._format.mark and place != 0:  # a call is all of an answer, or none of it
            if not self._begin.startswith(self._held):
                self._state = self._plain
                return True
            return False
        if place >= 0:
            self._shown.append(self._held[:place])
            self._held = self._held[place:]
            self._state = self._opening
            return True
        sure = len(self._held) - overlap(self._held, self._begin)
        self._shown.append(self._held[:sure])
        self._held = self._held[sure:]
        return False

    def _plain(self) -> bool:
        self._shown.append(self._held)
        self._held = ""
        return False

    def _opening(self) -> bool:
        return self._pass(self._format.opening + self._format.before, self._name)

    def _name(self) -> bool:
        name, found, _ = self._held.partition(self._format.after)
        if not found:
            return False
        self._index += 1
        self._calls.append(Call(self._index, name, ""))
        return self._pass(name + found, self._arguments)

    def _arguments(self) -> bool:
        for place, character in enumerate(self._held):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = character == "\\", character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._argue(place + 1)
                    self._state = self._between
                    return True
        self._argue(len(self._held))
        return False

    def _argue(self, count: int) -> None:
        if count:
            self._calls.append(Call(self._index, None, self._held[:count]))
            self._held = self._held[count:]

    def _between(self) -> bool:
        separator = self._format.separator
        another = f"}}{separator}{self._format.before}"
        if separator is not None and self._held.startswith(another):
            return self._pass(another, self._name)
        if separator is None or not another.startswith(self._held):
            self._state = self._ignored
        return False

    def _ignored(self) -> bool:
        self._held = ""
        return False

    def _pass(self, text: str, state: Callable[[], bool]) -> bool:
        """Go on to `state` behind `text`, once that is there."""
        if len(self._held) < len(text):
            return False
        self._held = self._held[len(text) :]
        self._state = state
        return True
