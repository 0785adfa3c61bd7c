"""What `batchserve plan` tells: rows of predictions, and predictions beside a measurement, as tables and as JSON."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.lib.capacity import Planner
from scripts.lib.simulation import ClosedLoop, OpenLoop, Outcome, Setup
from scripts.lib.validation import Compared, Validated, within

Progress = Callable[[str], AbstractContextManager[None]]


def rows(
    planner: Planner, rate: float | None, load: OpenLoop | ClosedLoop | None, progress: Progress
) -> list[dict[str, Any]]:
    """The setup as it is declared, and what is needed: for a load, or for a steady rate and rates beyond it.

    Args:
        planner: answers.
        rate: requests per second; None takes the load.
        load: what is simulated where there is no rate.
        progress: shows that a labelled step is under way.

    Returns:
        JSON objects; the first is the declared setup, the only one where no number of devices is enough.
    """
    workers = planner.setup.workers
    with progress("simulating the declared setup"):
        now = planner.at(rate, workers) if rate is not None else planner.outcome(load, workers)  # type: ignore[arg-type]
    found = [_row("declared", rate, 1, planner.setup, now, planner.met(now))]
    if load is not None:
        with progress("seeking the fewest devices"):
            least = planner.smallest(load)
        return found + ([_row("needed", None, 1, *least, True)] if least else [])
    assert rate is not None
    for each in planner.growth(rate):
        with progress(f"seeking what {each:g} requests/s need"):
            need = planner.need(each)
        if need is None:
            break
        found.append(_row("needed", each, need.instances, need.setup, need.outcome, True))
    return found


def _row(what: str, rate: float | None, instances: int, setup: Setup, outcome: Outcome, met: bool) -> dict[str, Any]:
    return {
        "what": what,
        "requests_per_s": outcome.requests_per_s * instances if rate is None else rate,
        "servers": instances,
        "workers": instances * setup.workers,
        "devices": instances * setup.devices,
        **{f"p{q}_ms": outcome.latency_ms(q) for q in (50, 95, 99)},
        "batch_size": outcome.batch_size,
        "utilisation": outcome.utilisation,
        "shed_share": outcome.shed_share,
        "met": met,
    }


def show(planner: Planner, found: Sequence[dict[str, Any]], console: Console) -> None:
    """Print rows, and what a reader must know to judge them."""
    setup, known = planner.setup, planner.profile
    console.print(
        f"{known.archive} on {known.device_name}, {known.dtype}: batch size {setup.batch_size}, delay "
        f"{setup.max_batch_delay} ms, queue {setup.queue}, {setup.workers_per_device} workers a device; "
        f"{planner.arrivals} arrivals, seed {planner.seed}; objective {planner.objective}",
        markup=False,
    )
    table = Table(title="predicted", title_justify="left")
    table.add_column("")
    for column in ("requests/s", "TorchServes", "workers", "devices", "p50 ms", "p95 ms", "p99 ms"):
        table.add_column(column, justify="right")
    for column in ("batch", "utilised", "refused", "devices per 1000/s"):
        table.add_column(column, justify="right")
    table.add_column("objective")
    for row in found:
        table.add_row(
            row["what"],
            f"{row['requests_per_s']:,.4g}" if row["requests_per_s"] < 1000 else f"{row['requests_per_s']:,.0f}",
            f"{row['servers']:,}",
            f"{row['workers']:,}",
            f"{row['devices']:,}",
            *(_number(row[key], ".1f") for key in ("p50_ms", "p95_ms", "p99_ms", "batch_size")),
            f"{row['utilisation']:.0%}",
            f"{row['shed_share']:.1%}",
            f"{row['devices'] / row['requests_per_s'] * 1000:.3g}" if row["requests_per_s"] else "–",
            "met" if row["met"] else "missed",
        )
    console.print(table)
    if len(found) == 1:
        alone = planner.floor()
        shown = ", ".join(f"p{q} {_number(alone.latency_ms(q), '.1f')} ms" for q in (50, 95, 99))
        console.print(
            f"No number of devices up to {planner.devices_per_instance} a TorchServe meets {planner.objective}: a lone "
            f"client meets {shown}, the delay of {setup.max_batch_delay} ms in it. A shorter delay, fewer tokens, a "
            "faster device or a looser objective would.",
            markup=False,
        )
    if setup.workers_per_device > len(known.rates):
        shared = "share it evenly" if known.device == "cuda" else "don't slow each other down"
        console.print(
            f"note: profiled with at most {len(known.rates)} busy workers on the device; more are taken to {shared}",
            markup=False,
        )


def show_validation(points: Sequence[Validated], notes: Sequence[str], console: Console) -> None:
    """Print predictions beside what was measured."""
    table = Table(title="predicted, measured, ratio", title_justify="left")
    table.add_column("load")
    for column in ("p95 ms", "batch", "requests/s", "utilised"):
        table.add_column(column, justify="right")
    for point in points:
        figures = (point.p95_ms, point.batch_size, point.requests_per_s)
        table.add_row(point.load, *map(_beside, figures), f"{point.utilisation:.0%}")
    console.print(table)
    verdict = "are" if within(points) else "are NOT"
    console.print(f"p95 and batch size of all points {verdict} within 20 % of what was measured", markup=False)
    for note in notes:
        console.print(f"note: {note}", markup=False)


def validation_json(points: Sequence[Validated], notes: Sequence[str]) -> dict[str, Any]:
    """The same as a JSON object."""
    return {"points": [_point(point) for point in points], "within_20_percent": within(points), "notes": list(notes)}


def _point(point: Validated) -> dict[str, Any]:
    figures = {"p95_ms": point.p95_ms, "batch_size": point.batch_size, "requests_per_s": point.requests_per_s}
    compared = {
        key: {"predicted": each.predicted, "measured": each.measured, "ratio": each.ratio}
        for key, each in figures.items()
    }
    return {"load": point.load, **compared, "utilisation": point.utilisation}


def _beside(figure: Compared) -> str:
    return " · ".join((_number(figure.predicted, ".1f"), _number(figure.measured, ".1f"), _number(figure.ratio, ".2f")))


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
