"""The report of a load: strict JSON, a table of what there is, and a page that holds every figure and no markup."""

import io
import math
from html.parser import HTMLParser
from typing import Any

import orjson
import pytest
from rich.console import Console

from scripts.lib.drive import Drive, Driven, Window
from scripts.lib.load import LoadResult, Sample, Target
from scripts.lib.load_html import page
from scripts.lib.load_plan import Closed, Load, Open, Stretch
from scripts.lib.load_report import LoadReport, show, to_json
from scripts.lib.machine import Machine
from scripts.lib.objective import Objective
from scripts.lib.schedule import Phase, Schedule
from scripts.lib.scrape import BatchingWindow

MACHINE = Machine("Model <T>", 2, ("avx2",), 24.0, 0.1, {"python": "3.11"}, "2026-11-29T12:00:00+00:00")


def windows(
    load: Load, latencies: list[float], batching: bool = True, statuses: dict[int, int] | None = None
) -> list[Window]:
    """What a load with these latencies in seconds, a request every half second, is reported as."""
    samples = tuple(
        Sample(0.5 * number, latency, (statuses or {}).get(number, 200), 1, 2, 5)
        for number, latency in enumerate(latencies)
    )
    counted = BatchingWindow(len(samples), 9, 95, 5, 0, 4, 4, {1.0: 1, 8.0: 2, math.inf: 1}, {}, 0.0, 0.0, 0.0)
    drive = Drive(Target("http://x"), [], [load], objective=Objective.parse("p95<=200ms"))
    return list(drive._judged(load, LoadResult(samples, 3, 2.5, 0.2, 0.1), counted if batching else None, False))


def report(*measured: Window, **settings: Any) -> LoadReport:
    return LoadReport(
        MACHINE, {"server": "http://h/predictions/m", **settings}, Driven(measured, ("a <b>note</b>",), False)
    )


SLOW = windows(Closed(3, 2.5), [0.1, 0.2, 0.15, 0.1])
FAST = windows(Open("<i>20/s</i>", 2.5), [0.3, 0.1, 0.4, 0.1], statuses={1: 503, 3: 500})
STEPS = windows(
    Open(
        "steps", 2.0, Schedule((Phase(1, 2, 2), Phase(1, 2, 2))), stretches=(Stretch("up", 0, 1), Stretch("down", 1, 2))
    ),
    [0.1, 0.1, 0.3, 0.3],
    batching=False,
)


class Page(HTMLParser):
    """Reads a page as a browser would, and minds that all that opens closes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.plots: list[str] = []
        self.tags: set[str] = set()
        self.outside: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.titles: dict[str, list[str]] = {}
        self.lines: dict[str, int] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.add(tag)
        self.outside += [name for name in given if name in ("src", "href") or name.startswith("on")]
        if tag == "svg":
            self.plots.append(given["aria-label"] or "")
        if tag == "polyline":
            self.lines[self.plots[-1]] = self.lines.get(self.plots[-1], 0) + 1
        if tag != "meta":  # which has no end
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        self.texts.setdefault(inside, []).append(data)
        if inside == "title" and "svg" in self.open:
            self.titles.setdefault(self.plots[-1], []).append(data)


def test_the_page_has_every_plot_with_its_data() -> None:
    found = Page(page(report(*SLOW, *FAST)))
    assert found.plots == [
        "Latency distribution",
        "Latency against rate",
        "Batch sizes, 3 clients",
        "Batch sizes, <i>20/s</i>",
        "Requests by second, 3 clients",
        "p95 by second, 3 clients",
        "Requests by second, <i>20/s</i>",
        "p95 by second, <i>20/s</i>",
    ]
    assert found.lines["Latency distribution"] == 2
    assert "3 clients: 200 → 100" in found.titles["Latency distribution"]  # the slowest of all
    assert "3 clients: 100 → 50" in found.titles["Latency distribution"]
    assert found.titles["Latency against rate"] == [
        f"{name}: {rate} → {value}"
        for name, values in (("p50", (100, 300)), ("p95", (200, 400)), ("p99", (200, 400)))
        for rate, value in zip(("1.6", "1.6"), values, strict=True)
    ]
    assert found.titles["Batch sizes, 3 clients"] == ["≤ 1: 1", "≤ 8: 2", "more: 1"]
    assert found.titles["Requests by second, 3 clients"] == [
        *("due: 0 → 2", "due: 1 → 2"),
        *("answered: 0 → 2", "answered: 1 → 2"),
    ]
    assert "shed: 0 → 1" in found.titles["Requests by second, <i>20/s</i>"]
    assert "errors: 1 → 1" in found.titles["Requests by second, <i>20/s</i>"]
    assert found.titles["p95 by second, <i>20/s</i>"] == ["p95: 0 → 300", "p95: 1 → 400"]


def test_the_page_needs_nothing_and_runs_nothing() -> None:
    text = page(report(*SLOW, *FAST, load="</style><script>alert(1)</script>"))
    found = Page(text)
    assert not found.outside
    assert not found.tags & {"script", "link", "img", "iframe", "i", "b"}
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    assert "</style><script>alert(1)</script>" in found.texts["dd"]
    assert "a <b>note</b>" in found.texts["li"]
    assert any("Model <T>" in told for told in found.texts["dd"])


def test_the_pages_table_has_the_figures() -> None:
    cells = Page(page(report(*SLOW, *FAST))).texts["td"]
    for expected in ("3 clients", "<i>20/s</i>", "met", "MISSED", "100.0%", "0.0%", "1.0", "5.00%"):
        assert expected in cells


def test_steps_are_plotted_by_their_parts() -> None:
    found = Page(page(report(*STEPS)))
    assert [title for title in found.titles["Latency against rate"] if title.startswith("p50")] == [
        "p50: 2 → 100",
        "p50: 2 → 300",
    ]
    assert found.lines["Latency distribution"] == 3
    assert [plot for plot in found.plots if plot.startswith("Requests by second")] == ["Requests by second, steps"]
    assert not any(plot.startswith("Batch sizes") for plot in found.plots)


def test_a_page_of_nothing() -> None:
    assert Page(page(report())).plots == []
    failed = windows(Closed(1, 1.0), [0.1], batching=False, statuses={0: 500})
    assert "Latency distribution" not in Page(page(report(*failed))).plots


def test_json_is_strict_and_complete() -> None:
    data = to_json(report(*SLOW))
    document = orjson.loads(data)
    (window,) = document["windows"]
    assert window["label"] == "3 clients"
    assert window["summary"]["p95_ms"] == pytest.approx(200)
    assert window["goodput"] == {"requests": 4, "share": 1.0, "per_s": pytest.approx(1.6), "met": True}
    assert window["batching"]["batch_sizes"] == {"1": 1, "8": 2, "+Inf": 1}
    assert window["batching"]["effective_batch_size"] == 1
    assert window["batching"]["padding_share"] == 0.05
    assert [second["due"] for second in window["timeline"]] == [2, 2]
    assert window["distribution"][-1] == [pytest.approx(200), 1]
    assert (document["notes"], document["interrupted"]) == (["a <b>note</b>"], False)


def test_the_table_says_what_there_is() -> None:
    out = io.StringIO()
    show(report(*SLOW, *FAST, *STEPS), Console(file=out, width=250))
    text = out.getvalue()
    for expected in (
        "Model <T>",
        "http://h/predictions/m",
        "3 clients",
        "  up",
        "MISSED",
        "eff. batch",
        "5.00%",
        "a <b>note",
    ):
        assert expected in text
    assert "1st token" not in text  # nothing was streamed
    out = io.StringIO()
    show(report(), Console(file=out, width=250))
    assert "note: a <b>note</b>" in out.getvalue()
