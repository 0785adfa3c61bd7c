"""A running server under load, anyone's: window by window, with what its own counters say where it has ours."""

import asyncio
import contextlib
import dataclasses
import re
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from scripts.lib.errors import UserError
from scripts.lib.load import NO_ANSWER, LoadResult, OnSample, Received, Target, closed_loop, open_loop
from scripts.lib.load_plan import Closed, Load, Stretch
from scripts.lib.objective import Goodput, Objective, goodput
from scripts.lib.refusals import token_rejected
from scripts.lib.scrape import BatchingWindow, Counting, scrape, settled
from scripts.lib.stats import SHED, Second, Summary, distribution, summarize, timeline
from scripts.lib.workloads import Body

METRICS_PORT = 8082
# The first request says nothing of the others, unless it says that there is nothing here or no way in.
REFUSALS = {401: "it wants another key: --token", 403: "it wants another key: --token", 404: "no such model or path"}
_MODEL = re.compile(r"/(?:predictions|models)/([^/:]+)")
_FAILED = (aiohttp.ClientError, TimeoutError, OSError, ValueError)


class Shown(Protocol):
    """Shows that a labelled window is under way, and takes its samples."""

    def __call__(self, label: str, load: Load) -> AbstractContextManager[OnSample]: ...


@dataclass(frozen=True)
class Generator:
    """What the load generator says of itself.

    Attributes:
        cpu_share: of its process, in cores.
        loop_share: of the thread that sends, which can't pass 1.
        late_s: 99th percentile of how late an open loop sent.
        bottleneck: whether it was too busy for its latencies to be trusted.
    """

    cpu_share: float
    loop_share: float
    late_s: float
    bottleneck: bool


@dataclass(frozen=True)
class Window:
    """One measured window.

    Attributes:
        label: what load it was.
        open_loop: whether latency is counted from when a request was due, not from when it was sent.
        clients: concurrent clients; of an open loop, the most requests in flight at once.
        due_per_s: requests that were due per second, or were sent in a closed loop.
        summary: in figures.
        goodput: under the objective; None where there is none.
        batching: what the server's counters say; None where it has none of ours.
        generator: of the load generator.
        unanswered: requests still in flight when the load was stopped.
        failures: what went wrong where there was no answer → how often.
        timeline: by the second.
        distribution: latencies as (milliseconds, share within).
        part: whether it is a stretch of the window before it.
    """

    label: str
    open_loop: bool
    clients: int
    due_per_s: float
    summary: Summary
    goodput: Goodput | None
    batching: BatchingWindow | None
    generator: Generator
    unanswered: int
    failures: dict[str, int]
    timeline: tuple[Second, ...]
    distribution: tuple[tuple[float, float], ...]
    part: bool = False


@dataclass(frozen=True)
class Driven:
    """Everything that was measured, and what a reader must know to judge it."""

    windows: tuple[Window, ...]
    notes: tuple[str, ...]
    interrupted: bool


@dataclass(frozen=True)
class Drive:
    """A server and what to put it under.

    Attributes:
        target: where requests go.
        bodies: what is sent.
        loads: the windows, in order.
        warmup: unmeasured requests before each window.
        objective: to judge by.
        metrics: the server's metrics; None looks on the same host.
    """

    target: Target
    bodies: Sequence[Body]
    loads: Sequence[Load]
    warmup: int = 32
    objective: Objective | None = None
    metrics: str | None = None

    async def run(self, shown: Shown) -> Driven:
        """Measure every window. Ctrl-C ends it with what was measured so far; a second one ends the command.

        Raises:
            UserError: nothing answers there, the server lets nobody in, or named metrics can't be read.
        """
        notes: list[str] = []
        with _stop_on_interrupt() as stop:
            await self._knock(notes)
            counting = await self._counting(notes)
            windows: list[Window] = []
            for load in self.loads:
                if stop.is_set():
                    break
                with shown(load.label, load) as on_sample:
                    result, batching = await self._window(load, counting, on_sample, stop, notes)
                if result.samples or result.unanswered or not stop.is_set():
                    windows += self._judged(load, result, batching, stop.is_set())
        if stop.is_set():
            notes.append("interrupted: this is what was measured so far")
        return Driven(tuple(windows), (*notes, *_notes(windows)), stop.is_set())

    async def _knock(self, notes: list[str]) -> None:
        """Send one request before any other, to find out whether there is anything to measure."""
        heard: list[bytes] = []

        async def listen(response: aiohttp.ClientResponse) -> Received:
            heard.append(await response.read())
            return Received(len(heard[-1]))

        target = dataclasses.replace(self.target, reader=listen)
        (sample,) = (await closed_loop(target, self.bodies[:1], clients=1, requests=1)).samples
        where = shown_url(self.target.url)
        if sample.status == NO_ANSWER:
            raise UserError(f"{where} does not answer: {sample.error}", "is it the URL of a model?")
        status = 401 if heard and token_rejected(sample.status, heard[-1]) else sample.status
        if status in REFUSALS:
            raise UserError(f"{where} answers {sample.status}", REFUSALS[status])
        if not sample.ok:
            notes.append(f"the very first request was answered with status {sample.status}")

    async def _counting(self, notes: list[str]) -> Counting | None:
        url, model = metrics_url(self.target.url, self.metrics), model_of(self.target.url)
        try:
            if model is None:
                await scrape(url)
                found = False
            else:
                found = (await settled(url, model, 1)).total("batchserve_requests_total", model) > 0
        except _FAILED as failure:
            if self.metrics is not None:
                raise UserError(f"{shown_url(url)} can't be read: {failure}", "leave out --metrics") from failure
            notes.append(f"no batch sizes and no padding: there are no metrics at {shown_url(url)}")
            return None
        if not found or model is None:
            which = f"of batchserve for {model}" if model else "whose model the URL names"
            notes.append(f"no batch sizes and no padding: {shown_url(url)} has no counters {which}")
            return None
        return Counting(url, model)

    async def _window(
        self, load: Load, counting: Counting | None, on_sample: OnSample, stop: asyncio.Event, notes: list[str]
    ) -> tuple[LoadResult, BatchingWindow | None]:
        before = None if counting is None else counting.before
        try:
            if isinstance(load, Closed):
                result = await closed_loop(
                    self.target,
                    self.bodies,
                    clients=load.clients,
                    requests=load.requests,
                    duration_s=load.seconds,
                    warmup=max(self.warmup, load.clients) if self.warmup else 0,
                    before=before,
                    on_sample=on_sample,
                    stop=stop,
                )
            else:
                warmup = [self.bodies[number % len(self.bodies)] for number in range(self.warmup)]
                result = await open_loop(
                    self.target, load.dues(self.bodies), warmup=warmup, before=before, on_sample=on_sample, stop=stop
                )
        except _FAILED as failure:  # of the metrics: the load's own failures are samples
            raise UserError(f"the server's metrics are gone: {failure}", "did it stop?") from failure
        if counting is None:
            return result, None
        answered = sum(sample.ok for sample in result.samples)
        try:
            batching = await counting.after(answered)
        except _FAILED as failure:
            notes.append(f"{load.label}: no batch sizes and no padding, the server's metrics are gone: {failure}")
            return result, None
        if not result.unanswered and batching.requests > len(result.samples):
            others = batching.requests - len(result.samples)
            notes.append(f"{load.label}: {others} requests of others reached the model meanwhile")
        return result, batching

    def _judged(
        self, load: Load, result: LoadResult, batching: BatchingWindow | None, stopped: bool
    ) -> Iterator[Window]:
        opened = not isinstance(load, Closed)
        sending = result.wall_s if isinstance(load, Closed) or stopped else load.seconds or result.wall_s
        yield self._told(load.label, result, batching, opened, sending, part=False)
        for stretch in () if isinstance(load, Closed) else load.stretches:
            if stretch.start < result.wall_s:
                part = during(result, stretch, stopped)
                yield self._told(stretch.label, part, None, opened, stretch.end - stretch.start, part=True)

    def _told(
        self,
        label: str,
        result: LoadResult,
        batching: BatchingWindow | None,
        opened: bool,
        sending_s: float,
        part: bool,
    ) -> Window:
        sent = len(result.samples) + result.unanswered
        return Window(
            label=label,
            open_loop=opened,
            clients=result.clients,
            due_per_s=sent / sending_s,
            summary=summarize(result),
            goodput=None if self.objective is None else goodput(result, self.objective),
            batching=batching,
            generator=Generator(result.cpu_share, result.loop_share, result.late_s, result.was_bottleneck),
            unanswered=result.unanswered,
            failures=dict(Counter(sample.error for sample in result.samples if sample.error).most_common(5)),
            timeline=timeline(result.samples),
            distribution=distribution(result.samples),
            part=part,
        )


def during(result: LoadResult, stretch: Stretch, stopped: bool) -> LoadResult:
    """The requests that were due in a stretch, as a window of its own that lasts until the last of them is answered."""
    nearly = 1e-6  # a due time is a difference of clocks
    samples = tuple(
        dataclasses.replace(sample, due_s=sample.due_s - stretch.start)
        for sample in result.samples
        if stretch.start - nearly <= sample.due_s < stretch.end - nearly
    )
    least = (min(stretch.end, result.wall_s) if stopped else stretch.end) - stretch.start
    wall = max([least, *(sample.due_s + sample.latency_s for sample in samples)])
    return dataclasses.replace(result, samples=samples, wall_s=wall, unanswered=0)


@contextlib.contextmanager
def _stop_on_interrupt() -> Iterator[asyncio.Event]:
    """An event that the first Ctrl-C sets; the second one does what it always does."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGINT)

    def interrupted() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)

    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield stop
    finally:
        if not stop.is_set():
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, before)


def model_of(url: str) -> str | None:
    """The model that a prediction URL of TorchServe or KServe names; None where it names none."""
    found = _MODEL.search(urlsplit(url).path)
    return found.group(1) if found else None


def metrics_url(url: str, named: str | None) -> str:
    """Where a server's metrics are: as named, or where TorchServe has them on the same host."""
    parts = urlsplit(url if named is None else named)
    if named is not None:
        return named if parts.path.strip("/") else f"{named.rstrip('/')}/metrics"
    host = parts.hostname or ""
    return f"http://{f'[{host}]' if ':' in host else host}:{METRICS_PORT}/metrics"


def shown_url(url: str) -> str:
    """A URL as it may be printed and written down: without user, password and query, which may hold keys."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def check_url(url: str, option: str) -> str:
    """A URL of HTTP, without spaces around it.

    Raises:
        UserError: it is none.
    """
    url = url.strip()
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        known = False
    if not known:
        raise UserError(f"{option} {shown_url(url) if '@' not in url else 'URL'}: no URL of HTTP", "http://host:8080/…")
    return url


def _notes(windows: Sequence[Window]) -> Iterator[str]:
    refused = " or ".join(map(str, sorted(SHED)))
    for window in windows:
        generator = window.generator
        if window.part:
            continue
        if generator.bottleneck:
            yield (
                f"{window.label}: the load generator was the bottleneck ({generator.loop_share:.0%} of its thread, "
                f"{generator.late_s * 1e3:.0f} ms late); the server may be faster than this shows"
            )
        if window.summary.errors:
            statuses = ", ".join(
                f"{'no answer' if status == NO_ANSWER else status} × {count}"
                for status, count in window.summary.errors_by_status.items()
            )
            first = next((f" ({error})" for error in window.failures), "")
            yield f"{window.label}: errors: {statuses}{first}"
        if window.summary.shed:
            yield f"{window.label}: the server refused {window.summary.shed} requests as too many ({refused})"
        if window.unanswered:
            yield f"{window.label}: {window.unanswered} requests were still unanswered when it was stopped"
    shares = [window.generator.cpu_share for window in windows]
    if shares:
        yield f"the load generator took at most {max(shares):.2f} cores"
