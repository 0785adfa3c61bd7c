"""The report of a load as one HTML page: no script, no file beside it, in light and dark, every text escaped."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence

from scripts.lib.drive import Window
from scripts.lib.load_report import LoadReport, columns, machine_line, verdict
from scripts.lib.plots import Axis, Series, bars, lines

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --paper: #fff; --faint: #ddd; --soft: #666;
  --s0: #0072b2; --s1: #d55e00; --s2: #009e73; --s3: #cc79a7; --s4: #b08900; --s5: #3a9bd0; --s6: #555; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #161616; --faint: #3a3a3a; --soft: #a5a5a5;
  --s0: #56b4e9; --s1: #ff8c42; --s2: #2fd3a5; --s3: #e79fc6; --s4: #f0e442; --s5: #8fb8ff; --s6: #bbb; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 76rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
h3 { font-size: 1rem; font-weight: 600; margin: 1.2rem 0 .2rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid var(--faint); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } .part td:first-child { padding-left: 1.6rem; }
.missed { font-weight: 600; color: var(--s1); } dl { display: grid; grid-template-columns: max-content 1fr;
  gap: .1rem 1rem; } dt { color: var(--soft); } dd { margin: 0; }
svg { width: 100%; max-width: 56rem; height: auto; display: block; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); } svg .label { fill: var(--ink); }
.grid { stroke: var(--faint); } .axis { stroke: var(--soft); } .line { fill: none; stroke-width: 2; }
""" + "".join(
    f".line.s{number} {{ stroke: var(--s{number}); }} .dot.s{number}, .bar.s{number} {{ fill: var(--s{number}); }}\n"
    for number in range(7)
)


def page(report: LoadReport) -> str:
    """The report as a page."""
    windows = report.driven.windows
    whole = [window for window in windows if not window.part]
    settings = {"load generator": machine_line(report.machine), **report.settings}
    parts = [
        "<h1>Load on a running server</h1>",
        described(settings),
        "<h2>Windows</h2>",
        _table(windows),
        listed(report.driven.notes),
    ]
    if any(window.distribution for window in windows):
        parts += ["<h2>Latency distribution</h2>", latency_distribution(windows)]
    rated = [window for window in windows if window.summary.p50_ms is not None and not _has_parts(window, windows)]
    if len(rated) > 1:
        parts += ["<h2>Latency against rate</h2>", latency_against_rate(rated)]
    histograms = [window for window in whole if window.batching is not None and window.batching.batch_sizes]
    if histograms:
        parts.append("<h2>Batch sizes</h2>")
        for window in histograms:
            parts += [f"<h3>{text(window.label)}</h3>", batch_sizes(window)]
    if any(window.timeline for window in whole):
        parts.append("<h2>Timeline</h2>")
        for window in whole:
            if window.timeline:
                parts += [f"<h3>{text(window.label)}</h3>", requests_by_second(window), p95_by_second(window)]
    return document("Load on a running server", parts)


def document(title: str, parts: Iterable[str]) -> str:
    """A whole page of a title and parts that are markup already."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def latency_distribution(windows: Sequence[Window]) -> str:
    """The share of the answered requests that were answered within a time, for every window."""
    series = [
        Series(window.label, [(latency, 100 * share) for latency, share in window.distribution]) for window in windows
    ]
    return lines(
        "Latency distribution",
        series,
        Axis("milliseconds, logarithmic", log=True),
        Axis("% of the answers within", low=0),
    )


def latency_against_rate(windows: Sequence[Window]) -> str:
    """Percentiles of latency over requests due per second, from the slowest window to the fastest."""
    ordered = sorted(windows, key=lambda window: window.due_per_s)
    series = [
        Series(f"p{q}", [(window.due_per_s, getattr(window.summary, f"p{q}_ms")) for window in ordered])
        for q in (50, 95, 99)
    ]
    return lines("Latency against rate", series, Axis("requests due per second", low=0), Axis("milliseconds", log=True))


def batch_sizes(window: Window) -> str:
    """How many batches had how many requests, in the server's own buckets."""
    sizes = window.batching.batch_sizes if window.batching is not None else {}
    named = [(f"≤ {bound:g}" if bound < math.inf else "more", float(count)) for bound, count in sorted(sizes.items())]
    return bars(f"Batch sizes, {window.label}", named, "requests in a batch", "batches")


def requests_by_second(window: Window) -> str:
    """What was due and what ended in each second."""
    series = [
        Series(name, [(second.at, getattr(second, name)) for second in window.timeline])
        for name in ("due", "answered", "errors", "shed")
    ]
    shown = [one for one in series if one.name in ("due", "answered") or any(value for _, value in one.points)]
    return lines(f"Requests by second, {window.label}", shown, Axis("seconds"), Axis("requests", low=0))


def p95_by_second(window: Window) -> str:
    """The p95 of what was answered in each second."""
    points = [(second.at, second.p95_ms) for second in window.timeline]
    return lines(f"p95 by second, {window.label}", [Series("p95", points)], Axis("seconds"), Axis("p95, ms", low=0))


def _has_parts(window: Window, windows: Sequence[Window]) -> bool:
    following = windows[windows.index(window) + 1 :]
    return not window.part and bool(following) and following[0].part


def _table(windows: Sequence[Window]) -> str:
    shown, judged = columns(windows), any(window.goodput for window in windows)
    heading = ["load", *(column.heading for column in shown), *(["objective"] if judged else [])]
    rows = []
    for window in windows:
        cells = [window.label, *(column.text(window) for column in shown), *([verdict(window)] if judged else [])]
        classes = f"{'part ' if window.part else ''}{'missed' if verdict(window) == 'MISSED' else ''}".strip()
        rows.append((classes, cells))
    return table(heading, rows)


def table(heading: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """A table of texts, each row with its classes."""
    head = "".join(f"<th>{text(cell)}</th>" for cell in heading)
    body = "".join(
        f'<tr class="{classes}">' + "".join(f"<td>{text(cell)}</td>" for cell in cells) + "</tr>"
        for classes, cells in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def described(settings: Mapping[str, object]) -> str:
    """Settings as a list of definitions."""
    return (
        "<dl>" + "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in settings.items()) + "</dl>"
    )


def listed(notes: Iterable[str]) -> str:
    """Texts as a list; nothing for none."""
    items = "".join(f"<li>{text(note)}</li>" for note in notes)
    return f"<ul>{items}</ul>" if items else ""


def text(value: object) -> str:
    """A value as text that is no markup."""
    return html.escape(str(value))
