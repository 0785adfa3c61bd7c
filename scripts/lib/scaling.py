"""Change the number of a model's workers without failing a request.

TorchServe scales down by killing the last workers of its list at once; in about half of the cases the clients of a
running batch get 500 "Worker died." (otherwise it puts the batch back on the queue: two of its threads race). Nothing
in its API shows whether a worker is busy. What does work is to make the workers that go step aside first:
`handlers/parking.py` says how. A handler that does not know that can only be scaled down after a while in which no
request came, which is a good guess and no more; an empty queue alone says little, since under moderate load every
request finds a free worker.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from handlers.parking import HOLD_HEADER, LONGEST, PARK_HEADER
from scripts.lib.arrivals import Arrivals, unknown
from scripts.lib.errors import UserError
from scripts.lib.management import ApiError, ManagementClient, Model

HOLD = min(20.0, LONGEST)  # seconds that a parked worker waits for its end
MARGIN = 5.0  # seconds before that, when it is no longer counted on
QUIET = 2.0  # seconds of empty queue that pass for an idle moment
TICK = 0.05  # seconds between two looks
_DEATHS = 3  # processes of one worker that may die before it is said not to start
_MOST_ASKED = 16  # describe requests at once
#: Where a worker's own words are: with our log4j2.xml, or with TorchServe's.
_LOG = "logs/ts_log.log of batchserve's servers, logs/model_log.log of others"
_QUEUE_FULL = "ServiceUnavailableException"

Report = Callable[[str], None]


def _silent(_: str) -> None:
    """Report nothing."""


@dataclass
class Scaler:
    """Scales one version of a model.

    Args:
        client: the server.
        name, version: the model.
        timeout: seconds that one change may take altogether.
        report: called with a line whenever there is something new to say.
        arrivals: how many requests have come so far, where the server's metrics tell.
    """

    client: ManagementClient
    name: str
    version: str
    timeout: float = 180.0
    report: Report = _silent
    arrivals: Arrivals = unknown
    _parked: dict[int, float] = field(default_factory=dict)

    def to(self, workers: int, *, now: bool = False) -> Model:
        """Have exactly `workers` workers, all READY; returns the model as it then is.

        Args:
            workers: 0 or more.
            now: kill what is too many at once, whatever it is doing.

        Raises:
            UserError: it did not come about within the timeout (the reason and what to do are in it).
        """
        deadline = time.monotonic() + self.timeout
        model = self.describe()
        if workers < len(model.workers):
            if not now:
                model = self._make_way(model, workers, deadline)
            self.client.scale(self.name, self.version, workers)
        elif (model.min_workers, model.max_workers) != (workers, workers) or workers > len(model.workers):
            self.client.scale(self.name, self.version, workers)
        return self.wait_ready(workers, deadline)

    def describe(self) -> Model:
        """The version as it is now."""
        return self.client.describe(self.name, self.version)

    def wait_ready(self, workers: int, deadline: float) -> Model:
        """Wait until there are exactly `workers` workers, all READY."""
        told = -1
        pids: dict[str, set[int]] = {}
        while True:
            model = self.describe()
            if len(model.workers) == model.ready == workers:
                return model
            if model.ready != told:
                told = model.ready
                self.report(f"{model.ready} of {workers} workers are ready")
            for worker in model.workers:
                seen = pids.setdefault(worker.id, set())
                if worker.pid > 0:
                    seen.add(worker.pid)
                if len(seen) > _DEATHS and not worker.ready:
                    raise UserError(
                        f"worker {worker.id} of {self.name} dies whenever it starts ({model.ready} of {workers} ready)",
                        hint=f"its error is in the server's log ({_LOG}); then scale back",
                    )
            if time.monotonic() > deadline:
                raise UserError(
                    f"{model.ready} of {workers} workers of {self.name} are ready after {self.timeout:g} s",
                    hint=f"the server goes on trying: see its log ({_LOG}), or give --timeout more seconds",
                )
            time.sleep(TICK * 4)

    def wait_quiet(self, deadline: float, quiet: float = QUIET) -> None:
        """Wait until for `quiet` seconds no request has come and none has waited.

        Batches that run longer than that show nowhere; and where the server's metrics do not tell of arrivals, nor do
        requests that find a free worker at once.
        """
        since = time.monotonic()
        arrived = self.arrivals()
        told = False
        while time.monotonic() - since < quiet:
            time.sleep(TICK)
            pending, before = self.describe().job_queue_status.pending_requests, arrived
            arrived = self.arrivals()
            if pending or arrived != before:
                since = time.monotonic()
                if not told:
                    self.report(f"waiting for {quiet:g} s without a request")
                    told = True
            if time.monotonic() > deadline:
                raise UserError(
                    f"requests for {self.name} {self.version} keep coming: it had no {quiet:g} s without one within"
                    f" {self.timeout:g} s",
                    hint="stop sending, give --timeout more seconds, or accept failed requests: --now",
                )

    def can_park(self, timeout: float) -> bool:
        """Whether the version's handler steps aside when asked. Waits for its turn in the queue, at most `timeout`."""
        model = self.describe()
        if model.continuous_batching or model.stateful or not model.ready:
            return False
        deadline = time.monotonic() + timeout
        while True:
            try:
                return self._ask((), deadline - time.monotonic()) is not None
            except ApiError as error:
                if error.kind != _QUEUE_FULL or time.monotonic() > deadline:
                    raise
                time.sleep(TICK)

    def _make_way(self, model: Model, workers: int, deadline: float) -> Model:
        """Have the last workers idle until they are killed; returns the model as it then is."""
        if not self.can_park(deadline - time.monotonic()):
            blind = self.arrivals() is None
            self.report(
                "this model's handler cannot hold a worker still, and TorchServe does not show which are busy: a batch"
                f" that runs {'at the moment of the kill' if blind else f'for more than {QUIET:g} s'} may fail"
            )
            self.wait_quiet(deadline)
            return self.describe()
        self.report(f"{len(model.workers) - workers} of {len(model.workers)} workers finish what they run")
        while True:
            # A worker that is not ready takes no requests, and is killed as it is.
            leaving = [worker for worker in model.workers[workers:] if worker.pid > 0 and worker.ready]
            moment = time.monotonic()
            missing = [worker.pid for worker in leaving if self._parked.get(worker.pid, 0.0) < moment]
            if not missing:
                return model
            if moment > deadline:
                raise UserError(
                    f"{len(missing)} workers of {self.name} were not free within {self.timeout:g} s",
                    hint="the queue may be too long: give --timeout more seconds, or accept failed requests: --now",
                )
            self._park(missing, ready=model.ready, timeout=deadline - moment)
            time.sleep(TICK)
            # Seen again before the kill: a worker that was started anew is another process.
            model = self.describe()

    def _park(self, pids: Sequence[int], ready: int, timeout: float) -> None:
        """Send describe requests that name the workers to hold; note when those that were caught will go on."""
        count = max(len(pids), min(2 * ready, _MOST_ASKED))
        with ThreadPoolExecutor(count) as pool:
            asked = [pool.submit(self._ask, pids, timeout) for _ in range(count)]
        for future in asked:
            try:
                answer = future.result()
            except ApiError as error:
                if error.kind != _QUEUE_FULL:
                    raise
                continue
            if answer and answer[1]:
                self._parked[answer[0]] = answer[2]

    def _ask(self, pids: Sequence[int], timeout: float) -> tuple[int, bool, float] | None:
        """One describe request → the worker that got it, whether it holds still, and until when it surely does.

        None when the handler does not say. Raises ApiError when the queue is full.
        """
        headers = {PARK_HEADER: ",".join(map(str, pids)), HOLD_HEADER: str(HOLD)} if pids else {}
        try:
            model = self.client.ask(self.name, self.version, headers, max(timeout, 1.0))
        except ApiError as error:
            if error.kind == _QUEUE_FULL or error.status < 500:
                raise
            return None  # a handler that takes the empty row for a request
        about = model.customized_metadata
        worker = about.get("worker") if isinstance(about, dict) else None
        if not isinstance(worker, dict) or not isinstance(worker.get("pid"), int):
            return None
        return worker["pid"], worker.get("parked") is True, time.monotonic() + HOLD - MARGIN
