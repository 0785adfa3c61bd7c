"""One setting after another on a TorchServe of its own: served, put under load, measured.

The server is started once. Another setting is registered in the place of the last one, whose workers are gone by then:
that is exact, since batch size and delay are said at registration, and threads and dtype are in the archive that is
registered (a variant of the one under test). Only the start of Java is saved, not that of the workers.
"""

import asyncio
import contextlib
import math
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from scripts.lib import archive, load, variant
from scripts.lib.archive import Archive
from scripts.lib.benchmark import server as make_server
from scripts.lib.errors import UserError
from scripts.lib.hopeless import Watch
from scripts.lib.load import LoadResult, Target, closed_loop, open_loop
from scripts.lib.objective import Objective, judged_ms
from scripts.lib.scaling import Scaler
from scripts.lib.scrape import BatchingWindow, Counting
from scripts.lib.sent import Sent
from scripts.lib.server import StartError, TorchServe
from scripts.lib.stats import summarize
from scripts.lib.tuning import Kind, Point, Setting

START_S, LEAST_START_S = 300.0, 60.0  # that workers may take; and where little of the budget is left
GONE_S = 20.0  # that the workers of the last setting may take to go
WARM_UP = 32
LEAST_REQUESTS = {Kind.SEARCH: 60, Kind.FINAL: 200}  # of a window, as p95 needs them
BEYOND = {Kind.SEARCH: 3, Kind.FINAL: 10}  # requests above a percentile; fewer make none
LONGEST = 3.0  # times the usual length, that a window may be stretched to for them
WORST = -99.0  # a margin that says nothing but that requests were lost

Progress = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Windows:
    """Seconds of a window of each kind."""

    search: float
    final: float
    quiet: float

    @classmethod
    def within(cls, budget_s: float) -> "Windows":
        """Lengths that leave a budget room for some dozens of windows."""
        return cls(
            search=min(10.0, max(1.0, budget_s / 60)),
            final=min(30.0, max(2.0, budget_s / 20)),
            quiet=min(8.0, max(1.0, budget_s / 60)),
        )


@dataclass
class Trials:
    """Measures settings of one archive. A context manager: whatever it started is gone after it.

    Args:
        about: the archive.
        sent: the requests.
        objective: to judge by.
        windows: their lengths.
        work: an empty directory, on the archive's file system if that can be.
        cores: that workers divide where the archive says nothing of threads.
        gpus: that workers are spread over.
        queue: requests that may wait.
        progress: shows that a labelled step is under way.
        left: seconds of the budget that are left.
    """

    about: Archive
    sent: Sent
    objective: Objective
    windows: Windows
    work: Path
    cores: int
    gpus: int
    queue: int
    progress: Progress
    left: Callable[[], float] = lambda: START_S
    _server: TorchServe | None = None
    _serving: Setting | None = None
    _served_once: bool = False
    _starts: int = 0
    _files: dict[tuple[int | None, str | None], Archive] = field(default_factory=dict)

    def __enter__(self) -> "Trials":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop(graceful=True)

    def seconds(self, kind: Kind, rate: float | None) -> float:
        """How long a window lasts: longer than usual where so low a rate makes few requests for the objective."""
        if kind == Kind.QUIET:
            return self.windows.quiet
        usual = self.windows.search if kind == Kind.SEARCH else self.windows.final
        if rate is None:
            whole = self.sent.trace.seconds if self.sent.trace else 0.0
            return whole if kind == Kind.FINAL else min(usual, whole)
        return min(max(usual, least_requests(self.objective, kind) / rate), LONGEST * usual)

    def measure(self, setting: Setting, kind: Kind, rate: float | None) -> Point:
        """Serve a setting and measure a window of it.

        Raises:
            UserError: no server can be started here at all, whatever the setting.
        """
        seconds = self.seconds(kind, rate)
        if setting != self._serving:
            try:
                with self.progress(f"serving {setting}"):
                    self._serve(setting)
            except UserError as failure:
                self._stop(graceful=False)
                if not self._served_once and not isinstance(failure, StartError):
                    raise
                return Point(setting=setting, kind=kind, rate=rate, seconds=seconds, met=False, failure=str(failure))
            self._served_once = True
        label = "one client" if kind == Kind.QUIET else "the trace" if rate is None else f"{rate:g}/s"
        with self.progress(f"{label}, {seconds:.0f} s"):
            try:
                result, batching, stopped = load.run(self._window(kind, rate, seconds))
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as failure:  # of the metrics
                self._stop(graceful=False)
                return Point(
                    setting=setting, kind=kind, rate=rate, seconds=seconds, met=False,
                    failure=f"the server is gone: {failure}",
                )  # fmt: skip
        return _point(setting, kind, rate, seconds, result, batching, stopped, self.objective)

    # Serving

    def _serve(self, setting: Setting) -> None:
        self._serving = None
        about = self._variant(setting)
        if self._server is None or not self._server.running:
            self._start(about, setting)
        else:
            self._register(self._server, about, setting)
        self._serving = setting

    def _start(self, about: Archive, setting: Setting) -> None:
        self._stop(graceful=False)
        self._starts += 1
        directory = self.work / f"server-{self._starts}"
        directory.mkdir()
        self._server = make_server(
            about, directory, batch_size=setting.batch_size, workers=setting.workers,
            max_batch_delay=setting.max_batch_delay, queue=self.queue, gpus=self.gpus, model_api=True,
        )  # fmt: skip
        self._server.start()
        self._server.wait_ready(self._patience)

    @property
    def _patience(self) -> float:
        return min(START_S, max(LEAST_START_S, self.left()))

    def _register(self, server: TorchServe, about: Archive, setting: Setting) -> None:
        name, version, client = about.name, about.version or "1.0", server.management
        with contextlib.suppress(UserError):  # not there: the last registration failed
            client.unregister(name, version)
        deadline = time.monotonic() + GONE_S
        while len(server.processes()) > 1:  # Java stays
            if time.monotonic() > deadline:
                raise UserError("the workers of the last setting do not go")
            time.sleep(0.1)
        client.register(
            about.path.name, name=name, workers=setting.workers, batch_size=setting.batch_size,
            max_batch_delay=setting.max_batch_delay, timeout=self._patience,
        )  # fmt: skip
        Scaler(client, name, version, START_S).wait_ready(setting.workers, time.monotonic() + self._patience)

    def _stop(self, *, graceful: bool) -> None:
        self._serving = None
        if self._server is not None:
            self._server.stop(graceful=graceful)
            self._server = None

    def _variant(self, setting: Setting) -> Archive:
        """The archive that runs a setting's threads and dtype, in a store of our own."""
        changes = changes_for(self.about, setting, self.cores)
        key = changes.get("threads"), changes.get("dtype")
        if key not in self._files:
            store = self.work / "store"
            store.mkdir(exist_ok=True)
            path = store / f"variant-{len(self._files)}.mar"
            if changes:
                variant.write(self.about, changes, path)
            else:
                try:
                    path.hardlink_to(self.about.path.resolve())
                except OSError:  # another file system
                    shutil.copyfile(self.about.path, path)
            self._files[key] = archive.read(path)
        return self._files[key]

    # Measuring

    async def _window(
        self, kind: Kind, rate: float | None, seconds: float
    ) -> tuple[LoadResult, BatchingWindow | None, bool]:
        assert self._server is not None
        urls, name = self._server.urls, self.about.name
        patience = max(30.0, 5 * self.objective.limit_ms / 1e3)
        target = Target(f"{urls.inference}/predictions/{name}", self._server.headers(), patience)
        counting = Counting(f"{urls.metrics}/metrics", name)
        bodies = self.sent.bodies
        warmup = max(WARM_UP, 2 * (self._serving.batch_size if self._serving else 1))
        if kind == Kind.QUIET:
            result = await closed_loop(
                target, bodies, clients=1, duration_s=seconds, warmup=4, before=counting.before
            )  # fmt: skip
            return result, await counting.after(sum(sample.ok for sample in result.samples)), False
        dues = self.sent.dues(kind, rate, seconds)
        stop = asyncio.Event()
        watch = Watch(self.objective, [due.at for due in dues], stop)
        ticking: list[asyncio.Task[None]] = []

        async def begin() -> None:
            await counting.before()
            ticking.append(asyncio.ensure_future(watch.tick()))

        try:
            first = [bodies[number % len(bodies)] for number in range(warmup)]
            result = await open_loop(target, dues, warmup=first, before=begin, on_sample=watch.add, stop=stop)
        finally:
            for task in ticking:
                task.cancel()
        if stop.is_set():
            return result, None, True
        return result, await counting.after(sum(sample.ok for sample in result.samples)), False


def least_requests(objective: Objective, kind: Kind) -> int:
    """How many requests a window needs for the strictest percentile of an objective to be one."""
    shares = [float(each.figure[1:]) / 100 for each in objective.conditions if each.figure not in ("max", "mean")]
    return max(LEAST_REQUESTS[kind], math.ceil(BEYOND[kind] / (1 - max(shares, default=0.0)) - 1e-6))


def changes_for(about: Archive, setting: Setting, cores: int, *, alone: bool = True) -> dict[str, Any]:
    """What the archive's `handler:` section must say otherwise for a setting; nothing where it is right as it is.

    Args:
        about: the archive.
        setting: to be run.
        cores: that workers divide where the archive says nothing of threads.
        alone: whether no other model's workers are counted there too.
    """
    changes: dict[str, Any] = {}
    by_itself = about.settings.get("threads") or (max(1, cores // setting.workers) if alone else None)
    if setting.threads is not None and setting.threads != by_itself:
        changes["threads"] = setting.threads
    if setting.dtype is not None and setting.dtype != about.settings.get("dtype", "auto"):
        changes["dtype"] = setting.dtype
    return changes


def _point(
    setting: Setting,
    kind: Kind,
    rate: float | None,
    seconds: float,
    result: LoadResult,
    batching: BatchingWindow | None,
    stopped: bool,
    objective: Objective,
) -> Point:
    summary, judged = summarize(result), judged_ms(result)
    answered = [sample.latency_s * 1e3 for sample in result.samples if sample.ok]
    margin = None if stopped else objective.margin(judged)  # what was answered in time says nothing of the rest
    return Point(
        setting=setting,
        kind=kind,
        rate=rate,
        seconds=seconds,
        met=not stopped and objective.met(judged),
        margin=None if margin is None else max(margin, WORST),
        judged_ms=objective.conditions[0].of(answered),
        requests=len(result.samples) + result.unanswered,
        per_s=summary.requests_per_s,
        p50_ms=summary.p50_ms,
        p95_ms=summary.p95_ms,
        p99_ms=summary.p99_ms,
        errors=summary.errors,
        shed=summary.shed,
        stopped=stopped,
        batch_size=None if batching is None else batching.effective_batch_size,
        padding=None if batching is None else batching.padding_share,
        generator_share=result.cpu_share,
        bottleneck=result.was_bottleneck,
    )
