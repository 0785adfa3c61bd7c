"""What was measured of each server, as a Markdown table of ratios and as JSON."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.lib.drive import Window
from scripts.lib.load_report import machine_line
from scripts.lib.machine import Machine
from scripts.lib.stats import Spread
from scripts.lib.strict_json import strict_json

OURS = "batchserve"
MB = 1e6


@dataclass(frozen=True)
class Entrant:
    """A server that was to be measured.

    Attributes:
        settings: how it was set up, in words.
        versions: of the packages that explain its figures.
    """

    settings: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Turn:
    """What one server did in one round, from its start to its stop.

    Attributes:
        server: its name.
        round: from 0.
        agreement: the least cosine of its answers and the library's.
        peak_memory: bytes of all its processes.
        windows: workload → what was measured under each load.
        notes: what a reader must know to judge the windows.
    """

    server: str
    round: int
    agreement: float
    peak_memory: int
    windows: Mapping[str, tuple[Window, ...]]
    notes: tuple[str, ...] = ()


@dataclass
class Result:
    """All that was measured.

    Attributes:
        machine: where.
        command: that was run.
        seconds: of each window.
        rounds: that were asked for.
        entrants: by name, in the order of the table.
        turns: in the order of time.
        failures: server → why it could not be measured, or not to the end.
        interrupted: whether it ended before all had their turns.
    """

    machine: Machine
    command: str
    seconds: float
    rounds: int
    entrants: dict[str, Entrant]
    turns: list[Turn] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False


@dataclass(frozen=True)
class Figure:
    """What a window is judged by: many clients by their rate, one client and an open loop by latency."""

    name: str
    value: Callable[[Window], float | None]
    more_is_better: bool

    @classmethod
    def of(cls, window: Window) -> "Figure":
        """The figure of a load."""
        if window.open_loop:
            return cls("p95 ms", lambda one: one.summary.p95_ms, more_is_better=False)
        if window.clients == 1:
            return cls("p50 ms", lambda one: one.summary.p50_ms, more_is_better=False)
        return cls("texts/s", lambda one: one.summary.texts_per_s, more_is_better=True)

    def advantage(self, ours: Window, theirs: Window) -> float | None:
        """How many times as good ours is; None where one has no figure."""
        a, b = self.value(ours), self.value(theirs)
        if not self.more_is_better:
            a, b = b, a
        return a / b if a is not None and b else None


def markdown(result: Result) -> str:
    """The tables, a workload each, what they were measured with, and each server's settings."""
    lines = [
        f"Measured on {result.machine.date[:10]}: {machine_line(result.machine)}; {result.rounds} rounds, windows of "
        f"{result.seconds:g} s. Command: `{result.command}`",
        "",
        f"In brackets: how many times as good {OURS} is (its texts/s ÷ the server's, or the server's latency ÷ its), "
        "the median of the rounds and, of several, its extremes. Latency in an open loop counts from when a request "
        "was due.",
    ]
    for workload in dict.fromkeys(name for turn in result.turns for name in turn.windows):
        lines += ["", *_table(result, workload)]
    lines += ["", *(_about(result, name) for name in result.entrants)]
    notes = [*result.machine.notes(["float32"]), *(["interrupted before all had their turns"] * result.interrupted)]
    lines += [f"- {note}" for note in notes]
    return "\n".join(lines) + "\n"


def _table(result: Result, workload: str) -> Iterable[str]:
    turns = {
        name: {turn.round: turn.windows[workload] for turn in result.turns if turn.server == name}
        for name in result.entrants
    }
    shown = next(windows for rounds in turns.values() for windows in rounds.values())
    yield _row(workload, (f"{one.label}, {Figure.of(one).name}" for one in shown))
    yield "| --- |" + " ---: |" * len(shown)
    for name, rounds in turns.items():
        cells = [_cell(rounds, turns.get(OURS, {}), name, at) for at in range(len(shown))]
        yield _row(name, cells if rounds else ["not measured"] * len(shown))


def _row(name: str, cells: Iterable[str]) -> str:
    return f"| {' | '.join([name, *cells])} |"


def _cell(theirs: Mapping[int, Sequence[Window]], ours: Mapping[int, Sequence[Window]], name: str, at: int) -> str:
    windows = {number: each[at] for number, each in theirs.items()}
    if not windows:
        return ""
    figure = Figure.of(next(iter(windows.values())))
    values = [value for one in windows.values() if (value := figure.value(one)) is not None]
    text = f"{Spread.of(values).median:.1f}" if values else "–"
    if name != OURS:
        found = [figure.advantage(ours[number][at], one) for number, one in windows.items() if number in ours]
        ratios = [ratio for ratio in found if ratio is not None]
        if ratios:
            spread = Spread.of(ratios)
            extremes = f", {spread.low:.2f}–{spread.high:.2f}" if len(ratios) > 1 else ""
            text += f" ({spread.median:.2f} ×{extremes})"
    # A rate and a latency are of answered requests alone: those that were not must be seen beside them.
    for what in ("errors", "shed", "unanswered"):
        count = sum(getattr(one if what == "unanswered" else one.summary, what) for one in windows.values())
        text += f", {count} {what}" if count else ""
    return text


def _about(result: Result, name: str) -> str:
    entrant = result.entrants[name]
    turns = [turn for turn in result.turns if turn.server == name]
    parts = [entrant.settings, ", ".join(f"{package} {number}" for package, number in entrant.versions.items())]
    if turns:
        peak, least = max(turn.peak_memory for turn in turns), min(turn.agreement for turn in turns)
        parts.append(f"{peak / MB:.0f} MB; cosine with sentence-transformers ≥ {least:.5f}")
    if name in result.failures:
        parts.append(f"{'stopped early' if turns else 'not measured'}: {result.failures[name]}")
    parts += dict.fromkeys(note for turn in turns for note in turn.notes)
    return f"- **{name}**: " + "; ".join(part for part in parts if part)


def to_json(result: Result) -> bytes:
    """Everything, as strict JSON."""
    document: dict[str, Any] = dataclasses.asdict(result)
    return strict_json(document)
