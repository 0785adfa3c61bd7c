"""Plots: values lie where they belong, every one can be read, and what is written in them is escaped."""

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.lib.plots import Axis, Series, _linear_ticks, _log_ticks, _Scale, bars, lines, number

finite = st.floats(-1e6, 1e6, allow_nan=False).map(lambda value: round(value, 3))
positive = st.floats(1e-3, 1e6)


def points(svg: str) -> list[list[tuple[float, float]]]:
    """The polylines of a plot, in its own coordinates."""
    found = re.findall(r'<polyline class="[^"]*" points="([^"]*)"', svg)
    pairs = [[pair.split(",") for pair in run.split()] for run in found]
    return [[(float(left), float(top)) for left, top in run] for run in pairs]


@given(st.lists(finite, min_size=1, max_size=20))
def test_linear_ticks_are_round_and_hold_the_values(values: list[float]) -> None:
    ticks = _linear_ticks(min(values), max(values))
    slack = 1e-6 * max(1.0, abs(ticks[-1]), abs(ticks[0]))
    assert ticks[0] <= min(values) + slack
    assert ticks[-1] >= max(values) - slack
    assert 2 <= len(ticks) <= 9


@given(st.lists(positive, min_size=1, max_size=20))
def test_logarithmic_ticks_hold_the_values(values: list[float]) -> None:
    ticks = _log_ticks(min(values), max(values))
    assert ticks[0] <= min(values) * (1 + 1e-9)
    assert ticks[-1] >= max(values) * (1 - 1e-9)
    assert ticks == sorted(set(ticks))
    assert 2 <= len(ticks) <= 14


@given(st.lists(positive, min_size=1, max_size=20), st.booleans())
def test_a_scale_keeps_order_and_stays_inside(values: list[float], log: bool) -> None:
    scale = _Scale(Axis("x", log=log), values)
    placed = [scale.at(value) for value in sorted(values)]
    assert placed == sorted(placed)
    assert all(-1e-9 <= share <= 1 + 1e-9 for share in placed)


def test_logarithmic_places() -> None:
    scale = _Scale(Axis("x", log=True), [1, 1000])
    assert [scale.at(value) for value in (1, 10, 100, 1000)] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert scale.at(0) == 0  # what has no logarithm lies at the end


def test_points_lie_by_their_values() -> None:
    ((first, second, third),) = points(lines("t", [Series("a", [(0, 0), (5, 50), (10, 100)])], Axis("x"), Axis("y")))
    assert first[0] < second[0] < third[0]
    assert first[1] > second[1] > third[1]  # down is more in SVG
    assert second == pytest.approx(((first[0] + third[0]) / 2, (first[1] + third[1]) / 2), abs=0.1)


def test_a_missing_value_breaks_the_line() -> None:
    svg = lines("t", [Series("a", [(0, 1), (1, 2), (2, None), (3, 4), (4, 5)])], Axis("x"), Axis("y"))
    assert [len(run) for run in points(svg)] == [2, 2]
    assert svg.count("<circle") == 4


def test_every_point_and_bar_can_be_read() -> None:
    svg = lines("t", [Series("p95", [(20, 12.5)]), Series("p99", [(20, 1234.5)])], Axis("x"), Axis("y"))
    assert [title.text for title in ElementTree.fromstring(svg).iter("title")] == ["p95: 20 → 12.5", "p99: 20 → 1,234"]
    svg = bars("t", [("≤ 1", 3), ("≤ 2", 0), ("more", 12)], "size", "batches")
    root = ElementTree.fromstring(svg)
    assert [title.text for title in root.iter("title")] == ["≤ 1: 3", "≤ 2: 0", "more: 12"]
    one, none, most = (float(rect.attrib["height"]) for rect in root.iter("rect"))
    assert none == 0
    assert most / one == pytest.approx(4, rel=0.01)


def test_texts_are_escaped() -> None:
    nasty = "<script>\"&'"
    for svg in (
        lines(nasty, [Series(nasty, [(1, 1)]), Series("b", [])], Axis(nasty), Axis(nasty)),
        bars(nasty, [(nasty, 1)], nasty, nasty),
    ):
        root = ElementTree.fromstring(svg)  # fails on markup that is broken
        assert root.attrib["aria-label"] == nasty
        assert "<script" not in svg


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("series", [[], [Series("a", [])], [Series("a", [(1, None)])], [Series("a", [(0, 0)])]])
def test_plots_of_next_to_nothing(series: list[Series], log: bool) -> None:
    ElementTree.fromstring(lines("t", series, Axis("x", log=log), Axis("y", log=log)))
    ElementTree.fromstring(bars("t", [], "x", "y"))


@given(st.floats(-1e9, 1e9, allow_nan=False))
def test_numbers_are_short_and_true(value: float) -> None:
    written = number(value)
    assert len(written) <= 16
    assert math.isclose(float(written.replace(",", "")), value, rel_tol=0.06, abs_tol=1e-300)
