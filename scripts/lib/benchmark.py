"""A benchmark run: our own server and the offline yardstick, on the CPU, in turns so that noise hits both sides.

For each workload the order is offline, server, offline, server, …, offline; a round's ratio compares the server's
texts/s with the mean of the two offline runs around it. The two never run at the same time.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from scripts.lib import load, properties
from scripts.lib.addresses import free_ports
from scripts.lib.archive import Archive, extract, read, write
from scripts.lib.errors import UserError
from scripts.lib.load import LoadResult, Target, closed_loop
from scripts.lib.machine import Machine
from scripts.lib.memory import PeakMemory
from scripts.lib.offline import Offline, OfflineError, SingleText
from scripts.lib.recipe import Order, prepare
from scripts.lib.report import OfflineRun, Point, Round
from scripts.lib.scrape import BatchingWindow, Counting
from scripts.lib.server import TorchServe
from scripts.lib.serving import Serving
from scripts.lib.source import resolve
from scripts.lib.stats import summarize
from scripts.lib.subjects import SUBJECTS, Subject
from scripts.lib.workloads import BLOCK, Body, Vocabulary, Workload, make_workload

# A full pass over the pool at many clients, so that both sides run exactly the same texts.
POOL_REQUESTS = 1000
# The yardstick's rate doesn't depend on how many texts there are beyond this; whole blocks keep the mixture.
OFFLINE_TEXTS = 16 * BLOCK
SINGLE_TEXTS = 30
LISTS_LEAST = 16
AGREEMENT_TEXTS = 16
WARM_UP = 32
FEW_SCORES = 8  # numbers of an answer that are scores, not a vector

Progress = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Settings:
    """What to measure, and how the server is set up.

    Attributes:
        threads: torch's threads per worker; None divides the cores among the workers.
        max_batch_delay: milliseconds.
        requests: measured requests per window, a tenth of it for lists; None: by workload and clients.
        duration_s: seconds per window instead of a count.
        batch_sizes: servers to compare on the short workload; the first one runs everything.
        subject: the task, and how to speak of it.
    """

    workloads: tuple[str, ...]
    clients: tuple[int, ...]
    workers: int
    threads: int | None
    max_batch_delay: int
    batch_sizes: tuple[int, ...]
    rounds: int
    requests: int | None = None
    duration_s: float | None = None
    seed: int = 0
    subject: Subject = SUBJECTS["embedding"]

    def total_threads(self, cores: int) -> int:
        """Threads of all workers together: what the yardstick gets too."""
        return self.workers * (self.threads or max(1, cores // self.workers))

    def requests_for(self, workload: str, clients: int) -> int:
        """Measured requests of a window, where no duration ends it."""
        if self.requests is not None:
            return max(LISTS_LEAST, self.requests // 10) if workload == "lists" else self.requests
        if workload == "lists":
            return max(LISTS_LEAST, 3 * clients)
        return POOL_REQUESTS if clients >= 16 else max(100, 25 * clients)

    def pool(self, workload: str) -> int:
        """Distinct requests to make for a workload."""
        if self.duration_s is not None:
            return 200 if workload == "lists" else POOL_REQUESTS
        return max(self.requests_for(workload, clients) for clients in self.clients)


@dataclass
class Measured:
    """What a dtype's run found."""

    points: list[Point] = field(default_factory=list)
    offline: list[OfflineRun] = field(default_factory=list)
    agreement: float | None = None


def run(archive: Path, dtype: str, settings: Settings, machine: Machine, work: Path, progress: Progress) -> Measured:
    """Measure one archive; everything that is started is stopped again, whatever happens.

    Args:
        archive: the .mar; its model directory is the yardstick's too.
        dtype: what the archive computes in, and the yardstick with it.
        settings: what to measure.
        machine: where.
        work: an empty directory for states and extracted files.
        progress: shows that a labelled step is under way.

    Raises:
        UserError: the server doesn't start or answers with errors, or the model can't be measured.
    """
    about = read(archive)
    extracted = work / "extracted"
    extract(archive, extracted)
    model = extracted / str(about.settings.get("model", "model"))
    try:
        vocabulary = Vocabulary.load(model)
    except Exception as failure:  # tokenizers raises bare ones, whatever is wrong with the file
        raise UserError(f"{archive}: no texts can be made for this model: {failure}") from failure
    pools = [
        make_workload(name, vocabulary, settings.pool(name), settings.seed, settings.subject)
        for name in settings.workloads
    ]
    with ExitStack() as stack:
        with progress(f"the offline library loads the model ({dtype})"):
            offline = _offline(stack, model, dtype, settings.total_threads(machine.cores), settings.subject.task)
        servers = {}
        for size in settings.batch_sizes:
            with progress(f"TorchServe starts ({dtype}, batch size {size})"):
                servers[size] = stack.enter_context(
                    server(
                        about,
                        work,
                        batch_size=size,
                        workers=settings.workers,
                        max_batch_delay=settings.max_batch_delay,
                        queue=max(1000, 2 * max(settings.clients), size * settings.workers),
                    )
                )
        return _Run(about.name, dtype, settings, servers, offline, progress).measure(pools)


def _offline(stack: ExitStack, model: Path, dtype: str, threads: int, task: str) -> Offline:
    try:
        return stack.enter_context(Offline(model, dtype, threads, task))
    except OfflineError as failure:
        raise UserError(str(failure), hint="pip install sentence-transformers (the extra `bench`)") from failure


def build(model: str, task: str, overrides: Mapping[str, Any], directory: Path) -> tuple[Path, float]:
    """Build an archive without verifying it.

    Args:
        model: as `resolve` takes it.
        task: what it is for.
        overrides: keys of the `handler:` section.
        directory: an empty one for the store and what is made on the way.

    Returns:
        Its path, and the seconds that took.
    """
    store, work = directory / "store", directory / "build"
    store.mkdir()
    work.mkdir()
    source = resolve(model)
    start = time.perf_counter()
    recipe = prepare(Order(source, name="bench", version="1.0", task=task, overrides=overrides), work)
    path = store / "bench.mar"
    write(path, recipe.contents, recipe.members)
    return path, time.perf_counter() - start


def server(
    about: Archive,
    work: Path,
    *,
    batch_size: int,
    workers: int,
    max_batch_delay: int,
    queue: int,
    gpus: int = 0,
    model_api: bool = False,
) -> TorchServe:
    """A server of one archive on free ports, on the CPU as the yardsticks are unless told otherwise; not yet started.

    Args:
        about: the archive.
        work: a directory for its properties and its state.
        batch_size, workers, max_batch_delay, queue: as serving.yaml has them; the delay in milliseconds.
        gpus: at most so many.
        model_api: whether models may be registered and unregistered while it runs.
    """
    ports = ("inference_port", "management_port", "metrics_port", "grpc_inference_port", "grpc_management_port")
    served = {
        "archive": about.path.name,
        "version": about.version,
        "workers": workers,
        "batch_size": batch_size,
        "max_batch_delay": max_batch_delay,
        "queue": queue,
    }
    listens = dict(zip(ports, free_ports(), strict=True))
    serving = Serving.from_mapping(
        {
            "server": {
                **listens,
                "auth": "none",
                "gpus": gpus,
                "model_api": model_api,
                "model_store": str(about.path.absolute().parent),
            },
            "models": {about.name: served},
        },
        "the benchmark's deployment",
    )
    config = work / f"batch-{batch_size}.properties"
    config.write_text(properties.render(serving, "its options", path=config, verb="bench"), encoding="ascii")
    hidden = {} if gpus else {"CUDA_VISIBLE_DEVICES": ""}
    return TorchServe(config, work_dir=work / f"batch-{batch_size}", env=hidden)


@dataclass
class _Run:
    """One archive under measurement."""

    model: str
    dtype: str
    settings: Settings
    servers: Mapping[int, TorchServe]
    offline: Offline
    progress: Progress

    def measure(self, pools: Sequence[Workload]) -> Measured:
        """Measure every workload."""
        found = Measured()
        main = self.servers[self.settings.batch_sizes[0]]
        found.agreement = self._agreement(main, pools[0])
        for pool in pools:
            points, offline = self._workload(pool)
            found.points += points
            found.offline.append(offline)
        return found

    def _plan(self, pool: Workload) -> Iterator[tuple[int, int]]:
        """The (batch size, clients) of a round; other batch sizes than the first only where they are compared."""
        first, *others = self.settings.batch_sizes
        for clients in self.settings.clients:
            yield first, clients
        if pool.name == "short":
            for size in others:
                yield size, max(self.settings.clients)

    def _workload(self, pool: Workload) -> tuple[list[Point], OfflineRun]:
        inputs = pool.inputs[:OFFLINE_TEXTS]
        rates: list[float] = []
        plan = list(self._plan(pool))
        windows: dict[tuple[int, int], list[tuple[int, LoadResult, BatchingWindow, int]]] = {key: [] for key in plan}
        singles: list[SingleText] = []

        def yardstick() -> None:
            with self.progress(f"{pool.name} {self.dtype}: offline, {len(inputs)} texts"):
                rates.append(len(inputs) / self.offline.run(inputs))

        for number in range(self.settings.rounds):
            yardstick()
            if pool.name != "lists" and self.settings.subject.task == "embedding":
                with self.progress(f"{pool.name} {self.dtype}: offline, one text at a time"):
                    singles.append(self.offline.single(pool.texts[:SINGLE_TEXTS]))
            for size, clients in plan:
                label = f"{pool.name} {self.dtype}: {clients} clients, batch size {size}"
                with self.progress(f"{label}, round {number + 1} of {self.settings.rounds}"):
                    windows[size, clients].append((number, *self._window(self.servers[size], pool, clients)))
        yardstick()

        points = []
        for (size, clients), measured in windows.items():
            rounds = tuple(
                Round(
                    summary := summarize(result),
                    batching,
                    result.cpu_share,
                    result.was_bottleneck,
                    summary.texts_per_s / ((rates[number] + rates[number + 1]) / 2),
                )
                for number, result, batching, _ in measured
            )
            peak = max(peak for *_, peak in measured)
            points.append(Point(pool.name, clients, self.dtype, size, rounds, peak))
        return points, OfflineRun(
            pool.name, self.dtype, self.offline.threads, len(inputs), tuple(rates), _median(singles)
        )

    def _window(self, server: TorchServe, pool: Workload, clients: int) -> tuple[LoadResult, BatchingWindow, int]:
        """One measured window: samples, the server's counters over it, and its peak memory in bytes."""
        with PeakMemory(server.processes) as memory:
            result, batching = load.run(
                measure_window(
                    Target(f"{server.urls.inference}/predictions/{self.model}", server.headers()),
                    f"{server.urls.metrics}/metrics",
                    self.model,
                    pool.bodies,
                    clients=clients,
                    requests=None if self.settings.duration_s else self.settings.requests_for(pool.name, clients),
                    duration_s=self.settings.duration_s,
                    warmup=clients if pool.name == "lists" else max(2 * clients, WARM_UP),
                )
            )
        return result, batching, memory.peak

    def _agreement(self, server: TorchServe, pool: Workload) -> float:
        """How well server and yardstick agree, the worst of a few texts: a fast wrong answer counts for nothing."""
        texts = pool.texts[:AGREEMENT_TEXTS]
        subject = self.settings.subject
        with server.inference() as client:
            served = subject.values(client.ask(self.model, subject.many(texts)), len(texts))
        offline = self.offline.values(pool.inputs[:AGREEMENT_TEXTS])
        return min(agreement(one, other) for one, other in zip(served, offline, strict=True))


def _median(singles: Sequence[SingleText]) -> SingleText | None:
    if not singles:
        return None
    return SingleText(median(one.forward_ms for one in singles), median(one.encode_ms for one in singles))


async def measure_window(
    target: Target, metrics_url: str, model: str, bodies: Sequence[Body], **options: Any
) -> tuple[LoadResult, BatchingWindow]:
    """Run a closed loop and read the server's counters over exactly its measured window.

    Args:
        target: where to send.
        metrics_url: the server's Prometheus metrics.
        model: whose counters to read.
        bodies: what to send.
        options: further arguments of `closed_loop`, but for `before`.
    """
    counting = Counting(metrics_url, model)
    result = await closed_loop(target, bodies, before=counting.before, **options)
    return result, await counting.after(sum(sample.ok for sample in result.samples))


def agreement(served: Sequence[Any], offline: Sequence[Any]) -> float:
    """How well two answers for one text agree, 1 at best.

    Vectors by their cosine; a few scores by 1 less the largest difference; words by the share of equal ones; 0 where
    the answers have not even the same length.
    """
    if len(served) != len(offline):
        return 0.0
    if not served:
        return 1.0
    if isinstance(served[0], str):
        return [one == other for one, other in zip(served, offline, strict=True)].count(True) / len(served)
    if len(served) <= FEW_SCORES or all(0 <= score <= 1 for score in served):
        return 1.0 - max(abs(float(one) - float(other)) for one, other in zip(served, offline, strict=True))
    return cosine(served, offline)


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Cosine of the angle between two vectors of one length; 0 where one has no direction."""
    norms = math.sqrt(sum(x * x for x in one)) * math.sqrt(sum(y * y for y in other))
    return sum(x * y for x, y in zip(one, other, strict=True)) / norms if norms else 0.0
