"""The report of a load: machine, settings, windows and notes, as JSON and as a table."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.lib.drive import Driven, Window
from scripts.lib.machine import Machine
from scripts.lib.strict_json import strict_json


@dataclass(frozen=True)
class LoadReport:
    """What was measured of a running server, where and how.

    Attributes:
        machine: that the load came from; the server may be another one.
        settings: of the load, in words.
        driven: windows and notes.
    """

    machine: Machine
    settings: dict[str, Any]
    driven: Driven


def to_json(report: LoadReport) -> bytes:
    """The report as strict JSON."""
    return strict_json(
        {
            "load_generator": dataclasses.asdict(report.machine),
            "settings": report.settings,
            "windows": [_window_json(window) for window in report.driven.windows],
            "notes": list(report.driven.notes),
            "interrupted": report.driven.interrupted,
        }
    )


def _window_json(window: Window) -> dict[str, Any]:
    found = dataclasses.asdict(window)
    if window.batching is not None:
        found["batching"] |= {
            "effective_batch_size": window.batching.effective_batch_size,
            "padding_share": window.batching.padding_share,
        }
    return found


def machine_line(machine: Machine) -> str:
    """The machine in a line: what explains a figure."""
    versions = ", ".join(f"{name} {number}" for name, number in machine.versions.items())
    return f"{machine.processor}, {machine.cores} cores, {machine.memory_gb:g} GB; {versions}; {machine.date}"


@dataclass(frozen=True)
class Column:
    """A figure of a window as a column: its heading, its value, how it is written."""

    heading: str
    value: Callable[[Window], float | None]
    form: str = ".1f"

    def text(self, window: Window) -> str:
        """The figure of a window; a dash where there is none."""
        value = self.value(window)
        return "–" if value is None else format(value, self.form)


def _of_goodput(share: bool) -> Callable[[Window], float | None]:
    def value(window: Window) -> float | None:
        if window.goodput is None:
            return None
        return window.goodput.share if share else window.goodput.per_s

    return value


def _of_batching(figure: str) -> Callable[[Window], float | None]:
    return lambda window: getattr(window.batching, figure, None)


COLUMNS = (
    Column("due/s", lambda window: window.due_per_s),
    Column("requests", lambda window: window.summary.requests, "d"),
    Column("requests/s", lambda window: window.summary.requests_per_s),
    Column("texts/s", lambda window: window.summary.texts_per_s),
    Column("p50 ms", lambda window: window.summary.p50_ms),
    Column("p90 ms", lambda window: window.summary.p90_ms),
    Column("p95 ms", lambda window: window.summary.p95_ms),
    Column("p99 ms", lambda window: window.summary.p99_ms),
    Column("max ms", lambda window: window.summary.max_ms),
    Column("1st token p50 ms", lambda window: window.summary.first_token_p50_ms),
    Column("p95", lambda window: window.summary.first_token_p95_ms),
    Column("tokens written/s", lambda window: window.summary.generated_per_s),
    Column("good/s", _of_goodput(share=False)),
    Column("good", _of_goodput(share=True), ".1%"),
    Column("errors", lambda window: window.summary.errors, "d"),
    Column("shed", lambda window: window.summary.shed, "d"),
    Column("eff. batch", _of_batching("effective_batch_size")),
    Column("padding", _of_batching("padding_share"), ".2%"),
    Column("generator CPU", lambda window: None if window.part else window.generator.cpu_share, ".0%"),
)


def columns(windows: Sequence[Window]) -> list[Column]:
    """The columns in which at least one window has a figure."""
    return [column for column in COLUMNS if any(column.value(window) is not None for window in windows)]


def verdict(window: Window) -> str:
    """Whether a window met the objective, in a word; empty where there is none."""
    return "" if window.goodput is None else "met" if window.goodput.met else "MISSED"


def show(report: LoadReport, console: Console) -> None:
    """Print the load generator's machine, the settings, a row for each window, and the notes."""
    console.print(f"load generator: {machine_line(report.machine)}", markup=False)
    console.print(", ".join(f"{name} {value}" for name, value in report.settings.items()), markup=False)
    windows = report.driven.windows
    if windows:
        console.print(_table(windows))
    for note in report.driven.notes:
        console.print(f"note: {note}", markup=False)


def _table(windows: Sequence[Window]) -> Table:
    table = Table(title="latency counts from when a request was due, in an open loop", title_justify="left")
    if not any(window.open_loop for window in windows):
        table.title = None
    table.add_column("load")
    shown, judged = columns(windows), any(window.goodput for window in windows)
    for column in shown:
        table.add_column(column.heading, justify="right")
    if judged:
        table.add_column("objective")
    for window in windows:
        row = [f"  {window.label}" if window.part else window.label, *(column.text(window) for column in shown)]
        missed = window.goodput is not None and not window.goodput.met
        table.add_row(*row, *([verdict(window)] if judged else []), style="red" if missed else None)
    return table
