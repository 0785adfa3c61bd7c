"""A peer as a process tree: started, waited for until it answers, gone afterwards whatever happens."""

import time
from pathlib import Path
from types import TracebackType
from typing import Self

import orjson
import psutil
import requests

from benchmarks.lineup import Peer
from scripts.lib import launch
from scripts.lib.addresses import free_ports
from scripts.lib.errors import UserError
from scripts.lib.supervised import Supervised

START_S = 600.0  # the first start compiles everything that is imported
_POLL_S = 0.2
_ANSWER_S = 60.0
_TOLD_LINES = 8


class Process:
    """A running peer; a context manager. Whatever ends this process ends the peer's too.

    Args:
        peer: who.
        python: its environment's interpreter.
        model: the model's directory.
        work: an empty directory, its current one.
        cores: of this machine.
        kept: where its output is kept.
    """

    def __init__(self, peer: Peer, python: Path, model: Path, work: Path, cores: int, kept: Path) -> None:
        self._peer, self._cores, self._work, self._log = peer, cores, work, kept
        (port,) = free_ports(1)
        self._base = f"http://127.0.0.1:{port}"
        self._command = peer.command(python, model, port, cores)
        threads = str(peer.threads(cores))
        self._settings = {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            # Else every start would compile torch again where that is set.
            "PYTHONDONTWRITEBYTECODE": "",
            # Nobody shall be told of this run.
            "DO_NOT_TRACK": "1",
            "INFINITY_ANONYMOUS_USAGE_STATS": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            # It would leave a key in the home directory.
            "RAY_AUTH_MODE": "disabled",
        }
        self._process: Supervised | None = None

    @property
    def url(self) -> str:
        """Where predictions are posted."""
        return self._base + self._peer.path

    def processes(self) -> list[psutil.Process]:
        """Its processes, now."""
        return [] if self._process is None else self._process.processes()

    def __enter__(self) -> Self:
        self._process = Supervised(self._command, launch.scratch_directory(), self._work, self._log, self._settings)
        try:
            self._wait_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.stop()

    def _wait_ready(self) -> None:
        """Wait until all of its workers are ready and it answers a prediction.

        Raises:
            UserError: it ended, or the time is up.
        """
        deadline = time.monotonic() + START_S
        with requests.Session() as session:
            session.trust_env = False
            while not self._ready(session):
                if self._process is None or not self._process.running:
                    raise UserError(f"did not start: {self._last_words()}", hint=f"all that it said: {self._log}")
                if time.monotonic() > deadline:
                    raise UserError(f"not ready within {START_S:g} s: {self._last_words()}", hint=f"see {self._log}")
                time.sleep(_POLL_S)

    def _ready(self, session: requests.Session) -> bool:
        peer = self._peer
        try:
            if peer.ready:
                told = session.get(self._base + peer.ready, timeout=_ANSWER_S)
                missing = peer.ready_word and told.text.count(peer.ready_word) < peer.workers(self._cores)
                if not told.ok or missing:
                    return False
            body = orjson.dumps(peer.body("ready"))
            headers = {"Content-Type": "application/json"}
            return session.post(self.url, data=body, headers=headers, timeout=_ANSWER_S).ok
        except requests.RequestException:
            return False

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return " · ".join(line.strip() for line in lines[-_TOLD_LINES:] if line.strip()) or "it said nothing"
