"""The simulation beside a measurement: the points of a `batchserve bench` result, predicted from a profile."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from scripts.lib.costs import Profile, batch_seconds
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


class BenchPoint(_Lenient):
    """A measured point: `clients` of a closed loop, or `rate` (requests per second) of an open one."""

    workload: str
    dtype: str
    batch_size: int = Field(ge=1)
    clients: int | None = Field(default=None, ge=1)
    rate: float | None = Field(default=None, gt=0)
    arrivals: str = POISSON
    p95_ms: float | None
    effective_batch_size: float | None
    requests_per_s: dict[str, float] | float | None = None


class BenchSettings(_Lenient):
    """How the measured server was set up."""

    task: str = "embedding"
    workers: int = Field(ge=1)
    threads: int | None = Field(default=None, alias="threads per worker")
    max_batch_delay: int = Field(ge=1, alias="max batch delay ms")


class Bench(_Lenient):
    """What is needed of a result of `batchserve bench --json`."""

    settings: BenchSettings
    points: tuple[BenchPoint, ...]

    @classmethod
    def read(cls, path: Path) -> "Bench":
        """Read a result.

        Raises:
            UserError: the file can't be read, or is no such result.
        """
        hint = "batchserve bench --json FILE writes one"
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise UserError(f"{path} can't be read: {error.strerror}", hint) from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise UserError(
                f"{path} is no result of bench: {'.'.join(map(str, first['loc']))}: {first['msg']}", hint
            ) from error


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


def validate(profile: Profile, bench: Bench, seed: int = 0) -> tuple[list[Validated], list[str]]:
    """Predict every point of a measurement that the profile speaks of.

    Returns:
        The points, and what a reader must know to judge them.

    Raises:
        UserError: no point is of the profile's dtype and a known workload.
    """
    settings = bench.settings
    notes = []
    if settings.threads not in (None, profile.threads):
        notes.append(f"measured with {settings.threads} threads per worker, profiled with {profile.threads}")
    if settings.workers > len(profile.rates):
        notes.append(f"profiled with at most {len(profile.rates)} busy workers, measured with {settings.workers}")
    if settings.task != profile.task:
        notes.append(f"measured {settings.task}, profiled {profile.task}")
    known = [p for p in bench.points if p.dtype == profile.dtype and p.workload in WORKLOADS and (p.clients or p.rate)]
    if len(known) < len(bench.points):
        notes.append(f"{len(bench.points) - len(known)} points left out: of another dtype than {profile.dtype}")
    if not known:
        raise UserError(f"No point of the measurement is of {profile.dtype}, as the profile is.")
    return [_validated(profile, settings, point, seed) for point in known], notes


def _validated(profile: Profile, settings: BenchSettings, point: BenchPoint, seed: int) -> Validated:
    setup = Setup(
        workers=settings.workers,
        batch_size=point.batch_size,
        max_batch_delay=settings.max_batch_delay,
        queue=max(QUEUE, 2 * (point.clients or 0), point.batch_size * settings.workers),
        workers_per_device=settings.workers,
    )
    subject = SUBJECTS.get(settings.task, SUBJECTS["embedding"])
    requests = request_lengths(point.workload, POOL, seed, per_list=subject.list_items, most=profile.max_tokens)
    load: OpenLoop | ClosedLoop
    if point.rate is not None:
        load = OpenLoop(list(steady(point.rate, REQUESTS / point.rate, point.arrivals, seed).times()))
        words = f"{point.rate:g}/s {point.arrivals}"
    else:
        load = ClosedLoop(point.clients or 1, REQUESTS, CLIENT_S)
        words = f"{point.clients} clients"
    outcome = simulate(setup, batch_seconds(profile), requests, load, frontend_s=profile.frontend_s, seed=seed)
    rate = point.requests_per_s
    return Validated(
        f"{point.workload}, {words}, batch size {point.batch_size}",
        Compared(outcome.latency_ms(95), point.p95_ms),
        Compared(outcome.batch_size, point.effective_batch_size),
        Compared(outcome.requests_per_s, rate.get("median") if isinstance(rate, dict) else rate),
        outcome.utilisation,
    )


def within(points: Sequence[Validated], share: float = 0.2) -> bool:
    """Whether p95 and batch size of every point are predicted to within a share of what was measured."""
    figures = [figure.ratio for point in points for figure in (point.p95_ms, point.batch_size)]
    return all(ratio is not None and abs(ratio - 1) <= share for ratio in figures)
