"""A load generator that tells the truth about the server, and about itself.

Closed loop: N clients, each sending its next request when the last one is answered. Open loop: requests are sent when
they are due, whatever became of earlier ones. Whoever decides *when* a request is due hands that time to
`_Sender.send`, which counts latency from it; in a closed loop it is the moment of sending, in an open loop it is the
scheduled time, so that a stalled server can't hide its queue.
"""

import asyncio
import itertools
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeVar

import aiohttp

from scripts.lib.workloads import Body

# Above this share of one core the event loop, which is one thread, delays requests by itself.
BOTTLENECK_SHARE = 0.8
# An open loop that sends later than that is not the one that was asked for.
LATE_S = 0.05
WARM_CLIENTS = 8
# The status of a request that got no answer at all: refused, reset, timed out.
NO_ANSWER = 0


@dataclass(frozen=True)
class Target:
    """Where requests go: the full URL of the prediction and the headers of each request."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as the client saw it.

    Attributes:
        due_s: when it was due, seconds from the start of the measured window.
        latency_s: from then to the last byte of the answer.
        status: the HTTP status, or `NO_ANSWER`.
        received: bytes of the answer's body.
        texts: texts in the request.
        tokens: tokens in the request.
        error: what went wrong when there was no answer.
    """

    due_s: float
    latency_s: float
    status: int
    received: int
    texts: int
    tokens: int
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether it was answered with a 2xx status."""
        return 200 <= self.status < 300


@dataclass(frozen=True)
class LoadResult:
    """The raw samples of one measured window.

    Attributes:
        samples: in order of completion.
        clients: concurrent clients; of an open loop, the most requests that were in flight at once.
        wall_s: from the first request sent to the last one answered.
        cpu_share: CPU time of this process ÷ wall time; 1.0 is one core.
        loop_share: the same of the event loop's thread alone, which can't pass 1.0.
        late_s: how long after they were due the latest requests of an open loop were sent, as the 99th percentile.
    """

    samples: tuple[Sample, ...]
    clients: int
    wall_s: float
    cpu_share: float
    loop_share: float
    late_s: float = 0.0

    @property
    def was_bottleneck(self) -> bool:
        """Whether the generator itself was too busy for its latencies to be trusted."""
        return self.loop_share > BOTTLENECK_SHARE or self.late_s > LATE_S


@dataclass(frozen=True, slots=True)
class Due:
    """A request of an open loop.

    Attributes:
        at: when it is due, seconds from the start of the window.
        body: what is sent.
        headers: of this request alone.
    """

    at: float
    body: Body
    headers: Mapping[str, str] = field(default_factory=dict)


T = TypeVar("T")
Hook = Callable[[], Awaitable[None]]
OnSample = Callable[[Sample], None]


async def closed_loop(
    target: Target,
    bodies: Sequence[Body],
    *,
    clients: int,
    requests: int | None = None,
    duration_s: float | None = None,
    warmup: int = 0,
    before: Hook | None = None,
    on_sample: OnSample | None = None,
) -> LoadResult:
    """Send `bodies` in a cycle from `clients` clients until a count or a time is reached.

    Requests in flight at the end of the time are waited for and counted. Warm-up requests are sent first, from the
    same clients and over the same connections, and are all answered before the window opens.

    Args:
        target: where to send.
        bodies: the requests, in order; the measured window starts at the first one whatever the warm-up sent.
        clients: concurrent clients, each with one connection.
        requests: how many to measure; this or `duration_s`.
        duration_s: how long to send for, in seconds.
        warmup: how many unmeasured requests go first.
        before: awaited between warm-up and window (read the server's counters here).
        on_sample: called with each measured sample.

    Raises:
        ValueError: neither or both of `requests` and `duration_s`, or nothing to send.
    """
    if (requests is None) == (duration_s is None):
        raise ValueError("give either requests or duration_s")
    if clients < 1 or not bodies:
        raise ValueError("a load needs at least one client and one body")

    async with _session(target, clients) as session:
        sender = _Sender(session, target.url)
        if warmup:
            await _drive(sender, clients, itertools.islice(itertools.cycle(bodies), warmup))
        if before is not None:
            await before()
        feed: Iterator[Body] = itertools.cycle(bodies)
        if requests is not None:
            feed = itertools.islice(feed, requests)
        sender.begin(on_sample)
        cpu, loop = time.process_time(), time.thread_time()
        await _drive(sender, clients, feed, None if duration_s is None else sender.start + duration_s)
        wall = time.perf_counter() - sender.start
        return LoadResult(
            tuple(sender.samples),
            clients,
            wall,
            (time.process_time() - cpu) / wall,
            (time.thread_time() - loop) / wall,
        )


async def open_loop(
    target: Target,
    dues: Iterable[Due],
    *,
    warmup: Sequence[Body] = (),
    before: Hook | None = None,
    on_sample: OnSample | None = None,
) -> LoadResult:
    """Send requests when they are due, however many are still unanswered; all are waited for and counted.

    Args:
        target: where to send.
        dues: the requests, by ascending time.
        warmup: unmeasured requests that go first, a few at a time.
        before: awaited between warm-up and window.
        on_sample: called with each measured sample.
    """
    async with _session(target, 0) as session:
        sender = _Sender(session, target.url)
        if warmup:
            await _drive(sender, min(len(warmup), WARM_CLIENTS), iter(warmup))
        if before is not None:
            await before()
        sender.begin(on_sample)
        cpu, loop = time.process_time(), time.thread_time()
        late: list[float] = []
        async with asyncio.TaskGroup() as group:
            for due in dues:
                moment = sender.start + due.at
                # Also where it is late already: answers that have come must be read between two sends
                await asyncio.sleep(max(0.0, moment - time.perf_counter()))
                late.append(time.perf_counter() - moment)
                group.create_task(sender.send(due.body, moment, due.headers))
        wall = time.perf_counter() - sender.start
        late.sort()
        return LoadResult(
            tuple(sender.samples),
            sender.most,
            wall,
            (time.process_time() - cpu) / wall,
            (time.thread_time() - loop) / wall,
            late[int(0.99 * (len(late) - 1))] if late else 0.0,
        )


def _session(target: Target, connections: int) -> aiohttp.ClientSession:
    """A session of at most so many connections; 0 is no limit."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=connections, keepalive_timeout=300),
        headers={"Content-Type": "application/json", **target.headers},
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=target.timeout_s),
        auto_decompress=False,
    )


def run(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` from the main thread, in which TERM and HUP end the work as surely as Ctrl-C does.

    A handler that raises, as that of `stop_on_signals` does, may be called in the middle of the HTTP library's parser,
    which takes any exception for a broken answer. So the signal only cancels the work, and the handler that was there
    is called afterwards.
    """
    received: list[int] = []

    async def cancellable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel(number: int, _frame: FrameType | None) -> None:
            received.append(number)
            loop.call_soon_threadsafe(task.cancel)

        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        raising = {number: handler for number, handler in before.items() if callable(handler)}
        for number in raising:
            signal.signal(number, cancel)
        try:
            return await work
        finally:
            for number, handler in raising.items():
                signal.signal(number, handler)

    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        for number in received:
            handler = signal.getsignal(number)
            if callable(handler):
                handler(number, None)
        raise


class _Sender:
    """Sends single requests and keeps what came of them."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self._on_sample: OnSample | None = None
        self.samples: list[Sample] = []
        self.start = time.perf_counter()
        self.most = self._open = 0

    def begin(self, on_sample: OnSample | None) -> None:
        """Forget what was sent so far and start the clock."""
        self._on_sample = on_sample
        self.samples = []
        self.start = time.perf_counter()
        self.most = 0

    async def send(self, body: Body, due: float, headers: Mapping[str, str] | None = None) -> None:
        """Send one request that was due at `due` (on `time.perf_counter`) and record it."""
        status, received, error = NO_ANSWER, 0, ""
        self._open += 1
        self.most = max(self.most, self._open)
        try:
            async with self._session.post(self._url, data=body.data, headers=headers) as response:
                received = len(await response.read())
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        finally:
            self._open -= 1
        latency = time.perf_counter() - due
        sample = Sample(due - self.start, latency, status, received, body.texts, body.tokens, error)
        self.samples.append(sample)
        if self._on_sample is not None:
            self._on_sample(sample)


async def _drive(sender: _Sender, clients: int, feed: Iterator[Body], deadline: float | None = None) -> None:
    """Run `clients` closed-loop clients over one shared feed; a failure or a cancel ends them all."""

    async def client() -> None:
        # One event loop, and no await between a look at the feed and the send: the feed needs no lock.
        while deadline is None or time.perf_counter() < deadline:
            body = next(feed, None)
            if body is None:
                return
            await sender.send(body, due=time.perf_counter())

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
