"""TorchServe's `continuousBatching` mode as a mailbox in front of an engine. Beside handlers/base.py the only importer
of `ts`.

In this mode the frontend calls `handle` again and again with all open requests of the worker, new ones joining between
two calls; each call answers some of them. So `handle` waits a moment for news and hands out what there is:

- `context.request_ids` maps a row to its request; an id that is no longer there belongs to a client that left.
- A row that is taken out of it stays open and gets nothing this time. An answer with the header `ts_stream_next: true`
  is a piece of one; `false` is its end, which must not be the first piece; without the header an answer is whole and
  has its own status.
- That a client left is noticed only when something is sent to it. So a request that has been quiet for a second gets an
  empty piece, whose head says 200: an error that comes later is told in the body.
  What waits for the trial of its schema gets none, so that its error keeps its status: it waits for a while only.
- While no client is left, `handle` is not called at all: a thread drops what no call has renewed.
"""

import logging
import threading
import time
import traceback
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from ts.metrics.metric_type_enum import MetricTypes
from ts.protocol import otf_message_handler
from ts.torch_handler.base_handler import BaseHandler

from handlers import decoding, protocol, wire
from handlers.errors import ModelFailure, Overloaded, RequestError
from handlers.generation.engine import EngineDead, EngineFailure
from handlers.generation.exchange import Exchange
from handlers.generation.metrics import GenerationMetrics
from handlers.generation.responses import error_answer
from handlers.metrics import BATCH_SIZE_LIMIT

logger = logging.getLogger(__name__)

# Seconds that a call waits for news, longer than most steps: what comes within a step is computed in the next but one
# anyway, and the frontend and the worker take 5 ms from the cores that the engine computes on for each call.
ROUND = 0.3
SILENT = 2  # times that a call lets something come of which nobody is to hear yet: tokens of whole answers
SOON = 0.03  # seconds that a call waits after one that ended a request: its client's next one may be there already
ADMISSION = 0.05  # seconds that a call waits for its new requests to be admitted; meanwhile the others' news wait
QUIET = 0.5  # seconds after which a request that has got nothing gets an empty piece
LEASE = 1.0  # seconds that a request lives without a call: with the two above, what a client that left may hold on to
LATE = 20.0  # seconds after which the rest of an admission is not begun any more
LATE_SHARE = 0.5  # of the slots that may wait for it
_NEXT = "ts_stream_next"


@dataclass(frozen=True)
class Reply:
    """An answer that needs no engine: JSON."""

    body: bytes


@dataclass(frozen=True)
class Later:
    """The rest of an admission, which takes long: it must not hold up those behind it."""

    admit: Callable[[], Exchange]


@dataclass
class _Open:
    """An open request.

    Args:
        admission: what it is, once that is found out.
        openai: whether errors are answered in OpenAI's form.
        arrived: when it came.
        head: whether its status and headers have been sent.
        sent: when something was last sent.
        dropped: whether it was given up because no call came.
        exchange: what runs for it, None where nothing does, or not yet.
    """

    admission: "Future[Exchange | Reply]"
    openai: bool
    arrived: float = field(default_factory=time.monotonic)
    head: bool = False
    sent: float = field(default_factory=time.monotonic)
    dropped: bool = False
    exchange: Exchange | None = None


class _Keep:
    """Stopping criteria that leave our own ts_stream_next headers alone."""

    def __getitem__(self, index: int) -> Any:
        return lambda output: None


class MailboxHandler(BaseHandler):
    """See the module. A subclass says how requests are admitted, collected and abandoned."""

    def initialize(self, context: Any) -> None:
        """Load what serves; only then does TorchServe call the worker READY."""
        self.context = context
        self.manifest = context.manifest
        self.model_name: str = context.model_name
        self.slots = int(context.system_properties.get("batch_size") or 1)
        self.metrics = GenerationMetrics(context.metrics, MetricTypes, context.model_name)
        self.metrics.gauge(BATCH_SIZE_LIMIT, self.slots)
        self._open: dict[str, _Open] = {}
        wire.read_in_pieces(otf_message_handler, self._open)
        wire.calm(otf_message_handler, context.metrics)
        self._ended = False  # whether the last call ended a request
        self._lock = threading.Lock()
        self._renewed = time.monotonic()
        # One thread: requests are admitted in the order in which they come. Tokenising a long one holds up no stream.
        self._admissions = ThreadPoolExecutor(1, "admission")
        self._late = ThreadPoolExecutor(1, "late-admission")
        self._late_places = threading.Semaphore(max(1, int(LATE_SHARE * self.slots)))
        self.setup(context)
        threading.Thread(target=self._watch_for_ever, name="watch", daemon=True).start()
        self.initialized = True
        logger.info("Ready: %s", self.card())

    def handle(self, data: Sequence[Mapping[str, Any]], context: Any) -> list[bytes]:
        """Take new requests, hand out what is new for the open ones; see the module."""
        with self._lock:
            context.stopping_criteria = _Keep()
            try:
                return self._round(data, context)
            finally:
                self._renewed = time.monotonic()
                self.metrics.emit()

    # What a subclass says

    @abstractmethod
    def setup(self, context: Any) -> None:
        """Load the model and start the engine."""

    @abstractmethod
    def admit(
        self, id: str, row: Mapping[str, Any], headers: decoding.Headers, arrived: float
    ) -> Exchange | Reply | Later:
        """Check a request and hand it to the engine; called in the thread of the admissions. What it leaves for later
        is called in another one.

        Args:
            id: the request.
            row: its body, as TorchServe hands it over.
            headers: its own.
            arrived: when it came, `time.monotonic`.

        Raises:
            RequestError: it is refused.
            EngineDead: this process can serve no more.
        """

    @abstractmethod
    def collect(self, timeout: float) -> bool:
        """Bring the engine's news to the exchanges, waiting at most `timeout` seconds for some.

        Returns:
            Whether a client is to hear of it now.
        """

    @abstractmethod
    def abandon(self, id: str) -> None:
        """Free what a request holds; it may be done already."""

    @abstractmethod
    def look(self) -> None:
        """Bring the gauges up to date; called now and then, also while there is no call."""

    @abstractmethod
    def card(self) -> dict[str, Any]:
        """What is served, for `GET /models/NAME?customized=true` and the log."""

    # A call

    def _round(self, data: Sequence[Mapping[str, Any]], context: Any) -> list[bytes]:
        ids: dict[int, str] = context.request_ids
        present = set(ids.values())
        for id in self._open.keys() - present:
            self._forget(id, cancelled=True)
        new = [self._take(index, id, data[index]) for index, id in ids.items() if id not in self._open]
        if new:
            wait(new, ADMISSION)
        # something to tell already: what was refused, or the end of a stream that came in one piece
        if any(entry.exchange.done if entry.exchange else entry.admission.done() for entry in self._open.values()):
            self.collect(0.0)
        else:
            waiting = not all(entry.exchange for entry in self._open.values())
            self._wait(ADMISSION if waiting else SOON if self._ended else ROUND)
        self._ended = False
        answers = [b""] * len(data)
        for index, id in list(ids.items()):
            answer = self._answer(index, self._open[id], context)
            if answer is None:
                del ids[index]
            else:
                answers[index] = answer
                if context.get_response_headers(index).get(_NEXT) != "true":
                    self._ended = True
                    self._forget(id, cancelled=False)
        return answers

    def _wait(self, seconds: float) -> None:
        """Wait for news that a client is to hear of, at most so long."""
        until = time.monotonic() + seconds
        for _ in range(SILENT):
            if self.collect(max(0.0, until - time.monotonic())):
                return

    def _take(self, index: int, id: str, row: Mapping[str, Any]) -> "Future[Exchange | Reply]":
        headers = decoding.Headers(self.context.get_all_request_header(index) or {})
        route = decoding.route_of(headers)
        entry = self._open[id] = _Open(Future(), openai=route.startswith("v1/"))
        self.metrics.count("batchserve_requests_total")
        self._admissions.submit(self._admit, id, entry, lambda: self.admit(id, row, headers, entry.arrived))
        return entry.admission

    def _admit(self, id: str, entry: _Open, admit: Callable[[], Exchange | Reply | Later]) -> None:
        try:
            if entry.dropped or self._open.get(id) is not entry:
                raise _dropped()  # before it costs anything
            found = admit()
            if isinstance(found, Later):
                self._postpone(id, entry, found)
                return
        except BaseException as error:  # noqa: BLE001 - it is the answer, see _refuse; Rust's panics are no Exception
            entry.admission.set_exception(error)
            return
        if isinstance(found, Exchange):
            entry.exchange = found
        entry.admission.set_result(found)

    def _postpone(self, id: str, entry: _Open, later: Later) -> None:
        """Let the rest of an admission wait for its turn: not in every slot, and not for ever."""
        if not self._late_places.acquire(blocking=False):
            raise Overloaded("Too many new schemas wait for being tried; try again.")
        entry.admission.add_done_callback(lambda _: self._late_places.release())

        def admit() -> Exchange:
            if time.monotonic() - entry.arrived > LATE:
                raise Overloaded("The schema could not be tried in time; try again.")
            return later.admit()

        self._late.submit(self._admit, id, entry, admit)

    def _forget(self, id: str, *, cancelled: bool) -> None:
        entry = self._open.pop(id)
        logger.info("request %s %s", id, "was given up by its client" if cancelled else "is answered")
        if cancelled and not entry.dropped:
            self.metrics.count("batchserve_cancelled_total")
        # now, or as soon as the admission is through
        entry.admission.add_done_callback(lambda _: self.abandon(id))

    # A request's answer

    def _answer(self, index: int, entry: _Open, context: Any) -> bytes | None:
        """What goes to a request now; None for nothing."""
        found = entry.exchange or self._unstarted(index, entry, context)
        if not isinstance(found, Exchange):
            return found
        if found.error is not None and not entry.head:
            return self._refuse(index, entry, found.error, context)
        if found.error is not None and found.stream:
            self._count_error(index, found.error, context)
        body = found.events() if found.stream else self._whole(index, entry, found, context)
        now = time.monotonic()
        if not body and not found.done and now - entry.sent < QUIET:
            return None
        if found.stream and not entry.head:
            context.set_response_content_type(index, "text/event-stream; charset=utf-8")
            context.set_response_header(index, "Cache-Control", "no-cache")
        elif not entry.head:
            context.set_response_content_type(index, "application/json")
        if entry.head or found.stream or not found.done:
            # the frontend sends the head with the first piece, and with a piece that is the last it sends none: an
            # answer that is ready at once is sent as a piece, and ends with an empty one in the next call
            context.set_response_header(index, _NEXT, "false" if found.done and entry.head else "true")
            entry.head = True
        entry.sent = now
        return body

    def _unstarted(self, index: int, entry: _Open, context: Any) -> Exchange | bytes | None:
        """What goes to a request for which nothing ran a moment ago, or what does run now."""
        if not entry.admission.done():
            return None
        error = entry.admission.exception()
        if error is not None:
            return self._refuse(index, entry, error, context)
        found = entry.admission.result()
        if isinstance(found, Exchange):
            return found
        context.set_response_content_type(index, "application/json")
        return found.body

    def _whole(self, index: int, entry: _Open, exchange: Exchange, context: Any) -> bytes:
        """The body once it is done; before, an empty piece."""
        if not exchange.done:
            return b""
        try:
            return exchange.body()
        except RequestError as error:
            if entry.head:
                self._count_error(index, error, context)
                return exchange.writer.failure(error)
            return self._refuse(index, entry, error, context)

    def _refuse(self, index: int, entry: _Open, error: BaseException, context: Any) -> bytes:
        if isinstance(error, EngineDead):
            # Not an Exception, so that TorchServe's worker ends, its clients are told, and a new one is started.
            raise SystemExit(f"The worker ends: {error}")
        if not isinstance(error, RequestError):
            trace = "".join(traceback.format_tb(error.__traceback__))
            logger.error("Admission failed on one request: %s\n%s", type(error).__name__, trace)
            error = ModelFailure("The handler failed on this request.", code="handler_failure")
        self._count_error(index, error, context)
        context.set_response_content_type(index, "application/json")
        context.set_response_status(error.status, protocol.phrase(error.status), index)
        if isinstance(error, Overloaded | EngineFailure):
            context.set_response_header(index, "Retry-After", "1")
        return error_answer(error, openai=entry.openai)

    def _count_error(self, index: int, error: RequestError, context: Any) -> None:
        self.metrics.error(error.code, error.status)
        logger.info("request %s is refused: %d %s", context.request_ids[index], error.status, error.code)

    # When no call comes

    def _watch_for_ever(self) -> None:
        while True:
            time.sleep(LEASE / 8)
            try:
                with self._lock:
                    self._watch()
            except Exception as error:  # noqa: BLE001 - whatever it was, requests must be watched over
                logger.error("Watching over requests failed: %s", type(error).__name__)

    def _watch(self) -> None:
        if time.monotonic() - self._renewed > LEASE:
            for id, entry in self._open.items():
                self._drop(id, entry)
        self.look()
        self.metrics.emit()

    def _drop(self, id: str, entry: _Open) -> None:
        """Free what a request holds. Should a call come for it after all, it is told."""
        if entry.dropped:
            return
        entry.dropped = True
        self.metrics.count("batchserve_cancelled_total")

        def drop(_: Any) -> None:
            if entry.exchange is not None:
                entry.exchange.error = _dropped()
            self.abandon(id)

        entry.admission.add_done_callback(drop)


def _dropped() -> EngineFailure:
    return EngineFailure("No moment was found for this request; try again.", code="dropped")
