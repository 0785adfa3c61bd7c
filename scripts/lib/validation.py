"""The simulation beside a measurement: what `batchserve bench` measured, predicted from a profile."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from scripts.lib.costs import Profile, Request, batch_seconds
from scripts.lib.errors import UserError
from scripts.lib.schedule import POISSON, steady
from scripts.lib.simulation import ClosedLoop, OpenLoop, Setup, simulate
from scripts.lib.subjects import SUBJECTS
from scripts.lib.workloads import WORKLOADS, request_lengths

REQUESTS = 20_000  # simulated for each point
POOL = 1000
CLIENT_S = 0.0002  # between an answer and the next request of a client of the load generator
QUEUE = 1000  # that the benchmark gives its server at least


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Spread(_Lenient):
    median: float


class BenchPoint(_Lenient):
    """A point of a benchmark: a closed loop on a server that the benchmark started."""

    workload: str
    dtype: str
    batch_size: int = Field(ge=1)
    clients: int = Field(ge=1)
    p95_ms: float | None
    effective_batch_size: float | None
    requests_per_s: _Spread


class BenchSettings(_Lenient):
    """How the measured server was set up."""

    task: str = "embedding"
    workers: int = Field(ge=1)
    threads: int | None = Field(default=None, alias="threads per worker")
    max_batch_delay: int = Field(ge=1, alias="max batch delay ms")


class Bench(_Lenient):
    """What is needed of a benchmark's result."""

    settings: BenchSettings
    points: tuple[BenchPoint, ...] = Field(min_length=1)


class _Figures(_Lenient):
    p95_ms: float | None
    requests_per_s: float


class _Batching(_Lenient):
    effective_batch_size: float | None


class LoadWindow(_Lenient):
    """A window of a load on a running server; the label of a steady rate is `50/s`."""

    label: str
    open_loop: bool
    clients: int = Field(ge=1)
    due_per_s: float
    part: bool = False
    summary: _Figures
    batching: _Batching | None

    @property
    def steady(self) -> bool:
        """Whether it is one rate, or one number of clients, all the time."""
        return not self.part and (not self.open_loop or self.label.endswith("/s"))


class LoadSettings(_Lenient):
    """Of a load."""

    arrivals: str = POISSON


class Load(_Lenient):
    """What is needed of the result of a load on a running server, which does not tell how the server is set up."""

    settings: LoadSettings
    windows: tuple[LoadWindow, ...] = Field(min_length=1)


def read(path: Path) -> Bench | Load:
    """Read what `batchserve bench --json` wrote.

    Raises:
        UserError: the file can't be read, or is no such result.
    """
    hint = "batchserve bench --json FILE writes one"
    try:
        content = path.read_bytes()
        return (Load if b'"windows"' in content else Bench).model_validate_json(content)
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}", hint) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{path} is no result of bench: {where}: {first['msg']}", hint) from error


@dataclass(frozen=True)
class Compared:
    """One figure, predicted and measured."""

    predicted: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Predicted ÷ measured; None where one is missing."""
        return self.predicted / self.measured if self.predicted is not None and self.measured else None


@dataclass(frozen=True)
class Validated:
    """One point.

    Args:
        load: in words.
        p95_ms, batch_size, requests_per_s: predicted and measured.
        utilisation: predicted, of the workers.
    """

    load: str
    p95_ms: Compared
    batch_size: Compared
    requests_per_s: Compared
    utilisation: float


def validate(
    profile: Profile, measured: Bench | Load, declared: Setup, requests: Sequence[Request], seed: int = 0
) -> tuple[list[Validated], list[str]]:
    """Predict every point of a measurement that the profile speaks of.

    Args:
        profile: the costs.
        measured: a benchmark, which tells its server's setup and texts, or a load, which does not.
        declared: the setup of the server that was under the load.
        requests: token lengths of the texts of each request of the load.
        seed: of arrivals and order.

    Returns:
        The points, and what a reader must know to judge them.

    Raises:
        UserError: there is no point of the profile's dtype and a known workload, or no steady window.
    """
    if isinstance(measured, Load):
        return _load(profile, measured, declared, requests, seed)
    settings = measured.settings
    notes = []
    if settings.threads not in (None, profile.threads):
        notes.append(f"measured with {settings.threads} threads per worker, profiled with {profile.threads}")
    if settings.workers > len(profile.rates):
        notes.append(f"profiled with at most {len(profile.rates)} busy workers, measured with {settings.workers}")
    if settings.task != profile.task:
        notes.append(f"measured {settings.task}, profiled {profile.task}")
    known = [point for point in measured.points if point.dtype == profile.dtype and point.workload in WORKLOADS]
    if len(known) < len(measured.points):
        notes.append(f"{len(measured.points) - len(known)} points left out: of another dtype than {profile.dtype}")
    if not known:
        raise UserError(f"No point of the measurement is of {profile.dtype}, as the profile is.")
    return [_point(profile, settings, point, seed) for point in known], notes


def _point(profile: Profile, settings: BenchSettings, point: BenchPoint, seed: int) -> Validated:
    setup = Setup(
        workers=settings.workers,
        batch_size=point.batch_size,
        max_batch_delay=settings.max_batch_delay,
        queue=max(QUEUE, 2 * point.clients, point.batch_size * settings.workers),
        workers_per_device=settings.workers,
    )
    subject = SUBJECTS.get(settings.task, SUBJECTS["embedding"])
    requests = request_lengths(point.workload, POOL, seed, per_list=subject.list_items, most=profile.max_tokens)
    return _predicted(
        profile, setup, requests, ClosedLoop(point.clients, REQUESTS, CLIENT_S), seed,
        f"{point.workload}, {point.clients} clients, batch size {point.batch_size}",
        (point.p95_ms, point.effective_batch_size, point.requests_per_s.median),
    )  # fmt: skip


def _load(
    profile: Profile, measured: Load, declared: Setup, requests: Sequence[Request], seed: int
) -> tuple[list[Validated], list[str]]:
    known = [window for window in measured.windows if window.steady]
    if not known:
        raise UserError("No window of the load is steady.", "measure with --rate or --clients")
    notes = ["the server's setup is the declared one: the measurement does not tell it"]
    if len(known) < len(measured.windows):
        notes.append(f"{len(measured.windows) - len(known)} windows left out: their load changes")
    return [_window(profile, window, measured.settings.arrivals, declared, requests, seed) for window in known], notes


def _window(
    profile: Profile, window: LoadWindow, arrivals: str, declared: Setup, requests: Sequence[Request], seed: int
) -> Validated:
    load: OpenLoop | ClosedLoop = ClosedLoop(window.clients, REQUESTS, CLIENT_S)
    if window.open_loop:
        rate = window.due_per_s  # a draw of arrivals is not exactly the rate that was asked for
        load = OpenLoop(list(steady(rate, REQUESTS / rate, arrivals, seed).times()))
    batch_size = window.batching.effective_batch_size if window.batching else None
    return _predicted(
        profile, replace(declared, queue=max(declared.queue, window.clients)), requests, load, seed, window.label,
        (window.summary.p95_ms, batch_size, window.summary.requests_per_s),
    )  # fmt: skip


def _predicted(
    profile: Profile,
    setup: Setup,
    requests: Sequence[Request],
    load: OpenLoop | ClosedLoop,
    seed: int,
    words: str,
    measured: tuple[float | None, float | None, float],
) -> Validated:
    outcome = simulate(setup, batch_seconds(profile), requests, load, frontend_s=profile.frontend_s, seed=seed)
    p95_ms, batch_size, rate = measured
    return Validated(
        words,
        Compared(outcome.latency_ms(95), p95_ms),
        Compared(outcome.batch_size, batch_size),
        Compared(outcome.requests_per_s, rate),
        outcome.utilisation,
    )


def within(points: Sequence[Validated], share: float = 0.2) -> bool:
    """Whether p95 and batch size of every point are predicted to within a share of what was measured."""
    figures = [figure.ratio for point in points for figure in (point.p95_ms, point.batch_size)]
    return all(ratio is not None and abs(ratio - 1) <= share for ratio in figures)
