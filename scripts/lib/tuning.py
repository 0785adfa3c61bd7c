"""What `batchserve tune` speaks of: a setting, the space of them, a measured point, and what came of it all."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

#: Milliseconds that are tried where nothing else is said.
DELAYS = (1, 2, 5, 10, 20, 50)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
#: Of a GPU, where nothing else is said: a second worker prepares texts while the first one computes.
PER_GPU = (1, 2)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Setting(_Strict):
    """How a model is served.

    Args:
        workers: processes.
        threads: of each; None leaves them to torch, as on a GPU.
        batch_size: requests a batch at most.
        max_batch_delay: milliseconds.
        dtype: that the model computes in; None is the archive's own.
    """

    workers: int
    threads: int | None
    batch_size: int
    max_batch_delay: int
    dtype: str | None = None

    @property
    def cores(self) -> int:
        """What it costs: threads that compute at once, or workers where threads are left to torch."""
        return self.workers * (self.threads or 1)

    @property
    def group(self) -> tuple[int, int | None, str | None]:
        """Settings of one group differ in how they batch, not in what computes."""
        return self.workers, self.threads, self.dtype

    def __str__(self) -> str:
        workers = f"{self.workers} worker{'s' if self.workers > 1 else ''}"
        threads = "" if self.threads is None else f" × {self.threads} thread{'s' if self.threads > 1 else ''}"
        dtype = "" if self.dtype is None else f", {self.dtype}"
        return f"{workers}{threads}, batch size {self.batch_size}, delay {self.max_batch_delay} ms{dtype}"


@dataclass(frozen=True)
class Space:
    """Settings to choose from.

    Args:
        crews: workers and threads of each that go together.
        batch_sizes: requests.
        delays: milliseconds.
        dtypes: None among them is the archive's own.
        queue: requests that may wait; it must hold a batch for every worker.
    """

    crews: Sequence[tuple[int, int | None]]
    batch_sizes: Sequence[int] = BATCH_SIZES
    delays: Sequence[int] = DELAYS
    dtypes: Sequence[str | None] = (None,)
    queue: int = 1000

    def settings(self) -> Iterator[Setting]:
        """All of them. A batch of one waits for nobody: of its delays the shortest is enough."""
        for workers, threads in self.crews:
            for dtype in self.dtypes:
                for size in self.batch_sizes:
                    if size * workers > self.queue:
                        continue
                    for delay in self.delays if size > 1 else (min(self.delays),):
                        yield Setting(
                            workers=workers, threads=threads, batch_size=size, max_batch_delay=delay, dtype=dtype
                        )


def crews(
    cores: int,
    gpus: int,
    *,
    workers: Sequence[int] | None = None,
    threads: Sequence[int] | None = None,
    cheaper: bool = False,
) -> list[tuple[int, int | None]]:
    """Workers and threads that are worth trying on a machine.

    Args:
        cores: of the machine.
        gpus: of it; with any, threads are left to torch unless they are named.
        workers, threads: only these, where given.
        cheaper: also those that leave cores unused.
    """
    if gpus:
        counts = workers or [gpus * each for each in PER_GPU]
        return [(count, each) for count in counts for each in (threads or (None,))]
    powers = sorted({1 << power for power in range(cores.bit_length()) if 1 << power <= cores} | {cores})
    found: list[tuple[int, int | None]] = []
    for count in workers or powers:
        share = max(1, cores // count)
        fewer = [each for each in powers if each < share] if cheaper else []
        found += [(count, each) for each in threads or (*fewer, share)]
    return found


class Kind(StrEnum):
    """What a window was for: to search, to verify at full length, or to see what a lone client meets."""

    SEARCH = "search"
    FINAL = "final"
    QUIET = "quiet"


class Point(_Strict):
    """One measured window.

    Args:
        setting, kind: of what, and what for.
        rate: requests due per second; None of one client, and of a trace.
        seconds: that the window was to last.
        met: whether it met the objective.
        margin: the smallest share of a bound that was left, negative where one was passed; None where it was stopped.
        judged_ms: the objective's first figure; of what was answered, where the window was stopped.
        requests: that were due.
        per_s: answered well per second.
        p50_ms, p95_ms, p99_ms: of those.
        errors, shed: not answered well; refused as too many.
        stopped: whether the window was ended early, since the objective could no longer be met.
        batch_size: requests a batch, where the server's counters tell.
        padding: share of the tokens run that were padding.
        generator_share: of a core, that the load generator took.
        bottleneck: whether it was too busy to be trusted.
        failure: why the setting could not be served at all; "" where it could.
    """

    setting: Setting
    kind: Kind
    rate: float | None
    seconds: float
    met: bool
    margin: float | None = None
    judged_ms: float | None = None
    requests: int = 0
    per_s: float = 0.0
    p50_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    errors: int = 0
    shed: int = 0
    stopped: bool = False
    batch_size: float | None = None
    padding: float | None = None
    generator_share: float = 0.0
    bottleneck: bool = False
    failure: str = ""


class Verified(_Strict):
    """A setting that met the objective in a window of full length, at this rate (None: of the trace)."""

    setting: Setting
    rate: float | None
    point: Point


class Baseline(_Strict):
    """A setting that people use, measured as the others are.

    Args:
        name, setting: of it.
        verified: at its highest rate, or at the load that was given.
        missed: why it is not verified.
        at_least: whether the search for its highest rate was cut short, so that a higher one may do as well.
    """

    name: str
    setting: Setting
    verified: Verified | None
    missed: str = ""
    at_least: bool = False


class Outcome(_Strict):
    """What a search found.

    Args:
        winner: verified; None where no setting is.
        quiet: one client at the winner.
        baselines: settings to compare with.
        ended: why no more was measured.
        closest: without a winner, the window that came nearest.
        given: whether the load was given, and no highest rate sought.
        unknown: without a winner, whether a setting may meet the objective all the same: not all was measured.
    """

    winner: Verified | None
    quiet: Point | None = None
    baselines: tuple[Baseline, ...] = ()
    ended: str
    closest: Point | None = None
    given: bool = False
    unknown: bool = False


def rounded(rate: float) -> float:
    """A rate to three significant digits: a resumed search asks for the very same ones."""
    return float(f"{rate:.3g}")
