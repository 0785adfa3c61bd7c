"""What TorchServe's log says while it starts: why a model, a worker or the server itself failed."""

import json
import os
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

# "2026-01-31T10:00:00,123 [INFO ] W-9000-minilm_1.0-stdout MODEL_LOG - text"
_LINE = re.compile(r"^\d{4}-\d\d-\d\dT\S+ \[(?P<level>\w+) *\] (?P<thread>.+?) (?P<logger>\S+) - (?P<text>.*)$")
_WORKER = re.compile(r"^(?P<worker>W-\d+-.+?)(?:-std(?:out|err))?$")
_DEAD = re.compile(r"State change \S+ -> (WORKER_STOPPED|WORKER_ERROR)")
_LOADED = re.compile(r"State change \S+ -> WORKER_MODEL_LOADED")
#: Lines a worker prints before it has done anything.
_CHATTER = re.compile(
    r"s_name_part0=|Listening on (port|addr)|Successfully loaded .*\.yaml|\[PID\]\d+$|Torch worker started|"
    r"Python runtime:|Connection accepted:|model_name: \S+, batchSize:"
)
_BIND = re.compile(r"Failed to bind to address: (\S+)")


def plain(line: str) -> list[str]:
    """A line of a log of either `log_format` as the lines of text that it would have been."""
    if not line.startswith("{"):
        return [line]
    try:
        found = json.loads(line)
        if "path" in found:  # of the access log
            asked = f'/{found["client"]} "{found["method"]} {found["path"]} HTTP/1.1"'
            return [f"{found['time']} - {asked} {found['status']} {found['milliseconds']}"]
        head = f"{found['time']} [{found['level']:<5}] {found['thread']} {found['logger']} - {found['message']}"
        return [*head.splitlines(), *found.get("exception", "").splitlines()]
    except (ValueError, KeyError, TypeError, AttributeError):
        return [line]


@dataclass
class ServerLog:
    """A log file read bit by bit, and what it tells of failures."""

    path: Path
    #: Server-side failure: a model that cannot be registered, or an invalid configuration.
    fatal: list[str] = field(default_factory=list)
    #: Workers that died, in order.
    dead: list[str] = field(default_factory=list)
    #: Workers that have loaded their model.
    loaded: set[str] = field(default_factory=set)
    #: What each worker printed since it loaded its model, or from its start.
    said: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    _offset: int = 0
    _rest: bytes = b""
    _in_fatal: bool = False

    def skip(self) -> None:
        """Leave out what is in the file now: it is of an earlier run."""
        self._offset = self.path.stat().st_size if self.path.exists() else 0

    def read(self) -> None:
        """Take in what was written since the last call."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self._offset:
                # The log was rolled: this is a new file.
                self._offset, self._rest = 0, b""
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            self.feed(line.decode("utf-8", "replace"))

    def feed(self, line: str) -> None:
        """Take in one line, of either format."""
        for each in plain(line):
            self._feed(each)

    def _feed(self, line: str) -> None:
        match = _LINE.match(line)
        if not match:
            # The Java exception that follows a failure: its first line says why, the stack trace does not.
            if self._in_fatal and line.strip() and not line.startswith(("\t", " ")):
                self.fatal.append(re.sub(r"^(Caused by: )?[\w.$]+\.(\w+: )", r"\2", line))
            return
        self._in_fatal = False
        text, thread = match["text"], match["thread"]
        if text.startswith("Failed to load model: ") or "Invalid configuration" in text:
            self.fatal.append(text)
            self._in_fatal = True
        worker = _WORKER.match(thread)
        if not worker:
            return
        name = worker["worker"]
        if match["logger"] == "MODEL_LOG":
            if not _CHATTER.search(text):
                self.said[name].append(text)
        elif _LOADED.search(text):
            self.said.pop(name, None)
            self.loaded.add(name)
        elif _DEAD.search(text) and name not in self.dead:
            self.dead.append(name)

    def worker_error(self, name: str) -> str:
        """What a dead worker printed, its first traceback with TorchServe's own frames left out."""
        lines = self.said.get(name, [])
        return "\n".join(first_traceback(lines)) or "it ended without a word (killed, or os._exit)"


def first_traceback(lines: list[str]) -> list[str]:
    """The lines that say why: the first traceback to its exception, without frames of TorchServe and importlib.

    Without a traceback, the last 20 lines.
    """
    starts = [at for at, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if not starts:
        return lines[-20:]
    kept, at, keep = [lines[starts[0]]], starts[0] + 1, True
    while at < len(lines):
        line = lines[at]
        if not line.startswith(" "):
            kept.append(line)
            # A multi-line message goes on until the worker's next utterance.
            tail = lines[at + 1 : at + 20]
            for more in tail:
                if more.startswith(("Traceback", "Backend worker process died")) or not more.strip():
                    break
                kept.append(more)
            break
        if line.startswith("  File "):
            keep = not re.search(r"site-packages/ts/|importlib|<frozen", line)
        if keep:
            kept.append(line)
        at += 1
    return kept


def startup_failure(output: str) -> str:
    """The reason in what the Java process printed before it gave up; its last lines when it is none that we know."""
    bind = _BIND.search(output)
    if bind:
        return f"the address {bind.group(1)} is in use"
    invalid = re.search(r"Invalid configuration: (.*)", output)
    if invalid:
        return f"TorchServe refuses the configuration: {invalid.group(1)}"
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith("\t")]
    return "\n".join(lines[-15:]) or "it printed nothing"
