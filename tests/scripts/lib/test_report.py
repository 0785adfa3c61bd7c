"""The report: what it derives, what it judges, what it writes."""

import dataclasses
import io
import math
from pathlib import Path

import orjson
import pytest
from rich.console import Console

from scripts.lib.machine import Machine, describe
from scripts.lib.offline import SingleText
from scripts.lib.report import OfflineRun, Point, Report, Round, Target, show, to_json, write_json
from scripts.lib.scrape import BatchingWindow
from scripts.lib.stats import Summary
from scripts.lib.targets import judge

MACHINE = Machine(
    "Model T", 2, ("avx2",), 24.0, 0.1, {"python": "3.11", "torch": "2.13.0"}, "2026-11-29T12:00:00+00:00"
)


def make_round(texts_per_s: float, ratio: float | None = None, p50_ms: float | None = 10.0, errors: int = 0) -> Round:
    summary = Summary(
        requests=100,
        errors=errors,
        errors_by_status={503: errors} if errors else {},
        texts=100,
        wall_s=100 / texts_per_s,
        requests_per_s=texts_per_s,
        texts_per_s=texts_per_s,
        tokens_per_s=texts_per_s * 15,
        mean_ms=p50_ms,
        p50_ms=p50_ms,
        p90_ms=p50_ms,
        p95_ms=p50_ms,
        p99_ms=p50_ms,
        max_ms=p50_ms,
    )
    batching = BatchingWindow(100, 100, 995, 5, 0, 10, 12, {math.inf: 1, 16.0: 9}, {}, 0.1, 0.5, 0.1)
    return Round(summary, batching, 0.2, False, ratio)


def make_point(
    workload: str = "mixed", clients: int = 64, dtype: str = "float32", batch_size: int = 32, *rounds: Round
) -> Point:
    return Point(workload, clients, dtype, batch_size, rounds or (make_round(150.0, 1.5),), int(1.4e9))


def make_report(*points: Point, offline: tuple[OfflineRun, ...] = ()) -> Report:
    return Report(MACHINE, {"workers": 2}, points, offline)


def verdicts(report: Report, build_s: float | None = None) -> dict[str, Target]:
    return {target.name: target for target in judge(report, build_s)}


def test_a_point_sums_its_rounds() -> None:
    point = make_point("mixed", 64, "float32", 32, make_round(100, 1.0, 8.0, errors=1), make_round(300, 3.0, 12.0))
    assert (point.texts_per_s.low, point.texts_per_s.median, point.texts_per_s.high) == (100, 200, 300)
    assert point.ratio is not None
    assert (point.ratio.low, point.ratio.median, point.ratio.high) == (1.0, 2.0, 3.0)
    assert point.errors == 1
    assert point.effective_batch_size == 10
    assert point.padding_share == pytest.approx(0.005)
    assert point.latency("p50_ms") == 10.0


def test_targets_are_judged_by_the_figures() -> None:
    report = make_report(
        make_point("mixed", 64, "float32", 32, make_round(150, 1.2), make_round(160, 1.4), make_round(170, 1.5)),
        make_point("mixed", 64, "bfloat16", 32, make_round(150, 0.9)),
        make_point("short", 64, "float32", 32, make_round(300)),
        make_point("short", 64, "float32", 1, make_round(100)),
        make_point("short", 1, "float32", 32, make_round(60, p50_ms=17.0)),
        offline=(
            OfflineRun("mixed", "float32", 2, 1000, (100.0, 110.0, 120.0)),
            OfflineRun("mixed", "bfloat16", 2, 1000, (200.0,)),
            OfflineRun("short", "float32", 2, 1000, (300.0,), SingleText(10.0, 12.0)),
        ),
    )
    found = verdicts(report, build_s=0.4)
    measured = {name: (target.measured, target.reached) for name, target in found.items()}
    assert measured == {
        "mixed at 64 clients in float32 ÷ offline in float32": (1.4, True),
        "mixed at 64 clients in bfloat16 ÷ offline in float32": (pytest.approx(150 / 110), False),
        "mixed at 64 clients in bfloat16 ÷ offline in bfloat16": (0.9, False),
        "short at 64 clients: batches ÷ batch size 1": (3.0, True),
        "short, one client: p50": (17.0, False),
        "mixed at 64 clients: padding of the tokens run": (pytest.approx(0.5), True),
        "build of the archive, without its verification": (0.4, True),
    }
    assert found["short, one client: p50"].verdict == "MISSED by 1 ms (6%)"


def test_what_was_not_measured_is_neither_reached_nor_missed() -> None:
    for target in verdicts(make_report()).values():
        assert target.reached is None
        assert target.verdict == "not measured"


def test_batches_are_not_compared_with_themselves() -> None:
    report = make_report(make_point("short", 64, "float32", 1))
    assert verdicts(report)["short at 64 clients: batches ÷ batch size 1"].measured is None


def test_json_is_strict_and_complete(tmp_path: Path) -> None:
    report = make_report(make_point("mixed", 64, "float32", 32, make_round(float("nan"), float("inf"), None)))
    write_json(report, tmp_path / "out.json")
    document = orjson.loads((tmp_path / "out.json").read_bytes())
    (point,) = document["points"]
    assert point["texts_per_s"]["median"] is None
    assert point["ratio_to_offline"]["median"] is None
    assert point["p50_ms"] is None
    assert point["padding_share"] == pytest.approx(0.005)
    assert point["rounds"][0]["batching"]["batch_sizes"] == {"16": 9, "+Inf": 1}
    assert document["machine"]["cores"] == 2
    assert b"NaN" not in to_json(report)


def test_the_table_says_what_matters() -> None:
    report = make_report(make_point(), offline=(OfflineRun("mixed", "float32", 2, 1000, (100.0, 120.0)),))
    report = dataclasses.replace(report, targets=judge(report, 7.0), notes=("busy machine",))
    out = io.StringIO()
    show(report, Console(file=out, width=200))
    text = out.getvalue()
    for expected in (
        "Model T",
        "avx2",
        "mixed",
        "1.50",
        "110 (100–120)",
        "0.50%",
        "1400",
        "MISSED by 2 s",
        "busy machine",
    ):
        assert expected in text


def test_this_machine_is_described() -> None:
    machine = describe()
    assert machine.cores >= 1
    assert machine.versions["torch"].startswith("2.")
    assert machine.computes_bfloat16 == any(flag in machine.flags for flag in ("avx512_bf16", "amx_bf16", "bf16"))
