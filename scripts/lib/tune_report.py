"""What a tune found: sections of sentences and tables, on the terminal, as Markdown, as a page and as JSON."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from scripts.lib import load_html
from scripts.lib.load_report import machine_line
from scripts.lib.machine import Machine
from scripts.lib.objective import Objective
from scripts.lib.plots import Axis, Series, lines
from scripts.lib.strict_json import strict_json
from scripts.lib.tuning import Baseline, Kind, Outcome, Point, Setting, Verified

#: What the project promises over each baseline, where MiniLM's mixed texts are served.
GOALS = {"TorchServe's defaults": 1.5, "the tutorials' setting": 1.2}
_POINTS = (
    "setting", "window", "due/s", "s", "requests", "answered/s", "p50 ms", "p95 ms", "p99 ms", "margin", "errors",
    "shed", "eff. batch", "padding", "objective",
)  # fmt: skip


@dataclass(frozen=True)
class TuneReport:
    """Everything that a tune found.

    Args:
        name: of the model.
        machine: where.
        settings: of the tune, in words.
        objective: to be met.
        outcome: of the search; None of one that was interrupted.
        points: measured windows.
        advice: what would meet the objective, where no setting does.
        notes: what a reader must know to judge the figures.
        changes: keys of the archive's `handler:` section that the winner needs otherwise.
    """

    name: str
    machine: Machine
    settings: dict[str, Any]
    objective: Objective
    outcome: Outcome | None
    points: Sequence[Point]
    advice: Sequence[str] = ()
    notes: Sequence[str] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """Texts in rows, the first row's those of the heading."""

    heading: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """A title, sentences, and perhaps a table."""

    title: str
    sentences: Sequence[str]
    table: Table | None = None


def sections(report: TuneReport) -> Iterator[Section]:
    """The report, in the order of importance."""
    yield Section("Result", tuple(_result(report)))
    outcome = report.outcome
    if outcome is not None and outcome.baselines:
        yield Section("Beside what people use", (), _baselines(outcome, report.objective))
    yield Section(
        "Every window measured",
        ("stopped: ended early, since the objective could no longer be met; its latencies are of what was answered",),
        Table(_POINTS, [_cells(point) for point in report.points]),
    )
    if report.notes:
        yield Section("Notes", tuple(report.notes))


def _result(report: TuneReport) -> Iterator[str]:
    outcome = report.outcome
    if outcome is None:
        yield "Interrupted before a setting was verified; run the same command again to go on from here."
        return
    if outcome.winner is None:
        if outcome.unknown:
            yield f"No setting is verified to meet {report.objective}: {outcome.ended}. A larger --budget may find one."
        else:
            yield f"No setting meets {report.objective} under this load: {outcome.ended}."
        yield from _closest(outcome.closest, report.points)
        yield from (f"What would: {sentence}." for sentence in report.advice)
        return
    winner = outcome.winner
    yield f"{winner.setting}: {_verified(winner, report.objective)}."
    yield f"In serving.yaml: {_entry(winner.setting, report.changes)}"
    if outcome.quiet is not None:
        yield _quiet(winner.setting, outcome.quiet)
    yield f"The search ended: {outcome.ended}."


def _verified(verified: Verified, objective: Objective) -> str:
    point = verified.point
    load = "the trace" if verified.rate is None else f"{verified.rate:g} requests/s"
    return (
        f"{load} within {objective}, verified for {point.seconds:.0f} s ({_judged(objective)} "
        f"{_number(point.judged_ms)} ms, {point.margin or 0.0:.0%} of the bound left)"
    )


def _judged(objective: Objective) -> str:
    return objective.conditions[0].figure


def _closest(closest: Point | None, points: Sequence[Point]) -> Iterator[str]:
    if closest is None:
        failures = [point for point in points if point.failure]
        if failures:
            yield f"{failures[0].setting} could not be served: {failures[0].failure.splitlines()[0]}"
        return
    load = "the trace" if closest.rate is None else f"{closest.rate:g}/s"
    yield f"Closest: {closest.setting} at {load}, p95 {_number(closest.p95_ms)} ms{' when stopped' * closest.stopped}."
    alone = [point for point in points if point.kind == Kind.QUIET and point.setting == closest.setting]
    if alone:
        verdict = "meets it" if alone[0].met else "misses it too"
        yield f"A lone client there {verdict}: p50 {_number(alone[0].p50_ms)} ms, p95 {_number(alone[0].p95_ms)} ms."


def _quiet(setting: Setting, quiet: Point) -> str:
    """What one client meets, and what the delay has to do with it."""
    told = f"In the quiet hour, one client: p50 {_number(quiet.p50_ms)} ms, p95 {_number(quiet.p95_ms)} ms"
    if setting.batch_size == 1:
        return f"{told}; batches of one wait for nobody, so the delay costs nothing there."
    share = setting.max_batch_delay / quiet.p50_ms if quiet.p50_ms else 0.0
    return (
        f"{told}; the delay costs {setting.max_batch_delay} ms of each, {share:.0%} of the p50, since a lone request "
        "waits all of it."
    )


def _entry(setting: Setting, changes: Mapping[str, Any]) -> str:
    told = f"workers: {setting.workers}, batch_size: {setting.batch_size}, max_batch_delay: {setting.max_batch_delay}"
    built = " ".join(f"--{key} {value}" for key, value in changes.items())
    return f"{told}; the archive must be built with {built}, which --apply does" if built else told


def _baselines(outcome: Outcome, objective: Objective) -> Table:
    rows: list[list[str]] = []
    winner = outcome.winner
    if winner is not None:
        rows.append(["tuned", str(winner.setting), *_figures(winner), "", ""])
    for each in outcome.baselines:
        found = each.verified
        goal, ratio = GOALS.get(each.name), ratio_to(outcome, each)
        rows.append(
            [
                each.name,
                str(each.setting),
                *((each.missed, "–") if found is None else _figures(found, at_least=each.at_least)),
                "–" if ratio is None else f"{ratio:.2f} ×",
                f"{goal:g} ×" if goal is not None else "",
            ]
        )
    heading = ("", "setting", f"requests/s within {objective}", "p95 ms", "tuned ÷ this", "goal, on MiniLM")
    kept = 4 if outcome.given else len(heading)  # of settings at one load there is no ratio of rates
    return Table(heading[:kept], [row[:kept] for row in rows])


def _figures(verified: Verified, *, at_least: bool = False) -> tuple[str, str]:
    rate = "the trace" if verified.rate is None else f"{verified.rate:g}"
    return f"at least {rate}" if at_least else rate, _number(verified.point.p95_ms)


def ratio_to(outcome: Outcome, baseline: Baseline) -> float | None:
    """The winner's rate ÷ a baseline's.

    None where one has none, where the load was given, and where the baseline's highest rate may be a higher one.
    """
    winner, found = outcome.winner, baseline.verified
    if outcome.given or baseline.at_least or winner is None or found is None or not winner.rate or not found.rate:
        return None
    return winner.rate / found.rate


def _cells(point: Point) -> list[str]:
    if point.failure:
        told = "not served"
    elif point.stopped:
        told = "MISSED, stopped"
    else:
        told = "met" if point.met else "MISSED"
    return [
        str(point.setting),
        "one client" if point.kind == Kind.QUIET else point.kind.value,
        "trace" if point.rate is None and point.kind != Kind.QUIET else _number(point.rate),
        f"{point.seconds:.0f}",
        str(point.requests),
        f"{point.per_s:.1f}",
        *(_number(value) for value in (point.p50_ms, point.p95_ms, point.p99_ms)),
        "–" if point.margin is None or point.margin < -9 else f"{point.margin:.0%}",
        str(point.errors),
        str(point.shed),
        _number(point.batch_size),
        "–" if point.padding is None else f"{point.padding:.1%}",
        told,
    ]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def show(report: TuneReport, console: Console) -> None:
    """Print it."""
    console.print(machine_line(report.machine), markup=False)
    console.print(", ".join(f"{name} {value}" for name, value in report.settings.items()), markup=False)
    for section in sections(report):
        console.print(f"\n{section.title}", style="bold", markup=False)
        for sentence in section.sentences:
            console.print(sentence, markup=False)
        if section.table is not None:
            console.print(_rich(section.table))


def _rich(table: Table) -> RichTable:
    made = RichTable()
    for number, name in enumerate(table.heading):
        made.add_column(name, justify="left" if number == 0 else "right")
    for row in table.rows:
        made.add_row(*row, style="red" if any(cell.startswith("MISSED") for cell in row) else None)
    return made


def markdown(report: TuneReport) -> str:
    """It as Markdown."""
    settings = {"machine": machine_line(report.machine), **report.settings}
    parts = [f"# Tuning of {_escaped(report.name)}", ""]
    parts += [f"- {name}: {_escaped(str(value))}" for name, value in settings.items()]
    for section in sections(report):
        parts += ["", f"## {section.title}", ""]
        parts += [f"- {_escaped(sentence)}" for sentence in section.sentences]
        if section.table is not None:
            parts += ["", *_markdown_table(section.table)]
    return "\n".join(parts) + "\n"


def _markdown_table(table: Table) -> list[str]:
    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(_escaped(cell) for cell in cells) + " |"

    return [row(table.heading), row(["---"] * len(table.heading)), *map(row, table.rows)]


def _escaped(text: str) -> str:
    return text.replace("|", r"\|").replace("<", "&lt;")


def page(report: TuneReport) -> str:
    """It as a page, with the Pareto plot."""
    settings = {"machine": machine_line(report.machine), **report.settings}
    parts = [f"<h1>Tuning of {load_html.text(report.name)}</h1>", load_html.described(settings)]
    for section in sections(report):
        parts += [f"<h2>{load_html.text(section.title)}</h2>", load_html.listed(section.sentences)]
        if section.table is not None:
            rows = [("missed" if "MISSED" in row[-1] else "", row) for row in section.table.rows]
            parts.append(load_html.table(section.table.heading, rows))
        if section.title == "Result" and any(_plotted(point) for point in report.points):
            parts += ["<h2>Latency against rate, and the Pareto front</h2>", pareto_plot(report)]
    return load_html.document(f"Tuning of {report.name}", parts)


def pareto_plot(report: TuneReport) -> str:
    """Every window under load: its rate, and the objective's first figure; and those that no other one beats."""
    points = [point for point in report.points if _plotted(point)]
    figure, bound = _judged(report.objective), report.objective.conditions[0].bound_ms
    series = [
        Series("Pareto front", [(_rate(point), point.judged_ms) for point in pareto(points)]),
        Series(str(report.objective.conditions[0]), [(0.0, bound), (max(map(_rate, points)), bound)]),
    ]
    for setting in dict.fromkeys(point.setting for point in points):
        own = sorted((_rate(point), point.judged_ms) for point in points if point.setting == setting)
        series.append(Series(str(setting), own))
    return lines(
        "Latency against rate", series, Axis("requests due per second", low=0), Axis(f"{figure}, ms", log=True)
    )


def pareto(points: Sequence[Point]) -> list[Point]:
    """The windows measured to their end that no other one beats in rate and latency at once, by rate."""
    found: list[Point] = []
    whole = [point for point in points if _plotted(point) and not point.stopped]
    for point in sorted(whole, key=lambda point: (-_rate(point), point.judged_ms or 0.0)):
        if not found or (point.judged_ms or 0.0) < (found[-1].judged_ms or 0.0):
            found.append(point)
    return found[::-1]


def _plotted(point: Point) -> bool:
    return point.kind != Kind.QUIET and point.judged_ms is not None


def _rate(point: Point) -> float:
    return point.per_s if point.rate is None else point.rate


def to_json(report: TuneReport) -> bytes:
    """It as strict JSON."""
    outcome = report.outcome
    return strict_json(
        {
            "name": report.name,
            "machine": dataclasses.asdict(report.machine),
            "settings": report.settings,
            "objective": str(report.objective),
            "outcome": None if outcome is None else outcome.model_dump(mode="json"),
            "ratios": {} if outcome is None else {each.name: ratio_to(outcome, each) for each in outcome.baselines},
            "points": [point.model_dump(mode="json") for point in report.points],
            "advice": list(report.advice),
            "notes": list(report.notes),
            "interrupted": outcome is None,
        }
    )
