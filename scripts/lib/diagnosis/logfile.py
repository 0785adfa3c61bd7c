"""A TorchServe log, read once: what failed, what died, how full the batches were."""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from scripts.lib.diagnosis.deployment import LogFacts
from scripts.lib.errors import UserError
from scripts.lib.serverlog import ServerLog, plain

_MOST_BYTES = 256 << 20
_RETRY = re.compile(r" (W-\d+-\S+) \S+ - Retry worker: \d+ in \d+ seconds")
_LOADED = re.compile(r" (W-\d+-\S+) \S+ - \S+ State change \S+ -> WORKER_MODEL_LOADED")
_BATCH = re.compile(r" W-\d+-(\S+)_(\S+) \S+ - Flushing req\.cmd PREDICT ")
_REQUEST = re.compile(r" W-\d+-(\S+)_(\S+) \S*\.RestJob - Waiting time ns: ")
_REFUSED = re.compile(r"ModelConfig - (Invalid \w+: ?.{1,80}?, should be .*)")
_UNAVAILABLE = re.compile(r'"POST /(?:predictions|v1/models|v2/models)/([^/: "]+)\S* HTTP/\S+" 503 ')
#: A line of TorchServe's logs, the access log's among them.
_OURS = re.compile(r"\d{4}-\d\d-\d\d[T ]\S+ (\[\w+ *\] .+ \S+ - |- \S+ \"[A-Z]+ \S+ HTTP/)")
_STARTED = "Torchserve version: "  # what the server says of itself, behind a line of its own
_RESTORED = "Started restoring models from snapshot"


def read_log(path: Path) -> LogFacts:
    """Read ts_log.log, or what the server printed.

    Raises:
        UserError: it cannot be read, or is no log of TorchServe's.
    """
    try:
        if not path.is_file():
            raise FileNotFoundError
        if path.stat().st_size > _MOST_BYTES:
            raise UserError(f"{path} has more than {_MOST_BYTES >> 20} MiB", hint="give a part of it: tail -c 200M")
        with path.open(encoding="utf-8", errors="replace") as file:
            return facts(path, file)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file", hint="TorchServe's is logs/ts_log.log where it was started") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def facts(path: Path, lines: Iterable[str]) -> LogFacts:
    """What the lines of a log tell of the server's last start and since; `path` names them.

    Raises:
        UserError: none of them is TorchServe's.
    """
    run, before, known, some = _Run(path), "", False, False
    for line in (each for raw in lines for each in plain(raw.rstrip("\r\n"))):
        if line == before:
            continue  # TorchServe's own configuration writes most lines twice
        before = line
        some = some or bool(line.strip())
        known = known or _OURS.search(line) is not None
        if line.startswith(_STARTED):
            run = _Run(path)
        run.feed(line)
    if some and not known:
        raise UserError(f"{path}: no line of it is TorchServe's", hint="TorchServe's is logs/ts_log.log")
    return run.facts()


class _Run:
    """What a log tells of one run of the server."""

    def __init__(self, path: Path) -> None:
        self._path, self._log = path, ServerLog(path)
        self._down: dict[str, None] = {}
        self._restarts, self._unavailable = Counter[str](), Counter[str]()
        self._batches, self._requests = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        self._refused: dict[str, None] = {}
        self._restored = False

    def feed(self, line: str) -> None:
        """Take in one line."""
        self._log.feed(line)
        if match := _RETRY.search(line):
            self._restarts[match[1]] += 1
            self._down[match[1]] = None
        elif match := _LOADED.search(line):
            self._down.pop(match[1], None)
        elif match := _BATCH.search(line):
            self._batches[match[1], match[2]] += 1
        elif match := _REQUEST.search(line):
            self._requests[match[1], match[2]] += 1
        elif match := _UNAVAILABLE.search(line):
            self._unavailable[match[1]] += 1
        elif match := _REFUSED.search(line):
            self._refused[match[1]] = None
        self._restored = self._restored or _RESTORED in line

    def facts(self) -> LogFacts:
        """All of it."""
        return LogFacts(
            self._path,
            failures=tuple(dict.fromkeys(self._log.fatal)),
            dead={worker: self._log.worker_error(worker).splitlines()[-1] for worker in self._down},
            restarts=dict(self._restarts),
            restored=self._restored,
            refused=tuple(self._refused),
            batches={model: (count, self._requests[model]) for model, count in self._batches.items()},
            unavailable=dict(self._unavailable),
        )
