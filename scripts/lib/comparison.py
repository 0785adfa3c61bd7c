"""Two result files of `batchserve bench` side by side: ratios of the windows or points that both have."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic
from rich.console import Console
from rich.table import Table

from scripts.lib.errors import UserError

# Figure → where it lies in a window of a load, and in a point of a comparison with the offline library.
FIGURES: dict[str, tuple[str, str]] = {
    "requests/s": ("summary.requests_per_s", "requests_per_s.median"),
    "texts/s": ("summary.texts_per_s", "texts_per_s.median"),
    "p50 ms": ("summary.p50_ms", "p50_ms"),
    "p95 ms": ("summary.p95_ms", "p95_ms"),
    "p99 ms": ("summary.p99_ms", "p99_ms"),
    "1st token p50 ms": ("summary.first_token_p50_ms", ""),
    "tokens written/s": ("summary.generated_per_s", ""),
    "good/s": ("goodput.per_s", ""),
    "errors": ("summary.errors", "errors"),
    "shed": ("summary.shed", ""),
    "eff. batch": ("batching.effective_batch_size", "effective_batch_size"),
    "padding": ("batching.padding_share", "padding_share"),
    "÷ offline": ("", "ratio_to_offline.median"),
}


class _File(pydantic.BaseModel):
    """As much of a result file as a comparison needs; what else is in it stays."""

    settings: dict[str, Any] = pydantic.Field(default_factory=dict)
    windows: list[dict[str, Any]] | None = None
    points: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Ratio:
    """A figure of two files, and how many times A's value B's is; None where there is no value or A's is 0."""

    label: str
    figure: str
    a: float | None
    b: float | None

    @property
    def ratio(self) -> float | None:
        """B ÷ A."""
        return self.b / self.a if self.a and self.b is not None else None


@dataclass(frozen=True)
class Comparison:
    """What two result files have in common.

    Attributes:
        ratios: figures of windows that both have, in A's order.
        notes: what only one of them has, and settings in which they differ.
    """

    ratios: tuple[Ratio, ...]
    notes: tuple[str, ...]


def compare(a: Path, b: Path) -> Comparison:
    """Compare two result files.

    Raises:
        UserError: one can't be read or is none, they are of two kinds, or have nothing in common.
    """
    first, second = _read(a), _read(b)
    if (first.windows is None) != (second.windows is None):
        raise UserError(
            f"{a} and {b} are results of two kinds", hint="one measured a running server, the other an archive"
        )
    ones, others = _named(first), _named(second)
    shared = [label for label in ones if label in others]
    if not shared:
        raise UserError(
            f"{a} and {b} have no load in common", hint=f"A has {', '.join(ones) or 'none'}; B {', '.join(others)}"
        )
    which = 1 if first.windows is None else 0
    ratios = []
    for label in shared:
        for figure, paths in FIGURES.items():
            values = [_at(found[label], paths[which]) for found in (ones, others)]
            if values != [None, None]:
                ratios.append(Ratio(label, figure, *values))
    return Comparison(tuple(ratios), tuple(_notes(first, second, ones, others)))


def _read(path: Path) -> _File:
    try:
        found = _File.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from error
    except pydantic.ValidationError as error:
        raise UserError(f"{path} is no result of bench", "write one with bench --json FILE") from error
    if found.windows is None and found.points is None:
        raise UserError(f"{path} is no result of bench", "write one with bench --json FILE")
    return found


def _named(found: _File) -> dict[str, Mapping[str, Any]]:
    """Windows or points by what load they were. Of several with one name, the first."""
    named: dict[str, Mapping[str, Any]] = {}
    if found.windows is not None:
        for window in found.windows:
            named.setdefault(str(window.get("label")), window)
    for point in found.points or ():
        label = "{}, {} clients, {}, batch {}".format(
            *(point.get(key) for key in ("workload", "clients", "dtype", "batch_size"))
        )
        named.setdefault(label, point)
    return named


def _at(found: Any, path: str) -> float | None:
    """The number at a dotted path; None where there is none."""
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        return None
    return float(found)


def _notes(first: _File, second: _File, ones: Mapping[str, object], others: Mapping[str, object]) -> Sequence[str]:
    notes = [f"only in A: {label}" for label in ones if label not in others]
    notes += [f"only in B: {label}" for label in others if label not in ones]
    for key in {**first.settings, **second.settings}:
        a, b = first.settings.get(key), second.settings.get(key)
        if a != b:
            notes.append(f"{key}: {_said(a)} in A, {_said(b)} in B")
    return notes


def _said(value: Any) -> str:
    return "nothing" if value is None else str(value)


def show(comparison: Comparison, console: Console) -> None:
    """Print the ratios as a table, and the notes."""
    table = Table()
    table.add_column("load")
    table.add_column("figure")
    for heading in ("A", "B", "B ÷ A"):
        table.add_column(heading, justify="right")
    last = None
    for one in comparison.ratios:
        label, last = ("" if one.label == last else one.label), one.label
        values = ("–" if value is None else f"{value:.4g}" for value in (one.a, one.b))
        table.add_row(label, one.figure, *values, "–" if one.ratio is None else f"{one.ratio:.2f}")
    console.print(table)
    for note in comparison.notes:
        console.print(f"note: {note}", markup=False)
