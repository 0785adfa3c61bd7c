"""The benchmark's result: what was measured, which targets that reaches, as a table and as JSON."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.lib.machine import Machine
from scripts.lib.offline import BATCH_SIZE, SingleText
from scripts.lib.scrape import BatchingWindow
from scripts.lib.stats import Spread, Summary
from scripts.lib.strict_json import strict_json

BYTES_PER_MB = 1e6


@dataclass(frozen=True)
class Round:
    """One measured window of one point.

    Attributes:
        summary: the window in figures.
        batching: what the server's metrics say of the same window.
        generator_share: CPU of the load generator, in cores.
        generator_bottleneck: whether it was too busy to be trusted.
        ratio: texts/s ÷ the offline texts/s around this round at the same dtype; None without a yardstick.
    """

    summary: Summary
    batching: BatchingWindow
    generator_share: float
    generator_bottleneck: bool
    ratio: float | None = None


@dataclass(frozen=True)
class Point:
    """A workload at a number of clients on one server, over all rounds.

    Attributes:
        peak_memory: bytes of all the server's processes, the largest of any round.
    """

    workload: str
    clients: int
    dtype: str
    batch_size: int
    rounds: tuple[Round, ...]
    peak_memory: int

    @property
    def texts_per_s(self) -> Spread:
        """Texts per second over the rounds."""
        return Spread.of([each.summary.texts_per_s for each in self.rounds])

    @property
    def requests_per_s(self) -> Spread:
        """Requests per second over the rounds."""
        return Spread.of([each.summary.requests_per_s for each in self.rounds])

    @property
    def ratio(self) -> Spread | None:
        """Texts/s ÷ offline texts/s at the same dtype, round by round."""
        ratios = [each.ratio for each in self.rounds if each.ratio is not None]
        return Spread.of(ratios) if ratios else None

    @property
    def errors(self) -> int:
        """Failed requests of all rounds, those that the server shed among them: a comparison may have none."""
        return sum(each.summary.errors + each.summary.shed for each in self.rounds)

    @property
    def effective_batch_size(self) -> float | None:
        """Requests per batch over all rounds."""
        return _over((each.batching.requests, each.batching.batches) for each in self.rounds)

    @property
    def padding_share(self) -> float | None:
        """Padding ÷ all tokens run, over all rounds."""
        windows = [each.batching for each in self.rounds]
        return _over((window.padding_tokens, window.tokens + window.padding_tokens) for window in windows)

    def latency(self, which: str) -> float | None:
        """Median over the rounds of `p50_ms`, `p95_ms`, …; None where no request succeeded."""
        values = [value for each in self.rounds if (value := getattr(each.summary, which)) is not None]
        return Spread.of(values).median if values else None


@dataclass(frozen=True)
class OfflineRun:
    """The yardstick of a workload at a dtype: texts/s of every time it was measured."""

    workload: str
    dtype: str
    threads: int
    texts: int
    texts_per_s: tuple[float, ...]
    single: SingleText | None = None

    @property
    def rate(self) -> Spread:
        """Texts per second over all its runs."""
        return Spread.of(self.texts_per_s)


@dataclass(frozen=True)
class Target:
    """One thing to reach.

    Attributes:
        name: what is compared, in words.
        goal: the figure to reach.
        measured: what came out; None when this run didn't measure it.
        at_most: whether less is better.
        unit: what follows the figures.
        note: where the figure comes from.
    """

    name: str
    goal: float
    measured: float | None
    at_most: bool = False
    unit: str = ""
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether it is reached; None when it wasn't measured."""
        if self.measured is None:
            return None
        return self.measured <= self.goal if self.at_most else self.measured >= self.goal

    @property
    def verdict(self) -> str:
        """Reached or missed, and by how much."""
        if self.measured is None:
            return "not measured"
        distance = abs(self.measured - self.goal)
        share = f" ({distance / self.goal:.0%})" if self.goal else ""
        return f"{'reached' if self.reached else 'MISSED'} by {distance:.3g}{self.unit}{share}"


@dataclass(frozen=True)
class Report:
    """Everything a run measured."""

    machine: Machine
    settings: dict[str, Any]
    points: tuple[Point, ...]
    offline: tuple[OfflineRun, ...]
    targets: tuple[Target, ...] = ()
    notes: tuple[str, ...] = ()
    agreement: dict[str, float] = field(default_factory=dict)

    def judged(self, targets: tuple[Target, ...]) -> "Report":
        """The same report with its targets."""
        return dataclasses.replace(self, targets=targets)

    def find(self, workload: str, clients: int, dtype: str, batch_size: int | None = None) -> Point | None:
        """The point with these settings; of several batch sizes the largest unless one is named."""
        found = [
            point
            for point in self.points
            if (point.workload, point.clients, point.dtype) == (workload, clients, dtype)
            and batch_size in (None, point.batch_size)
        ]
        return max(found, key=lambda point: point.batch_size, default=None)

    def offline_rate(self, workload: str, dtype: str) -> float | None:
        """Median offline texts/s of a workload at a dtype; None when it wasn't measured."""
        for run in self.offline:
            if (run.workload, run.dtype) == (workload, dtype):
                return run.rate.median
        return None


def _over(pairs: Iterable[tuple[float, float]]) -> float | None:
    numerators, denominators = zip(*pairs, strict=True)
    return sum(numerators) / sum(denominators) if sum(denominators) else None


# ---------------------------------------------------------------------------------------------------------------------
# JSON


def to_json(report: Report) -> bytes:
    """The report as strict JSON, raw rounds included; what is not a number is null."""
    document = {
        "machine": dataclasses.asdict(report.machine),
        "settings": report.settings,
        "points": [_point_json(point) for point in report.points],
        "offline": [{**dataclasses.asdict(run), "rate": dataclasses.asdict(run.rate)} for run in report.offline],
        "agreement_with_offline": report.agreement,
        "targets": targets_json(report.targets),
        "notes": list(report.notes),
    }
    return strict_json(document)


def targets_json(targets: Sequence[Target]) -> list[dict[str, Any]]:
    """Targets with their verdicts."""
    return [{**dataclasses.asdict(target), "reached": target.reached, "verdict": target.verdict} for target in targets]


def _point_json(point: Point) -> dict[str, Any]:
    return {
        "workload": point.workload,
        "clients": point.clients,
        "dtype": point.dtype,
        "batch_size": point.batch_size,
        "requests_per_s": dataclasses.asdict(point.requests_per_s),
        "texts_per_s": dataclasses.asdict(point.texts_per_s),
        "p50_ms": point.latency("p50_ms"),
        "p95_ms": point.latency("p95_ms"),
        "p99_ms": point.latency("p99_ms"),
        "errors": point.errors,
        "effective_batch_size": point.effective_batch_size,
        "padding_share": point.padding_share,
        "peak_memory_bytes": point.peak_memory,
        "ratio_to_offline": dataclasses.asdict(point.ratio) if point.ratio else None,
        "rounds": [dataclasses.asdict(each) for each in point.rounds],
    }


def write_json(report: Report, path: Path) -> None:
    """Write the report to a file.

    Raises:
        OSError: it can't be written.
    """
    path.write_bytes(to_json(report))


# ---------------------------------------------------------------------------------------------------------------------
# Terminal


def show(report: Report, console: Console) -> None:
    """Print machine, yardstick, points, targets and notes."""
    show_heading(report.machine, report.settings, console)
    if report.offline:
        yardstick = str(report.settings.get("yardstick", "sentence-transformers' encode"))
        console.print(_offline_table(report.offline, yardstick))
    if report.points:
        console.print(_points_table(report.points))
    show_targets(report.targets, report.notes, console)


def show_heading(machine: Machine, settings: dict[str, Any], console: Console) -> None:
    """Print where it was measured, and how."""
    versions = ", ".join(f"{name} {number}" for name, number in machine.versions.items())
    console.print(
        f"{machine.processor}, {machine.cores} cores, {machine.memory_gb:g} GB, "
        f"{' '.join(machine.flags) or 'no vector extensions known'}; {versions}; {machine.date}",
        markup=False,
    )
    console.print(", ".join(f"{name} {value}" for name, value in settings.items()), markup=False)


def show_targets(targets: Sequence[Target], notes: Sequence[str], console: Console) -> None:
    """Print which goals were reached, and what a reader must know to judge the figures."""
    if targets:
        console.print(_targets_table(targets))
    for note in notes:
        console.print(f"note: {note}", markup=False)


def _offline_table(runs: Sequence[OfflineRun], yardstick: str) -> Table:
    table = Table(title=f"offline: {yardstick}, batches of {BATCH_SIZE}", title_justify="left")
    table.add_column("workload")
    table.add_column("dtype")
    for name in ("threads", "texts", "texts/s", "one text: forward ms", "encode ms"):
        table.add_column(name, justify="right")
    for run in runs:
        single = (f"{run.single.forward_ms:.1f}", f"{run.single.encode_ms:.1f}") if run.single else ("–", "–")
        table.add_row(run.workload, run.dtype, str(run.threads), str(run.texts), _spread(run.rate), *single)
    return table


def _points_table(points: Sequence[Point]) -> Table:
    table = Table(title="over HTTP: median (lowest–highest round)", title_justify="left")
    for name in ("workload", "dtype"):
        table.add_column(name)
    for name in (
        "batch",
        "clients",
        "requests/s",
        "texts/s",
        "p50 ms",
        "p95 ms",
        "p99 ms",
        "errors",
        "eff. batch",
        "padding",
        "peak MB",
        "÷ offline",
    ):
        table.add_column(name, justify="right")
    for point in points:
        table.add_row(
            point.workload,
            point.dtype,
            str(point.batch_size),
            str(point.clients),
            f"{point.requests_per_s.median:.1f}",
            _spread(point.texts_per_s),
            *(_number(point.latency(which), ".1f") for which in ("p50_ms", "p95_ms", "p99_ms")),
            str(point.errors),
            _number(point.effective_batch_size, ".1f"),
            _number(point.padding_share, ".2%"),
            f"{point.peak_memory / BYTES_PER_MB:.0f}",
            _spread(point.ratio, ".2f") if point.ratio else "–",
        )
    return table


def _targets_table(targets: Sequence[Target]) -> Table:
    table = Table(title="targets", title_justify="left")
    table.add_column("target")
    table.add_column("goal", justify="right")
    table.add_column("measured", justify="right")
    table.add_column("verdict")
    table.add_column("from")
    for target in targets:
        table.add_row(
            target.name,
            f"{'≤' if target.at_most else '≥'} {target.goal:.3g}{target.unit}",
            "–" if target.measured is None else f"{target.measured:.3g}{target.unit}",
            target.verdict,
            target.note,
            style="red" if target.reached is False else None,
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _spread(spread: Spread, form: str = ".0f") -> str:
    if spread.low == spread.high:
        return format(spread.median, form)
    return f"{spread.median:{form}} ({spread.low:{form}}–{spread.high:{form}})"
