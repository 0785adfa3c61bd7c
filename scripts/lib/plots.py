"""Plots as SVG: lines on linear or logarithmic axes, and bars. Plain markup that needs no script and no file beside it.

Colours are classes (`s0`, `s1`, … for series; `axis`, `grid`), so that the page decides them for light and dark. Every
marked point and every bar carries its value as a `title`, which a pointer shows and a screen reader reads.
"""

import html
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 12, 48
LEGEND_LINE = 18
COLOURS = 7  # series beyond that start again
TICKS = 6
MARKED = 60  # points of a line beyond which they are not marked singly


@dataclass(frozen=True)
class Series:
    """A line: its name and its points; None breaks it."""

    name: str
    points: Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Axis:
    """What an axis measures, and how.

    Attributes:
        label: with its unit.
        log: logarithmic; values must then be above 0.
        low, high: ends that it has at least; None: as the values are.
    """

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None


class _Scale:
    """Values of an axis → positions from 0 to 1."""

    def __init__(self, axis: Axis, values: Iterable[float]) -> None:
        self._log = axis.log
        found = [*values, *(end for end in (axis.low, axis.high) if end is not None)] or [0.0, 1.0]
        if axis.log:
            found = [value for value in found if value > 0] or [1.0, 10.0]
            self.ticks = _log_ticks(min(found), max(found))
        else:
            self.ticks = _linear_ticks(min(found), max(found))
        self.low, self.high = min(self.ticks[0], *found), max(self.ticks[-1], *found)

    def at(self, value: float) -> float:
        """Where a value lies."""
        if self._log:
            least = max(value, self.low)
            return math.log(least / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def _linear_ticks(low: float, high: float) -> list[float]:
    """Round numbers of which the first is not above `low` and the last not below `high`."""
    span = high - low or abs(high) or 1.0
    rough = span / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, or the powers alone where those are many, around the values."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    ticks = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    below = [tick for tick in ticks if tick <= low] or ticks[:1]
    above = [tick for tick in ticks if tick >= high and tick > below[-1]] or [below[-1] * 10]
    return [tick for tick in ticks if below[-1] <= tick < above[0]] + above[:1]


def number(value: float) -> str:
    """A number for a label: short, never in powers of ten."""
    if value and abs(value) < 0.01:
        return f"{value:.2g}"
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def lines(title: str, series: Sequence[Series], x: Axis, y: Axis) -> str:
    """A plot of lines, with a legend where there are several. A series without a value is in the legend alone."""
    told = [(at, value) for one in series for at, value in one.points if value is not None]
    across, up = _Scale(x, (at for at, _ in told)), _Scale(y, (value for _, value in told))
    drawn = []
    for position, one in enumerate(series):
        colour = f"s{position % COLOURS}"
        for known, run in itertools.groupby(one.points, key=lambda point: point[1] is not None):
            if known:
                placed = [(_right(across.at(at)), _down(up.at(value or 0.0))) for at, value in run]
                path = " ".join(f"{left:.1f},{top:.1f}" for left, top in placed)
                drawn.append(f'<polyline class="line {colour}" points="{path}"/>')
        marked = [(at, value) for at, value in one.points if value is not None]
        for at, value in marked if len(marked) <= MARKED else ():
            said = f"{one.name}: {number(at)} → {number(value)}"
            drawn.append(
                f'<circle class="dot {colour}" cx="{_right(across.at(at)):.1f}" cy="{_down(up.at(value)):.1f}" r="3">'
                f"<title>{html.escape(said)}</title></circle>"
            )
    ticks = [(across.at(tick), number(tick)) for tick in across.ticks]
    legend = [one.name for one in series] if len(series) > 1 else []
    return _framed(title, _axes(ticks, up, x.label, y.label) + "".join(drawn), legend)


def bars(title: str, heights: Sequence[tuple[str, float]], x_label: str, y_label: str) -> str:
    """A plot of bars side by side, each named below."""
    up = _Scale(Axis(y_label, low=0.0), [height for _, height in heights])
    room = 1 / max(len(heights), 1)
    drawn, ticks = [], []
    for position, (name, height) in enumerate(heights):
        left, top = _right((position + 0.15) * room), _down(up.at(height))
        drawn.append(
            f'<rect class="bar s0" x="{left:.1f}" y="{top:.1f}" width="{0.7 * room * (WIDTH - LEFT - RIGHT):.1f}" '
            f'height="{_down(0.0) - top:.1f}"><title>{html.escape(f"{name}: {number(height)}")}</title></rect>'
        )
        ticks.append(((position + 0.5) * room, name))
    return _framed(title, _axes(ticks, up, x_label, y_label) + "".join(drawn), [])


def _right(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _down(share: float) -> float:
    return TOP + (1 - share) * (HEIGHT - TOP - BOTTOM)


def _axes(ticks: Sequence[tuple[float, str]], up: _Scale, x_label: str, y_label: str) -> str:
    floor, parts = _down(0.0), []
    for tick in up.ticks:
        top = _down(up.at(tick))
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{top:.1f}" x2="{WIDTH - RIGHT}" y2="{top:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{top + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    for share, name in ticks:
        parts.append(
            f'<text class="tick" x="{_right(share):.1f}" y="{floor + 16:.1f}" text-anchor="middle">'
            f"{html.escape(name)}</text>"
        )
    middle, centre = _right(0.5), _down(0.5)
    parts.append(f'<line class="axis" x1="{LEFT}" y1="{floor:.1f}" x2="{WIDTH - RIGHT}" y2="{floor:.1f}"/>')
    parts.append(
        f'<text class="label" x="{middle:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{html.escape(x_label)}</text>'
    )
    parts.append(
        f'<text class="label" x="14" y="{centre:.1f}" text-anchor="middle" '
        f'transform="rotate(-90 14 {centre:.1f})">{html.escape(y_label)}</text>'
    )
    return "".join(parts)


def _framed(title: str, drawn: str, legend: Sequence[str]) -> str:
    height = HEIGHT + LEGEND_LINE * len(legend)
    entries = "".join(
        f'<line class="line s{position % COLOURS}" x1="{LEFT}" x2="{LEFT + 24}" y1="{top}" y2="{top}"/>'
        f'<text class="tick" x="{LEFT + 32}" y="{top + 4}">{html.escape(name)}</text>'
        for position, name in enumerate(legend)
        for top in (HEIGHT + LEGEND_LINE * position + 4,)
    )
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{html.escape(title)}">{drawn}{entries}</svg>'
