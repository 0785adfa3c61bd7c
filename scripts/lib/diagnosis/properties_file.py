"""config.properties as it stands: its values as Java reads them, and its text for an edit that keeps the rest."""

import contextlib
import io
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import javaproperties

from scripts.lib.diagnosis import gson
from scripts.lib.errors import UserError

_NEWLINE = re.compile(r"\r\n|\n|\r")
_LONGEST_VALUE = 1000  # lines of a `models` JSON that lost its backslashes
_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Entry:
    """A key and its value, with the text that says so.

    Args:
        key, value: as java.util.Properties gives them, nothing stripped at a value's end.
        line: where it starts, from 1.
        source: its lines as they stand, line ends included.
    """

    key: str
    value: str
    line: int
    source: str


@dataclass(frozen=True)
class Rejoined:
    """A `models` JSON whose lines lack the backslashes that would make one value of them.

    Args:
        first, last: its lines, from 1.
        value: the JSON that was meant.
        comments: comment lines between.
    """

    first: int
    last: int
    value: str
    comments: tuple[str, ...]


@dataclass(frozen=True)
class PropertiesFile:
    """A config.properties. `parts` are its entries and, as plain text, everything between them."""

    path: Path
    parts: tuple[Entry | str, ...]

    @property
    def entries(self) -> list[Entry]:
        """Every entry, in order; a later one of the same key wins."""
        return [part for part in self.parts if isinstance(part, Entry)]

    @property
    def own(self) -> list[Entry]:
        """The entries without the rest of a `models` JSON that lost its backslashes, whose lines are keys to Java."""
        cut = self.rejoined
        return [entry for entry in self.entries if cut is None or not cut.first < entry.line <= cut.last]

    @property
    def text(self) -> str:
        """The whole file."""
        return "".join(part.source if isinstance(part, Entry) else part for part in self.parts)

    def get(self, key: str) -> Entry | None:
        """The entry of `key` that counts."""
        return next((entry for entry in reversed(self.entries) if entry.key == key), None)

    def where(self, entry: Entry) -> str:
        """The entry's place, for people."""
        return f"{self.path.name}:{entry.line}"

    def with_text(self, text: str) -> "PropertiesFile":
        """The same file with another text."""
        return parse(self.path, text)

    @cached_property
    def rejoined(self) -> Rejoined | None:
        """The `models` JSON put together again, when it is cut where a backslash is missing; None when it is whole."""
        entry = self.get("models")
        if entry is None or _is_json(entry.value):
            return None
        lines = _NEWLINE.split(self.text)
        collected, comments = "", []
        for number in range(entry.line - 1, min(len(lines), entry.line - 1 + _LONGEST_VALUE)):
            line = lines[number].strip()
            if number >= entry.line and line.startswith(("#", "!")):
                comments.append(lines[number])
                continue
            line = line.rstrip("\\").rstrip()
            collected += line.partition("models")[2].lstrip(" \t=:") if number == entry.line - 1 else line
            if line.endswith("}") and collected.count("{") == collected.count("}"):
                if number > entry.line - 1 and _is_json(collected):
                    return Rejoined(entry.line, number + 1, collected, tuple(comments))
                return None
        return None


def _is_json(value: str) -> bool:
    try:
        return bool(gson.models(value))
    except gson.GsonError:
        return False


def parse(path: Path, text: str) -> PropertiesFile:
    """Take a text apart. Raises UserError where Java would refuse it."""
    parts: list[Entry | str] = []
    line = 1
    try:
        for element in javaproperties.parse(io.StringIO(text, newline="")):
            if isinstance(element, javaproperties.KeyValue):
                parts.append(Entry(element.key, element.value, line, element.source))
            else:
                parts.append(element.source)
            line += len(_NEWLINE.findall(element.source))
    except javaproperties.InvalidUEscapeError as error:
        raise UserError(
            f"{path}: line {line} or later: {error}: TorchServe would not start",
            hint="write a backslash twice, or four hexadecimal digits after \\u",
        ) from None
    return PropertiesFile(path, tuple(parts))


def read(path: Path) -> PropertiesFile:
    """Read a file. Raises UserError when it cannot be read, or Java would refuse it."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UserError(f"{path} has {path.stat().st_size:,} bytes: no config.properties is that long")
        if not path.is_file():
            raise UserError(f"{path}: not a regular file")
        return parse(path, path.read_bytes().decode("latin-1"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file", hint="name the file that torchserve takes as --ts-config") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def write(file: PropertiesFile) -> None:
    """Replace the file by its new text, whole or not at all; its permissions stay. Raises UserError when it cannot."""
    target = file.path.resolve()
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        mode = target.stat().st_mode & 0o777
        partial.unlink(missing_ok=True)
        with os.fdopen(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as out:
            out.write(file.text.encode("latin-1"))
            out.flush()
            os.fsync(out.fileno())
        partial.chmod(mode)
        partial.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise UserError(f"{file.path}: cannot be written: {error.strerror}") from None
