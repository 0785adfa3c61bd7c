"""A server's turn: it is started, its answers are checked, it is put under each load, it is stopped."""

import asyncio
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil

from benchmarks.lineup import Peer
from benchmarks.process import Process
from benchmarks.table import OURS, Turn
from scripts.lib import live, load
from scripts.lib.archive import Archive
from scripts.lib.benchmark import agreement, server
from scripts.lib.console import progress
from scripts.lib.drive import Drive
from scripts.lib.errors import UserError
from scripts.lib.load import OnSample, Target
from scripts.lib.load_plan import Load
from scripts.lib.memory import PeakMemory
from scripts.lib.serving import ServedModel
from scripts.lib.subjects import SUBJECTS
from scripts.lib.workloads import Body, Workload

LEAST_COSINE = 0.999
CHECKED = 32  # texts of each workload, all sent at once so that they share batches


@dataclass(frozen=True)
class Running:
    """A server that is up.

    Attributes:
        url: where predictions are posted.
        body: a text → its request.
        vector: an answer → its embedding.
        processes: its processes, asked anew each time.
        metrics: our own counters; None where there are none.
    """

    url: str
    body: Callable[[str], Mapping[str, Any]]
    vector: Callable[[Any], Any]
    processes: Callable[[], list[psutil.Process]]
    metrics: str | None = None


@dataclass(frozen=True)
class Bench:
    """What every server is put through.

    Attributes:
        model: the model's directory.
        pools: the workloads.
        loads: the windows of each.
        expected: the library's answers to the texts that are `checked`.
        archive: ours.
        served: how ours is served.
        peers: the others, by name, each with its environment's interpreter.
        cores: of this machine.
        work: a temporary directory.
        logs: where it is kept what peers print.
    """

    model: Path
    pools: Sequence[Workload]
    loads: Sequence[Load]
    expected: Sequence[Sequence[float]]
    archive: Archive
    served: ServedModel
    peers: Mapping[str, tuple[Peer, Path]]
    cores: int
    work: Path
    logs: Path

    def turn(self, name: str, number: int) -> Turn:
        """Start a server, check its answers, measure it, stop it.

        Args:
            name: whose turn it is.
            number: the round's, from 0.

        Raises:
            UserError: it doesn't start, or its answers are wrong.
            KeyboardInterrupt: it was interrupted.
        """
        windows, notes = {}, []
        with self._running(name, number) as running:
            least = self._agreement(running)
            with PeakMemory(running.processes) as memory:
                for pool in self.pools:
                    driven = load.run(_drive(running, pool, self.loads).run(functools.partial(_shown, name, pool.name)))
                    if driven.interrupted:
                        raise KeyboardInterrupt
                    windows[pool.name] = driven.windows
                    notes += [
                        f"{pool.name}, {window.label}: the load generator was the bottleneck"
                        for window in driven.windows
                        if window.generator.bottleneck
                    ]
        return Turn(name, number, least, memory.peak, windows, tuple(notes))

    @contextmanager
    def _running(self, name: str, number: int) -> Iterator[Running]:
        work = self.work / f"{name}-{number}"
        work.mkdir()
        with ExitStack() as stack:
            with progress(f"{name} starts (round {number + 1})"):
                running = stack.enter_context(self._ours(work)) if name == OURS else self._peer(stack, name, work)
            yield running

    @contextmanager
    def _ours(self, work: Path) -> Iterator[Running]:
        served, about = self.served, self.archive
        with server(
            about,
            work,
            batch_size=served.batch_size,
            workers=served.workers,
            max_batch_delay=served.max_batch_delay,
            queue=served.queue,
        ) as up:
            url, one = f"{up.urls.inference}/predictions/{about.name}", SUBJECTS["embedding"].one
            yield Running(url, one, itemgetter("embedding"), up.processes, f"{up.urls.metrics}/metrics")

    def _peer(self, stack: ExitStack, name: str, work: Path) -> Running:
        peer, python = self.peers[name]
        process = Process(peer, python, self.model, work, self.cores, self.logs / f"{name}.log")
        stack.enter_context(process)
        return Running(process.url, peer.body, peer.vector, process.processes)

    def _agreement(self, running: Running) -> float:
        """The least cosine of the server's answers and the library's: a fast wrong answer counts for nothing."""
        answers = load.run(_together(running.url, [orjson.dumps(running.body(text)) for text in checked(self.pools)]))
        try:
            vectors = [list(map(float, running.vector(orjson.loads(answer)))) for answer in answers]
        except (LookupError, TypeError, ValueError) as failure:
            raise UserError(f"its answers are no embeddings: {type(failure).__name__}") from failure
        least = min(agreement(one, other) for one, other in zip(vectors, self.expected, strict=True))
        if not least >= LEAST_COSINE:
            raise UserError(f"its answers are wrong: cosine {least:.4f} with sentence-transformers'")
        return least


def checked(pools: Sequence[Workload]) -> list[str]:
    """The texts whose answers are checked."""
    return [text for pool in pools for text in pool.texts[:CHECKED]]


def _drive(running: Running, pool: Workload, loads: Sequence[Load]) -> Drive:
    texts = zip(pool.texts, pool.lengths, strict=True)
    bodies = [Body(orjson.dumps(running.body(text)), 1, tokens) for text, tokens in texts]
    return Drive(Target(running.url), bodies, loads, metrics=running.metrics)


@contextmanager
def _shown(server_name: str, workload: str, label: str, load: Load) -> Iterator[OnSample]:
    with live.shown(f"{server_name}, {workload}, {label}", load) as on_sample:
        yield on_sample


async def _together(url: str, bodies: Sequence[bytes]) -> list[bytes]:
    """The answers to requests that are all sent at once.

    Raises:
        UserError: one was not answered with a 2xx status.
    """

    async def ask(session: aiohttp.ClientSession, body: bytes) -> bytes:
        async with session.post(url, data=body) as response:
            if not response.ok:
                raise UserError(f"answers {response.status}: {(await response.text())[:200].strip()}")
            return await response.read()

    headers, timeout = {"Content-Type": "application/json"}, aiohttp.ClientTimeout(total=Target.timeout_s)
    try:
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            return await asyncio.gather(*(ask(session, body) for body in bodies))
    except (aiohttp.ClientError, TimeoutError) as failure:
        raise UserError(f"does not answer: {type(failure).__name__}: {failure}") from failure
