"""JSON as TorchServe's parser (Gson, lenient) takes it: what a deployment writes and Python's own parser refuses.

Names and values without quotation marks or in single ones, `=` for `:`, `;` for `,` and comments pass; a comma before
a closing brace, a repeated name or a model that is no object ends TorchServe's start. Tried against the Gson inside
TorchServe 0.12's jar.
"""

import re
from typing import Any

_BLANK = " \t\r\n"
_STOPS = frozenset("{}[]:=,;#/\\ \t\r\n\f")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_ESCAPES = {"t": "\t", "b": "\b", "n": "\n", "r": "\r", "f": "\f", "\n": "\n"}
_WORDS = {"true": True, "false": False, "null": None}

Models = dict[str, dict[str, dict[str, Any]]]


class GsonError(ValueError):
    """Gson refuses the text."""


def models(text: str) -> Models:
    """The `models` property: name → version → settings.

    Raises:
        GsonError: TorchServe would not start with it; the message says where.
    """
    try:
        value = _Reader(text).document()
    except RecursionError:
        raise GsonError("nested too deep") from None
    if value == []:
        return {}  # Gson takes an empty list for an empty map
    if not isinstance(value, dict):
        raise GsonError("not an object")
    found: Models = {}
    for name, versions in value.items():
        versions = {} if versions == [] else versions
        if not isinstance(versions, dict):
            raise GsonError(f"{name}: not an object of versions")
        for version, settings in versions.items():
            if not isinstance(settings, dict):
                raise GsonError(f"{name}, {version}: not an object of settings")
        found[name] = versions
    return found


def as_int(value: object) -> int | None:
    """A setting as Java's getAsInt makes a whole number of it; None for what is only logged (an empty list).

    Raises:
        GsonError: TorchServe would stop its start.
    """
    if isinstance(value, list) and len(value) <= 1:
        return as_int(value[0]) if value else None
    if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,10}", value, re.ASCII) and -(2**31) <= int(value) < 2**31:
        return int(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**1000:
        return (int(value) + 2**31) % 2**32 - 2**31
    raise GsonError(f"{value!r} is no number")


class _Reader:
    """Gson's JsonReader in its lenient mode, over a whole text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def document(self) -> Any:
        if self._text.startswith("\ufeff"):
            self._at = 1
        if self._text.startswith(")]}'\n", self._at):
            self._at += 5
        value = self._value(depth=0)
        # Lenience ends with the value: not even a comment may follow.
        rest = self._text[self._at :].lstrip(_BLANK)
        if rest:
            raise GsonError(f"something follows the end: {rest[:20]!r}")
        return value

    def _peek(self) -> str:
        """The next character that is neither blank nor in a comment; "" at the end."""
        text = self._text
        while self._at < len(text):
            character = text[self._at]
            if character in _BLANK:
                self._at += 1
            elif character == "#" or text.startswith("//", self._at):
                end = re.compile(r"[\r\n]").search(text, self._at)
                self._at = end.start() if end else len(text)
            elif text.startswith("/*", self._at):
                close = text.find("*/", self._at + 2)
                if close < 0:
                    raise GsonError("a comment without an end")
                self._at = close + 2
            else:
                return character
        return ""

    def _value(self, depth: int) -> Any:
        character = self._peek()
        if not character:
            raise GsonError("it ends too early")
        if character == "{":
            return self._object(depth)
        if character == "[":
            return self._array(depth)
        if character in "\"'":
            return self._string()
        word = self._word()
        if not word:
            raise GsonError(f"a value is missing before {self._near()}")
        if word.lower() in _WORDS:
            return _WORDS[word.lower()]
        if not _NUMBER.fullmatch(word):
            return word
        return float(word) if re.search(r"[.eE]", word) else int(word[:1000])

    def _object(self, depth: int) -> dict[str, Any]:
        self._at += 1
        found: dict[str, Any] = {}
        if self._peek() == "}":
            self._at += 1
            return found
        while True:
            character = self._peek()
            name = self._string() if character and character in "\"'" else self._word()
            if not name and character not in ('"', "'"):
                if not character:
                    raise GsonError("it ends too early")
                raise GsonError(f"a name is missing before {self._near()} (a comma too many?)")
            if depth < 2 and name in found:
                raise GsonError(f"{name} is there twice")
            if self._peek() not in (":", "="):
                raise GsonError(f"no colon after {name}, before {self._near()}")
            self._at += 2 if self._text.startswith("=>", self._at) else 1
            found[name] = self._value(depth + 1)
            end = self._peek()
            if end not in ("}", ",", ";"):
                raise GsonError("it ends too early" if not end else f"a comma is missing before {self._near()}")
            self._at += 1
            if end == "}":
                return found

    def _array(self, depth: int) -> list[Any]:
        self._at += 1
        found: list[Any] = []
        if self._peek() == "]":
            self._at += 1
            return found
        while True:
            # A comma with nothing before or after it is a null.
            found.append(None if self._peek() in (",", ";", "]") else self._value(depth + 1))
            end = self._peek()
            if end not in ("]", ",", ";"):
                raise GsonError("it ends too early" if not end else f"a comma is missing before {self._near()}")
            self._at += 1
            if end == "]":
                return found

    def _word(self) -> str:
        start = self._at
        while self._at < len(self._text) and self._text[self._at] not in _STOPS:
            self._at += 1
        return self._text[start : self._at]

    def _string(self) -> str:
        quote, out = self._text[self._at], list[str]()
        self._at += 1
        while self._at < len(self._text):
            character = self._text[self._at]
            self._at += 1
            if character == quote:
                # Java's strings are UTF-16: two escapes may make one character.
                return "".join(out).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
            out.append(self._escape() if character == "\\" else character)
        raise GsonError("a string without an end")

    def _escape(self) -> str:
        character = self._text[self._at : self._at + 1]
        self._at += 1
        if character == "u":
            digits = self._text[self._at : self._at + 4]
            if not re.fullmatch(r"[0-9a-fA-F]{4}", digits):
                raise GsonError("\\u without four digits")
            self._at += 4
            return chr(int(digits, 16))
        if character and character in "\"'\\/":
            return character
        if character not in _ESCAPES:
            raise GsonError(f"\\{character} is no escape")
        return _ESCAPES[character]

    def _near(self) -> str:
        return repr(self._text[self._at : self._at + 20])
