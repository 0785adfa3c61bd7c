"""Measure what an archive's batches cost on the device that is here: its own handler, run in this process."""

import datetime
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from handlers.cores import cores
from scripts.lib import machine, service
from scripts.lib.costs import Profile, Rates, Request, Timing, fit, plan_cost
from scripts.lib.errors import UserError
from scripts.lib.loaded import loaded
from scripts.lib.subjects import SUBJECTS
from scripts.lib.workloads import Vocabulary, make_workload

SIZES = (1, 2, 4, 8, 16, 32)  # requests of the batches that are timed
PER_SIZE = 10  # batches of each size, all different: what a worker meets is never the same twice
SLOW_S = 1.0  # a batch that takes longer is the last size
STALL = 2.0  # times the fitted time: something else was in the way
POOL_REQUESTS, POOL_LISTS = 300, 60
NEIGHBOUR_BATCH = 8  # requests of the batches that other workers run meanwhile
NEIGHBOUR_PATIENCE_S = 300.0  # that they may take to load
NEIGHBOUR_REST_S = 20.0  # that they may take to end their last batch

Progress = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Texts:
    """What to run: the bodies of requests, or the name of a workload to make them of."""

    workload: str = "mixed"
    bodies: tuple[bytes, ...] = ()


class Worker:
    """A loaded archive of ours, and what its handler tells.

    Args:
        running: from `loaded`.

    Raises:
        UserError: another handler than ours.
    """

    def __init__(self, running: Any) -> None:
        self._service = running
        self.handler: Any = getattr(running._entry_point, "__self__", None)  # Service has no public way to it
        if not all(hasattr(self.handler, name) for name in ("model", "threads", "fit", "card", "settings")):
            raise UserError("The archive's handler is not of this tool, and doesn't tell what it runs.")

    def with_threads(self, count: int) -> None:
        """Compute with so many threads from now on, and fit the planner's costs again."""
        self.handler.threads = type(self.handler.threads)(count)
        self.handler.fit()

    def lengths(self, bodies: Sequence[bytes]) -> list[tuple[int, ...]]:
        """Tokens of each text of each request, as the handler reads them; nothing is run.

        Raises:
            UserError: a body is refused; its number counts from 1.
        """
        found: list[tuple[int, ...]] = []
        refused: list[UserError] = []

        def read(work: Any, *_: Any, **__: Any) -> Any:
            for slot in work.slots:
                if slot.error is not None:  # not raised: Service would make a 503 of it
                    refused.append(UserError(f"Body {len(found) + 1} is refused: {slot.error.message}"))
                found.append(tuple(len(encoding) for encoding in slot.encodings))
            return work

        # In place of the class's: tokenised, and no more
        vars(self.handler).update(inference=read, postprocess=lambda work: [b""] * len(work.slots))
        try:
            for start in range(0, len(bodies), SIZES[-1]):
                service.predict(self._service, [service.Body(body) for body in bodies[start : start + SIZES[-1]]])
                if refused:
                    raise refused[0]
        finally:
            del self.handler.inference, self.handler.postprocess
        return found

    def timed(self, bodies: Sequence[bytes]) -> float:
        """Seconds of one batch.

        Raises:
            UserError: a request of it fails.
        """
        start = time.perf_counter()
        answers = service.predict(self._service, [service.Body(body) for body in bodies])
        spent = time.perf_counter() - start
        failed = [answer for answer in answers if answer.status != 200]
        if failed:
            raise UserError(f"A request got {failed[0].status}: {failed[0].body.decode(errors='replace')[:300]}")
        return spent


def profile(
    path: Path,
    texts: Texts,
    *,
    workers: int = 1,
    threads: int | None = None,
    progress: Progress,
    seed: int = 0,
    gpu: bool = True,
) -> Profile:
    """Run an archive on the GPU, or the CPU where there is none, and fit what its batches cost.

    Args:
        path: the archive.
        texts: what to run.
        workers: how many are to share the device; costs are measured with 1 to so many of them busy.
        threads: of each worker; None is what the archive says, or cores ÷ workers.
        progress: shows that a labelled step is under way.
        seed: of workload and batches.
        gpu: whether a GPU that is there may be used.

    Raises:
        UserError: the archive does not load or is not ours, or a request fails.
    """
    import torch

    path = path.resolve()  # loading changes the directory
    on_gpu = gpu and torch.cuda.is_available()
    with ExitStack() as stack:
        with progress(f"loading {path.name}"):
            worker = Worker(stack.enter_context(loaded(path, gpu_id=0 if on_gpu else None)))
            count = threads or worker.handler.settings.threads or (None if on_gpu else max(1, cores() // workers))
            if count is not None:
                worker.with_threads(count)
            bodies = texts.bodies or _bodies(worker, texts.workload, seed)
            requests = worker.lengths(bodies)
        limits = worker.handler.model.limits()
        batches = _batches(len(bodies), seed)
        rates: list[Rates] = []
        errors: list[float] = []
        for busy in range(1, workers + 1):
            if busy > 1:
                with progress(f"starting worker {busy}"):
                    stack.enter_context(_neighbour(path, bodies, worker.handler.threads.count, on_gpu))
            with progress(f"timing batches, {busy} of {workers} workers busy"):
                timings = _time(worker, bodies, requests, batches)
            found, error = _fitted(timings)
            rates.append(found)
            errors.append(error)
        card = worker.handler.card()
        return Profile(
            archive=path.name,
            task=card["task"],
            device="cuda" if on_gpu else "cpu",
            device_name=torch.cuda.get_device_name(0) if on_gpu else machine.describe().processor,
            dtype=card["dtype"],
            threads=worker.handler.threads.count,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            packed=limits.packed,
            micro_batch_tokens=limits.max_tokens,
            micro_batch_items=limits.max_items,
            multiple_of=limits.multiple_of,
            launch_cost=limits.launch_cost,
            max_tokens=card["max_tokens"],
            rates=tuple(rates),
            fit_error=max(errors),
            requests=tuple(requests),
        )


def token_lengths(path: Path, bodies: Sequence[bytes]) -> list[tuple[int, ...]]:
    """Tokens of each text of each of these bodies, as the archive reads them.

    Raises:
        UserError: the archive does not load or is not ours, or refuses a body.
    """
    with loaded(path) as running:
        return Worker(running).lengths(bodies)


def _bodies(worker: Worker, workload: str, seed: int) -> tuple[bytes, ...]:
    task = worker.handler.settings.task
    if task not in SUBJECTS or workload not in SUBJECTS[task].workloads:
        known = ", ".join(SUBJECTS[task].workloads) if task in SUBJECTS else "none"
        raise UserError(f"There is no workload {workload} for {task} (there is: {known}).", "send your own: --bodies")
    try:
        vocabulary = Vocabulary.load(worker.handler.directory)
    except Exception as error:  # tokenizers raises bare ones, whatever is wrong with the file
        raise UserError(f"No texts can be made for this model: {error}", "send your own: --bodies") from error
    count = POOL_LISTS if workload == "lists" else POOL_REQUESTS
    return tuple(body.data for body in make_workload(workload, vocabulary, count, seed, SUBJECTS[task]).bodies)


def _batches(bodies: int, seed: int) -> list[list[list[int]]]:
    """For each size the batches to time, each a list of bodies' numbers."""
    rng = random.Random(f"batches:{seed}")
    return [[rng.choices(range(bodies), k=size) for _ in range(PER_SIZE)] for size in SIZES]


def _time(
    worker: Worker, bodies: Sequence[bytes], requests: Sequence[Request], batches: Sequence[Sequence[Sequence[int]]]
) -> list[Timing]:
    limits = worker.handler.model.limits()
    worker.timed([bodies[i] for i in batches[0][0]])  # warm
    timings: list[Timing] = []
    for number, same_size in enumerate(batches):
        slow = False
        for batch in same_size:
            seconds = worker.timed([bodies[i] for i in batch])
            lengths = [length for i in batch for length in requests[i]]
            timings.append(Timing(len(batch), plan_cost(lengths, limits) if lengths else 0, seconds))
            slow = slow or seconds > SLOW_S
        if slow and number:  # two sizes are needed to tell the costs apart
            break
    return timings


def _fitted(timings: Sequence[Timing]) -> tuple[Rates, float]:
    rates, _ = fit(timings)
    calm = [t for t in timings if t.seconds <= STALL * rates.seconds(t.requests, t.tokens)]
    return fit(calm or timings)


@contextmanager
def _neighbour(path: Path, bodies: Sequence[bytes], threads: int, on_gpu: bool) -> Iterator[None]:
    """Another worker that computes all the time."""
    context = multiprocessing.get_context("spawn")
    ready, enough = context.Event(), context.Event()
    process = context.Process(target=_compute, args=(path, list(bodies), threads, on_gpu, ready, enough), daemon=True)
    process.start()
    try:
        deadline = time.monotonic() + NEIGHBOUR_PATIENCE_S
        while not ready.wait(0.2):
            if not process.is_alive() or time.monotonic() > deadline:
                raise UserError("A second worker does not load beside the first.", "memory may be short; use fewer")
        yield
    finally:
        enough.set()
        process.join(NEIGHBOUR_REST_S)
        process.kill()
        process.join()


def _compute(path: Path, bodies: list[bytes], threads: int, on_gpu: bool, ready: Event, enough: Event) -> None:
    """What another worker does until it is enough."""
    with loaded(path, gpu_id=0 if on_gpu else None) as running:
        worker = Worker(running)
        worker.handler.threads = type(worker.handler.threads)(threads)
        rng = random.Random("neighbour")
        while not enough.is_set():
            worker.timed(rng.choices(bodies, k=NEIGHBOUR_BATCH))
            ready.set()
