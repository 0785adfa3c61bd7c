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
_RESTORED = "Started restoring models from snapshot"


def read_log(path: Path) -> LogFacts:
    """Read ts_log.log, or what the server printed.

    Raises:
        UserError: it cannot be read.
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
    """What the lines of a log tell; `path` names them."""
    log = ServerLog(path)
    down: dict[str, None] = {}
    restarts, unavailable = Counter[str](), Counter[str]()
    batches, requests = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    refused: dict[str, None] = {}
    restored, before = False, ""
    for line in (each for raw in lines for each in plain(raw.rstrip("\r\n"))):
        if line == before:
            continue  # TorchServe's own configuration writes most lines twice
        before = line
        log.feed(line)
        if match := _RETRY.search(line):
            restarts[match[1]] += 1
            down[match[1]] = None
        elif match := _LOADED.search(line):
            down.pop(match[1], None)
        elif match := _BATCH.search(line):
            batches[match[1], match[2]] += 1
        elif match := _REQUEST.search(line):
            requests[match[1], match[2]] += 1
        elif match := _UNAVAILABLE.search(line):
            unavailable[match[1]] += 1
        elif match := _REFUSED.search(line):
            refused[match[1]] = None
        restored = restored or _RESTORED in line
    return LogFacts(
        path,
        failures=tuple(dict.fromkeys(log.fatal)),
        dead={worker: log.worker_error(worker).splitlines()[-1] for worker in down},
        restarts=dict(restarts),
        restored=restored,
        refused=tuple(refused),
        batches={model: (count, requests[model]) for model, count in batches.items()},
        unavailable=dict(unavailable),
    )
