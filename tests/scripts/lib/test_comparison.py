"""Ratios of two result files: of both kinds, of what both have, and nothing made up."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scripts.lib.comparison import compare, show
from scripts.lib.errors import UserError


def window(label: str, rate: float, **figures: Any) -> dict[str, Any]:
    return {"label": label, "summary": {"requests_per_s": rate, "p95_ms": 100.0, "errors": 0}, **figures}


def point(clients: int, rate: float) -> dict[str, Any]:
    return {
        "workload": "short",
        "clients": clients,
        "dtype": "float32",
        "batch_size": 32,
        "requests_per_s": {"median": rate, "low": 1, "high": 9},
        "p95_ms": None,
        "padding_share": 0.25,
    }


def files(tmp_path: Path, a: Any, b: Any) -> tuple[Path, Path]:
    paths = tmp_path / "a.json", tmp_path / "b.json"
    for path, content in zip(paths, (a, b), strict=True):
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return paths


def test_windows_of_the_same_load(tmp_path: Path) -> None:
    found = compare(
        *files(
            tmp_path,
            {"settings": {"server": "x"}, "windows": [window("1 client", 10), window("50/s", 20), window("old", 1)]},
            {
                "settings": {"server": "y"},
                "windows": [window("50/s", 50, batching={"padding_share": 0.5}), window("new", 1)],
            },
        )
    )
    ratios = {(one.label, one.figure): (one.a, one.b, one.ratio) for one in found.ratios}
    assert ratios == {
        ("50/s", "requests/s"): (20, 50, 2.5),
        ("50/s", "p95 ms"): (100, 100, 1),
        ("50/s", "errors"): (0, 0, None),
        ("50/s", "padding"): (None, 0.5, None),
    }
    assert found.notes == ("only in A: 1 client", "only in A: old", "only in B: new", "server: x in A, y in B")


def test_points_of_the_same_load(tmp_path: Path) -> None:
    found = compare(*files(tmp_path, {"points": [point(1, 10), point(8, 40)]}, {"points": [point(8, 30)]}))
    ratios = {one.figure: one.ratio for one in found.ratios}
    assert ratios == {"requests/s": 0.75, "padding": 1}
    assert {one.label for one in found.ratios} == {"short, 8 clients, float32, batch 32"}


@pytest.mark.parametrize(
    ("b", "message"),
    [
        ("{", "no result of bench"),
        ("[]", "no result of bench"),
        ({}, "no result of bench"),
        ({"windows": 3}, "no result of bench"),
        ({"points": [point(1, 1)]}, "two kinds"),
        ({"windows": []}, "no load in common"),
        ({"windows": [window("2 clients", 1)]}, "no load in common"),
    ],
)
def test_what_can_not_be_compared(tmp_path: Path, b: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        compare(*files(tmp_path, {"windows": [window("1 client", 10)]}, b))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="can't be read"):
        compare(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("value", [True, "9", None, [1], {"median": 1}])
def test_what_is_no_number_is_no_figure(tmp_path: Path, value: Any) -> None:
    broken = {"label": "l", "summary": {"requests_per_s": value, "p50_ms": 1}}
    found = compare(*files(tmp_path, {"windows": [broken]}, {"windows": [broken]}))
    assert [one.figure for one in found.ratios] == ["p50 ms"]


def test_the_table(tmp_path: Path) -> None:
    out = io.StringIO()
    found = compare(
        *files(tmp_path, {"windows": [window("l", 20)]}, {"windows": [window("l", 50)], "settings": {"s": 1}})
    )
    show(found, Console(file=out, width=120))
    text = out.getvalue()
    assert "2.50" in text
    assert "note: s: nothing in A, 1 in B" in text
