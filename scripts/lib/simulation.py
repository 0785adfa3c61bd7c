"""TorchServe's batching as a discrete-event simulation: what a load would meet at a server that need not exist.

As TorchServe 0.12 does it: jobs wait in one queue per model, and what finds it full is refused. A free worker takes
the model's lock, waits for a first job, then polls for further ones until the batch is full or the delay, counted from
that first job in whole milliseconds of the clock, is used up; only then the next free worker may begin. A worker runs
its batches one after the other.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scripts.lib.costs import Request
from scripts.lib.stats import percentile

# Between two jobs that the assembler takes from a queue that holds both: thus a backlog is now and then cut short by
# the clock's next millisecond, as is seen at a delay of 1 ms.
TAKE_S = 2e-6
ANSWERING = 0.5  # of what the frontend spends on a request, after its batch: the answers of one batch leave one by one
WARM_UP_SHARE = 0.1  # of the requests, which meet an emptier server than the later ones

#: Requests of a batch and workers busy on its device, this one counted → seconds that it occupies its worker.
BatchSeconds = Callable[[Sequence[Request], int], float]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Setup:
    """How one TorchServe serves the model.

    Args:
        workers: processes.
        batch_size: requests a batch at most.
        max_batch_delay: milliseconds that a batch's first request waits for others.
        queue: requests that may wait.
        workers_per_device: that share a device, and slow each other down there.
    """

    workers: int
    batch_size: int
    max_batch_delay: int
    queue: int = 1000
    workers_per_device: int = 1

    def __post_init__(self) -> None:
        if min(self.workers, self.batch_size, self.max_batch_delay, self.queue, self.workers_per_device) < 1:
            raise ValueError(f"impossible setup: {self}")

    @property
    def devices(self) -> int:
        """Devices that the workers take."""
        return -(-self.workers // self.workers_per_device)


@dataclass(frozen=True)
class OpenLoop:
    """Requests that come by the clock: when each is sent, in seconds, ascending."""

    times: Sequence[float]


@dataclass(frozen=True)
class ClosedLoop:
    """Clients that each send the next request when the last one is answered.

    Args:
        clients: how many.
        requests: of all of them together.
        think_s: between an answer and the client's next request.
    """

    clients: int
    requests: int
    think_s: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What became of the requests. A request's number is its place in the order of sending, or, of a closed loop, in
    the order in which its client got the answer before.

    Args:
        sent, answered: seconds, by request; what was refused has NaN as its answer.
        batch: number of the batch of each request, -1 of a refused one.
        sizes: requests of each batch.
        taken, dispatched: seconds, by batch: when its worker took the first job, and when it closed the batch.
        busy_s: seconds that all workers computed, together.
        workers: how many there were.
    """

    sent: Floats
    answered: Floats
    batch: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    taken: Floats
    dispatched: Floats
    busy_s: float
    workers: int

    @property
    def _measured(self) -> slice:
        return slice(int(len(self.sent) * WARM_UP_SHARE), None)

    @property
    def latencies_ms(self) -> Floats:
        """Milliseconds of every request answered after the warm-up."""
        found = (self.answered - self.sent)[self._measured]
        return found[~np.isnan(found)] * 1e3

    def latency_ms(self, q: float) -> float | None:
        """A percentile of the latencies, in milliseconds; None of none."""
        return percentile(self.latencies_ms.tolist(), q)

    @property
    def shed_share(self) -> float:
        """Requests refused because the queue was full ÷ all, after the warm-up."""
        batch = self.batch[self._measured]
        return float(np.mean(batch < 0)) if len(batch) else 0.0

    @property
    def batch_size(self) -> float | None:
        """Mean requests of a batch after the warm-up; None without batches."""
        batch = self.batch[self._measured]
        used = np.unique(batch[batch >= 0])
        return float(np.mean(self.sizes[used])) if len(used) else None

    @property
    def utilisation(self) -> float:
        """Share of the time in which a worker computes, from the first request to the last answer."""
        span = float(np.nanmax(self.answered) - self.sent[0]) if len(self.sizes) else 0.0
        return min(1.0, self.busy_s / (self.workers * span)) if span else 0.0

    @property
    def requests_per_s(self) -> float:
        """Requests answered per second, from the first request after the warm-up to the last answer."""
        answered = self.answered[self._measured]
        count = int(np.count_nonzero(~np.isnan(answered)))
        return count / float(np.nanmax(answered) - self.sent[self._measured][0]) if count else 0.0


def simulate(
    setup: Setup,
    batch_seconds: BatchSeconds,
    requests: Sequence[Request],
    load: OpenLoop | ClosedLoop,
    *,
    frontend_s: float = 0.0,
    seed: int = 0,
) -> Outcome:
    """Let a load meet a setup.

    Args:
        setup: the server.
        batch_seconds: what a batch costs.
        requests: token lengths of the texts of each request. They are sent in this order if there are as many as
            the load sends, else in a seeded order, over and over.
        load: when requests are sent.
        frontend_s: what each request takes beside queue, batch and worker, the answers of a batch one after the other.
        seed: of the order.

    Raises:
        ValueError: no requests; or a closed loop with more clients than the queue holds, which would ask again and
            again for what was refused.
    """
    total = load.requests if isinstance(load, ClosedLoop) else len(load.times)
    if not requests or not total:
        raise ValueError("nothing is sent")
    if isinstance(load, ClosedLoop) and not 1 <= load.clients <= setup.queue:
        raise ValueError(f"{load.clients} clients and a queue of {setup.queue}")
    pool = list(requests)
    if len(pool) != total:
        random.Random(f"order:{seed}").shuffle(pool)
    return _run(setup, batch_seconds, pool, load, total, frontend_s)


def _run(
    setup: Setup,
    batch_seconds: BatchSeconds,
    pool: Sequence[Request],
    load: OpenLoop | ClosedLoop,
    total: int,
    frontend_s: float,
) -> Outcome:
    closed = load if isinstance(load, ClosedLoop) else None
    # A heap of (when it is sent, its number); ascending times are one already
    if closed is None:
        due = [(float(time), number) for number, time in enumerate(load.times)]  # type: ignore[union-attr]
    else:
        due = [(0.0, number) for number in range(min(closed.clients, total))]
    due.reverse()  # popped from the end: an open loop needs no heap at all
    later: list[tuple[float, int]] = []  # a closed loop's next requests, a heap
    issued = len(due)
    sent, answered = np.zeros(total), np.full(total, np.nan)
    batch_of = np.full(total, -1, dtype=np.int64)
    sizes: list[int] = []
    taken_at: list[float] = []
    dispatched_at: list[float] = []
    queue: deque[tuple[float, int]] = deque()
    free = [(0.0, worker) for worker in range(setup.workers)]
    busy_until = [0.0] * setup.workers
    unlocked = busy_s = 0.0
    spacing = frontend_s * ANSWERING
    count, per_device, capacity = len(pool), setup.workers_per_device, setup.queue

    def next_due() -> float:
        first = due[-1][0] if due else math.inf
        return min(first, later[0][0]) if later else first

    def admit(until: float) -> None:
        while due and due[-1][0] <= until:
            arrive(due.pop())
        while later and later[0][0] <= until:
            arrive(heapq.heappop(later))

    def arrive(job: tuple[float, int]) -> None:
        sent[job[1]] = job[0]
        if len(queue) < capacity:
            queue.append(job)

    while True:
        ready, worker = free[0]
        now = max(ready, unlocked)
        admit(now)
        if not queue:
            now = next_due()
            if now == math.inf:
                break
            admit(now)
        began = now
        jobs = [queue.popleft()]
        clock, left = math.floor(now * 1e3), setup.max_batch_delay
        while len(jobs) < setup.batch_size:
            now += TAKE_S
            if not queue:
                admit(now)
            if not queue:
                coming = next_due()
                if coming > now + left / 1e3:
                    now += left / 1e3
                    break
                now = coming
                admit(now)
            jobs.append(queue.popleft())
            tick = math.floor(now * 1e3)
            left -= tick - clock
            clock = tick
            if left <= 0:
                break
        unlocked = now
        first = worker - worker % per_device
        busy = 1 + sum(until > now for until in busy_until[first : first + per_device])
        seconds = batch_seconds([pool[number % count] for _, number in jobs], busy)
        done = now + seconds
        busy_s += seconds
        busy_until[worker] = done
        heapq.heapreplace(free, (done, worker))
        number_of_batch = len(sizes)
        answer = done + frontend_s
        for _, number in jobs:
            batch_of[number] = number_of_batch
            answered[number] = answer
            if closed is not None and issued < total:
                heapq.heappush(later, (answer + closed.think_s, issued))
                issued += 1
            answer += spacing
        sizes.append(len(jobs))
        taken_at.append(began)
        dispatched_at.append(now)
    return Outcome(
        sent,
        answered,
        batch_of,
        np.array(sizes, dtype=np.int64),
        np.array(taken_at),
        np.array(dispatched_at),
        busy_s,
        setup.workers,
    )
