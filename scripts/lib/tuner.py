"""A tune from its options to its report: costs profiled, settings searched on a server of its own, all of it kept."""

import gc
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from handlers.cores import cores
from scripts.lib import archive, deployment, machine, sent, variant
from scripts.lib.advice import advise
from scripts.lib.archive import Archive
from scripts.lib.costs import Profile
from scripts.lib.decoder import TASK as GENERATION
from scripts.lib.errors import UserError
from scripts.lib.forecast import Forecast
from scripts.lib.interrupts import stop_on_signals
from scripts.lib.objective import Objective
from scripts.lib.profiling import Texts, profile
from scripts.lib.search import Budget, Ledger, Search
from scripts.lib.sent import Sent
from scripts.lib.serving import ServedModel, Serving
from scripts.lib.trials import Trials, Windows, changes_for, least_requests
from scripts.lib.tune_report import TuneReport
from scripts.lib.tune_state import Costs, Finished, TuneState
from scripts.lib.tuning import BATCH_SIZES, DELAYS, Kind, Outcome, Point, Setting, Space, crews

Progress = Callable[[str], AbstractContextManager[None]]

PROFILING_SHARE = 0.3  # of the budget, after which nothing more is profiled
BESIDE = 2  # busy workers to profile: more of them have cores of their own, and the trials correct the rest
#: What TorchServe does where nobody tells it anything, and what its tutorials tell it.
DEFAULTS, TUTORIAL = "TorchServe's defaults", "the tutorials' setting"


@dataclass(frozen=True)
class Wanted:
    """The options.

    Args:
        path: the archive.
        served: its entry in serving.yaml, or the defaults of one.
        server: the deployment that it is part of.
        objective: to be met.
        rate: requests per second; None seeks the highest rate.
        trace, bodies, workload, arrivals: what is sent, as `sent.read` has it.
        budget_s: seconds for it all.
        workers, threads, batch_sizes, delays: to choose from; None leaves the choice to the machine.
        dtypes: likewise; none is the archive's own.
        compare: whether the settings that people use are measured too.
        directory: of states.
        fresh: forget what was measured before.
    """

    path: Path
    served: ServedModel
    server: Serving
    objective: Objective
    rate: float | None
    trace: Path | None
    bodies: Path | None
    workload: str | None
    arrivals: str
    budget_s: float
    workers: Sequence[int] | None
    threads: Sequence[int] | None
    batch_sizes: Sequence[int] | None
    delays: Sequence[int] | None
    dtypes: Sequence[str]
    compare: bool
    directory: Path
    fresh: bool


@dataclass
class Tuner:
    """Tunes one archive.

    Args:
        wanted: the options.
        progress: shows that a labelled step is under way.

    Raises:
        UserError: the archive can't be tuned, or the options don't go together.
    """

    wanted: Wanted
    progress: Progress
    about: Archive = field(init=False)
    sent: Sent = field(init=False)
    state: TuneState = field(init=False)
    _left_out: list[str] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        wanted = self.wanted
        self.about = archive.read(wanted.path)
        check(self.about, wanted.served, wanted.server)
        self.sent = sent.read(
            self.about, bodies=wanted.bodies, trace=wanted.trace, workload=wanted.workload, arrivals=wanted.arrivals
        )
        trace = self.sent.trace
        if trace is not None and trace.seconds > wanted.budget_s / 3:
            raise UserError(
                f"{trace.label} lasts {trace.seconds:.0f} s, and the winner must meet the objective over all of it",
                f"give --budget at least {3 * trace.seconds / 60:.0f}m, or a shorter trace",
            )
        self.machine = machine.describe()
        # As the deployment runs it: config.properties has no more GPUs than serving.yaml allows
        self.cores, self.devices = cores(), _gpus()[: wanted.server.server.gpus]
        self.gpus = len(self.devices)
        self.windows = Windows.within(wanted.budget_s)
        self.space = Space(
            crews=crews(
                self.cores, self.gpus, workers=wanted.workers, threads=wanted.threads, cheaper=not self.maximum
            ),
            batch_sizes=tuple(wanted.batch_sizes or BATCH_SIZES),
            delays=tuple(wanted.delays or DELAYS),
            dtypes=tuple(wanted.dtypes) or (None,),
            queue=wanted.served.queue,
        )
        self.settings = list(self.space.settings())
        if not self.settings:
            raise UserError(
                f"a queue of {wanted.served.queue} holds no batch for every worker", "lengthen it in serving.yaml"
            )
        self.baselines = (
            baseline_settings(self.about, self.cores, self.gpus, wanted.served.queue) if wanted.compare else {}
        )
        self.state = TuneState.open(wanted.directory, self.about.name, self._about(), fresh=wanted.fresh)

    @property
    def maximum(self) -> bool:
        """Whether the highest rate is sought, and no load is given."""
        return self.wanted.rate is None and self.sent.trace is None

    def run(self) -> TuneReport:
        """Search, or go on with an interrupted search, or show a finished one again.

        Returns:
            The report; its outcome is None where Ctrl-C ended the search.

        Raises:
            UserError: nothing can be served or measured here.
        """
        finished = self.state.finished
        if finished is not None and finished.space == self._space() and finished.budget_s >= self.wanted.budget_s:
            when = "all of it was measured by an earlier run, whose result this is; --fresh measures anew"
            advice = self._advice(finished.outcome, self._forecast())
            return self._report(finished.outcome, advice, [when])
        before = len(self.state.points)
        notes = [f"{before} of the windows were measured by an earlier run"] if before else []
        try:
            with stop_on_signals():
                outcome, forecast = self._search()
        except KeyboardInterrupt:
            return self._report(None, (), notes)
        failed = outcome.winner is None and any(point.failure for point in self.state.points)
        if not (outcome.unknown or failed or self._left_out):  # else the same command goes on from here
            self.state.finished = Finished(budget_s=self.wanted.budget_s, space=self._space(), outcome=outcome)
            self.state.save()
        return self._report(outcome, self._advice(outcome, forecast), notes)

    def changes(self, setting: Setting) -> dict[str, Any]:
        """What the archive must say otherwise for a setting, in the deployment as it is declared."""
        return changes_for(self.about, setting, self.cores, alone=len(self.wanted.server.models) == 1)

    def _search(self) -> tuple[Outcome, Forecast]:
        wanted = self.wanted
        budget = Budget(wanted.budget_s)
        forecast = self._forecast(budget)
        settings = [each for each in self.settings if (each.threads, each.dtype) in forecast.profiles]
        baselines = {
            name: each for name, each in self.baselines.items() if (each.threads, each.dtype) in forecast.profiles
        }
        self._left_out = [str(each) for each in self.settings if each not in settings]
        self._left_out += [name for name in self.baselines if name not in baselines]
        with (
            tempfile.TemporaryDirectory(prefix="batchserve-tune-") as work,
            Trials(
                self.about, self.sent, wanted.objective, self.windows, Path(work), self.cores, self.gpus,
                wanted.served.queue, self.progress, lambda: budget.left,
            ) as trials,
        ):  # fmt: skip
            search = Search(Ledger(trials, budget, self.state.points, self._keep), forecast, settings, baselines)
            outcome = search.maximise() if self.maximum else search.satisfy(wanted.rate)
        return outcome, forecast

    def _keep(self, _: Point) -> None:
        """Write down a new point; the ledger has put it into the state's own list."""
        self.state.save()

    def _forecast(self, budget: Budget | None = None) -> Forecast:
        """Predictions from the costs of every number of threads and dtype, measured where no earlier run did.

        Once its share of a budget is gone, the costs that are not known are left out. A trace is predicted where it is
        busiest, as it is searched.
        """
        needed: dict[tuple[int | None, str | None], int] = {}
        for each in (*self.settings, *self.baselines.values()):
            key = each.threads, each.dtype
            needed[key] = max(needed.get(key, 1), min(each.workers, 1 if self.gpus else BESIDE))
        known = {(each.threads, each.dtype): each.profile for each in self.state.costs}
        for (threads, dtype), workers in needed.items():
            some = any((each.threads, each.dtype) in known for each in self.settings)
            if budget is not None and some and budget.left < (1 - PROFILING_SHARE) * budget.seconds:
                break
            if (threads, dtype) not in known or len(known[threads, dtype].rates) < workers:
                known[threads, dtype] = self._profile(threads, dtype, workers)
                self.state.costs = [Costs(threads=key[0], dtype=key[1], profile=each) for key, each in known.items()]
                self.state.save()
        times, profiles = self.sent.times, {key: known[key] for key in needed if key in known}
        if times:
            first, end = sent.busiest(times, self.windows.search)
            times = tuple(at - times[first] for at in times[first:end])
            profiles = {
                key: each.model_copy(update={"requests": each.requests[first:end]}) for key, each in profiles.items()
            }
        return Forecast(profiles, self.wanted.objective, self.wanted.served.queue, self.gpus, self.sent.arrivals, times)

    def _profile(self, threads: int | None, dtype: str | None, workers: int) -> Profile:
        path = self.about.path
        with tempfile.TemporaryDirectory(prefix="batchserve-tune-") as work:
            if dtype is not None and dtype != self.about.settings.get("dtype", "auto"):
                path = Path(work) / path.name
                variant.write(self.about, {"dtype": dtype}, path)
            texts = Texts(bodies=tuple(body.data for body in self.sent.bodies))
            found = profile(path, texts, workers=workers, threads=threads, progress=self.progress, gpu=bool(self.gpus))
        # What torch brought stays; the collector need not walk it between two requests of a load
        gc.collect()
        gc.freeze()
        return found

    def _advice(self, outcome: Outcome, forecast: Forecast) -> Sequence[str]:
        if outcome.winner is not None or outcome.closest is None or outcome.unknown:
            return ()
        return tuple(advise(forecast, outcome.closest.setting, self.wanted.rate, maximum=self.maximum))

    def _report(self, outcome: Outcome | None, advice: Sequence[str], notes: Sequence[str]) -> TuneReport:
        winner = outcome.winner if outcome is not None else None
        return TuneReport(
            self.about.name, self.machine, self._settings(), self.wanted.objective, outcome, self.state.points,
            advice, [*notes, *self._notes()], self.changes(winner.setting) if winner is not None else {},
        )  # fmt: skip

    def _notes(self) -> Iterator[str]:
        yield from self.machine.notes([each for each in self.wanted.dtypes if each is not None])
        points = self.state.points
        busy = [point for point in points if point.bottleneck]
        if busy:
            yield (
                f"in {len(busy)} of {len(points)} windows the load generator was the bottleneck; the server may be "
                "faster than they show"
            )
        if points:
            yield f"the load generator took at most {max(point.generator_share for point in points):.2f} cores"
        failed = {str(point.setting): point.failure.splitlines()[0] for point in points if point.failure}
        yield from (f"{setting} could not be served: {why}" for setting, why in failed.items())
        if self._left_out:
            named = ", ".join(each for each in self._left_out if each in self.baselines)
            yield (
                f"profiling took {PROFILING_SHARE:.0%} of the budget, and {len(self._left_out)} settings were left out"
                f"{named and f' ({named} too)'}; the same command goes on from there"
            )
        least = least_requests(self.wanted.objective, Kind.FINAL)
        for point in points:
            if point.kind == Kind.FINAL and point.met and point.requests < least:
                load = "the trace" if point.rate is None else f"{point.rate:g}/s"
                yield (
                    f"{point.setting} at {load} met {self.wanted.objective} in a window of {point.requests} requests; "
                    f"it takes {least} for a steady figure"
                )

    def _settings(self) -> dict[str, Any]:
        wanted = self.wanted
        load = "the highest rate" if self.maximum else self.sent.words if wanted.rate is None else f"{wanted.rate:g}/s"
        return {
            "archive": self.about.path.name,
            "objective": str(wanted.objective),
            "load": load,
            "requests": self.sent.words,
            "arrivals": self.sent.arrivals if self.sent.trace is None else "recorded",
            "settings": f"{len(self.settings)} to choose from",
            "budget": f"{wanted.budget_s:.0f} s",
        }

    def _space(self) -> str:
        return repr((self.space, self.wanted.compare))

    def _about(self) -> Mapping[str, Any]:
        """All that a measurement depends on beside the setting."""
        wanted = self.wanted
        return {
            "archive": archive.file_sha256(wanted.path),
            "sent": self.sent.digest(),
            "objective": str(wanted.objective),
            "rate": wanted.rate,
            "queue": wanted.served.queue,
            "machine": [self.machine.processor, self.machine.flags, round(self.machine.memory_gb), self.cores],
            "gpus": self.devices,
            "versions": self.machine.versions,
        }


def check(about: Archive, served: ServedModel, server: Serving) -> None:
    """Raise UserError where an archive can't be tuned: it generates, is foreign, or has what would win over us."""
    if about.config.get("continuousBatching") is True or about.settings.get("task") == GENERATION:
        raise UserError(
            f"{about.path.name} generates text: there is nothing to search. It has one worker, requests join and leave "
            "its batch at every token, and a delay only holds them up",
            "set workers: 1, max_batch_delay: 1, and batch_size and queue as `batchserve build` names them; "
            "batchserve bench --task generation measures it",
        )
    if not isinstance(about.config.get("handler"), dict) or about.provenance is None:
        raise UserError(
            f"{about.path} was not built by this tool, and doesn't tell what its batches cost",
            "batchserve build makes an archive of its model; bench --against measures any server",
        )
    # The settings under trial are ours to declare; what the archive itself says would win over them
    faults = [
        fault
        for fault in deployment.model_faults(server, served, about)
        if fault.startswith(("batch_size:", "max_batch_delay:", "queue:", "workers:", "version:"))
    ]
    if faults:
        raise UserError("\n".join(f"{about.path.name}: {fault}" for fault in faults))


def baseline_settings(about: Archive, count: int, gpus: int, queue: int) -> dict[str, Setting]:
    """The settings that people use: TorchServe's, a worker per CPU (or GPU), and its tutorials'."""
    crew = gpus or count
    by_itself = about.settings.get("threads")

    def threads(workers: int) -> int | None:
        return by_itself or (None if gpus else max(1, count // workers))

    defaults = Setting(workers=crew, threads=threads(crew), batch_size=1, max_batch_delay=100)
    tutorial = Setting(workers=1, threads=threads(1), batch_size=min(32, queue), max_batch_delay=20)
    return {DEFAULTS: defaults, TUTORIAL: tutorial}


def _gpus() -> list[str]:
    """The names of the GPUs that are here."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_name(each) for each in range(count)]
