"""A running TorchServe: started, watched until it is truly ready, stopped without leaving a process.

A server has a state directory (by default `.batchserve/server-PORT` under the current one, mode 700) that holds its
logs, its keys and `state.json`. Its scratch directory, for worker sockets and extracted archives, is in the system's
temporary directory, since the path of a socket may have 107 bytes at most.
"""

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import psutil

from scripts.lib import launch
from scripts.lib import properties as props
from scripts.lib.addresses import REST, check_ports, client_url
from scripts.lib.errors import UserError
from scripts.lib.inference import PROBE, PROBE_ONE_TOKEN, InferenceClient
from scripts.lib.java import find_java
from scripts.lib.management import ManagementClient
from scripts.lib.refusals import token_rejected
from scripts.lib.serverlog import ServerLog, startup_failure
from scripts.lib.state import (
    KEY_FILE,
    SCRATCH_NOTE,
    STATE_ROOT,
    Key,
    State,
    forget,
    lock,
    make_directory,
    read_key,
    sweep,
)
from scripts.lib.supervised import Supervised

_POLL_S = 0.1
_ASK_S = 2.0
#: How long the management API may take for an answer while the server starts.
_ANSWER_S = 10.0
#: How long a worker that died may take to finish printing why.
_LAST_WORDS_S = 0.6


@dataclass(frozen=True)
class Urls:
    """Base URLs of a server, without a slash at the end."""

    inference: str
    management: str
    metrics: str


class StartError(UserError):
    """TorchServe did not come up; the message holds its own reason."""


class TorchServe:
    """One TorchServe process tree, from a config.properties.

    Use it as a context manager: it is ready inside the block and gone after it. Whatever ends the process that made
    it, kill -9 included, ends the server too.
    """

    def __init__(
        self,
        properties: Path,
        model_store: Path | None = None,
        *,
        java: Path | None = None,
        work_dir: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 180.0,
    ) -> None:
        """Prepare a server; nothing is started or written yet.

        Args:
            properties: config.properties.
            model_store: directory of archives; None: the one that the properties name.
            java: the program to run; None: `find_java`'s.
            work_dir: state directory; None: `.batchserve/server-PORT`.
            env: environment variables for the server and its workers on top of this process's.
            timeout: seconds that the context manager waits for readiness.

        Raises:
            UserError: the properties cannot be read or name no model store.
        """
        self.properties_path = properties.absolute()
        self.properties = props.load(properties)
        store = model_store or (Path(self.properties["model_store"]) if "model_store" in self.properties else None)
        if store is None:
            raise UserError(f"{properties}: names no model_store")
        self.model_store = store.absolute()
        self.urls = Urls(*(client_url(self.properties, name) for name in REST))
        port = self.urls.inference.rsplit(":", 1)[1]
        self.work_dir = (work_dir or STATE_ROOT / f"server-{port}").absolute()
        self.timeout = timeout
        self._java = java
        self._env = dict(env or {})
        self._process: Supervised | None = None
        self._log = ServerLog(self.work_dir / "logs" / "ts_log.log")
        self._lock: IO[bytes] | None = None

    # Life cycle

    def start(self) -> None:
        """Start the processes and return at once.

        Raises:
            UserError: a port is in use, there is no Java, no model store, or the state directory cannot be written.
        """
        if self._process is not None:
            raise RuntimeError("already started")
        if not self.model_store.is_dir():
            raise UserError(f"model store {self.model_store}: no such directory")
        check_ports(self.properties)
        java = self._java or find_java()
        make_directory(self.work_dir)
        self._lock = lock(self.work_dir)
        try:
            forget(self.work_dir)
            self._log.skip()
            sweep(self.work_dir)
            self._launch(java)
            self._write_state()
        except BaseException as error:
            self.stop(graceful=False)
            if isinstance(error, OSError):
                raise UserError(
                    f"TorchServe cannot be started with the state directory {self.work_dir}: {error}"
                ) from None
            raise

    def _launch(self, java: Path) -> None:
        scratch = launch.scratch_directory()
        try:
            (self.work_dir / SCRATCH_NOTE).write_text(str(scratch), encoding="utf-8", errors="surrogateescape")
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        server = launch.command(java, scratch, self.properties_path, self.properties, self.model_store)
        self._process = Supervised(server, scratch, self.work_dir, self.work_dir / "logs" / "console.log", self._env)

    def wait_ready(
        self,
        timeout: float | None = None,
        probe: bytes | None = PROBE,
        report: Callable[[int, int], None] | None = None,
    ) -> None:
        """Wait until every model of the properties has its workers READY and answers a request.

        Args:
            timeout: seconds; None: the object's own.
            probe: JSON body of the request; an answer below 500 counts. None: send none.
            report: called with the workers that have loaded their model and all that should, whenever that changes.

        Raises:
            StartError: the server or a worker died, a model could not be loaded or answers the probe with a server
                error, or the time is up; the message holds the reason from the log.
        """
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        waiting = {name: versions for name, versions in props.models(self.properties).items() if versions}
        wanted = sum(each.get("minWorkers", 1) for versions in waiting.values() for each in versions.values())
        told, asked = 0, time.monotonic()
        while waiting:
            self._check_alive()
            loaded, now = len(self._log.loaded), time.monotonic()
            if report is not None and loaded != told:
                report(loaded, wanted)
                told = loaded
            # The log says when it is worth asking; it may be elsewhere, so ask now and then anyway.
            if loaded >= wanted or now - asked > _ASK_S:
                asked = now
                waiting = {name: versions for name, versions in waiting.items() if not self._loaded(name, versions)}
            if now > deadline and waiting:
                raise StartError(f"not ready in time: {', '.join(waiting)}", hint=self._log_hint())
            if waiting:
                time.sleep(_POLL_S)
        if probe is not None:
            for name in props.models(self.properties):
                generates = probe == PROBE and self.management.describe(name).continuous_batching
                self._probe(name, PROBE_ONE_TOKEN if generates else probe, deadline)

    def stop(self, graceful: bool = True) -> None:
        """End Java and its workers and wait until they are gone; doing it twice is no error.

        Args:
            graceful: let TorchServe shut down by itself (2–4 s, at most 8) instead of killing it at once.
        """
        process = self._process
        if process is None:
            if self._lock is not None:  # a start that did not get as far as a process
                self._release()
            return
        try:
            process.stop(graceful)
        finally:
            self._release()

    def _release(self) -> None:
        """Give the state directory back."""
        self._process = None
        try:
            sweep(self.work_dir)
            forget(self.work_dir)
        finally:
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def wait(self) -> int:
        """Block until the server ends by itself; returns the exit status of Java."""
        if self._process is None:
            raise RuntimeError("not started")
        return self._process.wait()

    @property
    def running(self) -> bool:
        """Whether the Java process lives."""
        return self._process is not None and self._process.running

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop(graceful=False)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # What a client needs

    @property
    def uses_tokens(self) -> bool:
        """Whether requests need a key."""
        return self.properties.get("disable_token_authorization") != "true"

    @property
    def inference_key(self) -> str | None:
        """The key for predictions; None when the server asks for none."""
        return self._key("inference")

    @property
    def management_key(self) -> str | None:
        """The key for the management API; None when the server asks for none."""
        return self._key("management")

    def headers(self, kind: Key = "inference") -> dict[str, str]:
        """The HTTP headers that authorise a request of that kind."""
        key = self._key(kind)
        return {"Authorization": f"Bearer {key}"} if key else {}

    def processes(self) -> list[psutil.Process]:
        """Java and its workers, now; empty when not running. The supervisor is not among them."""
        return [] if self._process is None else self._process.processes()

    @property
    def management(self) -> ManagementClient:
        """A client for the management API, with its key. Raises UserError when the key is not there or has expired."""
        return ManagementClient(self.urls.management, self.management_key, timeout=_ANSWER_S)

    def inference(self, timeout: float = 120.0) -> InferenceClient:
        """A client for predictions, with their key; to be closed. `timeout` is seconds.

        Raises:
            UserError: the key is not there or has expired.
        """
        return InferenceClient(self.urls.inference, self.inference_key, timeout)

    def log_text(self) -> str:
        """TorchServe's log of this and earlier runs in the same state directory."""
        return self._log.path.read_text(encoding="utf-8", errors="replace") if self._log.path.exists() else ""

    # Inside

    def _key(self, kind: Key) -> str | None:
        return read_key(self.work_dir / KEY_FILE, kind) if self.uses_tokens else None

    def _write_state(self) -> None:
        assert self._process is not None
        State(
            pid=self._process.pid,
            inference=self.urls.inference,
            management=self.urls.management,
            metrics=self.urls.metrics,
            properties=str(self.properties_path),
            auth="token" if self.uses_tokens else "none",
        ).write(self.work_dir)

    def _check_alive(self) -> None:
        """Raise StartError as soon as the log or the process says that this start will not succeed."""
        self._log.read()
        if self._process is None:
            raise RuntimeError("not started")
        if not self._process.running:
            console = (self.work_dir / "logs" / "console.log").read_text(encoding="utf-8", errors="replace")
            raise StartError(f"TorchServe did not start: {startup_failure(console)}", hint=self._log_hint())
        if self._log.fatal:
            time.sleep(_POLL_S)
            self._log.read()
            raise StartError("TorchServe: " + ": ".join(self._log.fatal[:2]), hint=self._log_hint())
        if self._log.dead:
            time.sleep(_LAST_WORDS_S)
            self._log.read()
            worker = self._log.dead[0]
            name = worker.split("-", 2)[2].rsplit("_", 1)[0]
            doing = "answering a request" if worker in self._log.loaded else "loading the model"
            raise StartError(
                f"a worker of {name} died while {doing}:\n{self._log.worker_error(worker)}",
                hint=self._log_hint(),
            )

    def _log_hint(self) -> str:
        return f"the whole log: {self._log.path}"

    def _loaded(self, name: str, versions: Mapping[str, Mapping[str, Any]]) -> bool:
        for version, settings in versions.items():
            try:
                described = self.management.describe(name, version)
            except UserError:
                return False
            if described.ready < settings.get("minWorkers", 1):
                return False
        return True

    def _probe(self, name: str, body: bytes, deadline: float) -> None:
        with self.inference(max(deadline - time.monotonic(), 1.0)) as client:
            try:
                answer = client.predict(name, body)
            except UserError as error:
                self._check_alive()
                raise StartError(f"{name} does not answer a request: {error}", hint=self._log_hint()) from None
        if answer.status >= 500 or answer.status == 404 or token_rejected(answer.status, answer.body):
            time.sleep(_LAST_WORDS_S)
            self._log.read()
            said = [line for lines in self._log.said.values() for line in lines]
            raise StartError(
                f"{name} answers a request with {answer.status}:"
                f" {answer.body.decode('utf-8', 'replace').strip()[:500]}\n" + "\n".join(said[-30:]),
                hint=self._log_hint(),
            )
