import json
from pathlib import Path
from typing import Any

import pytest

from scripts.lib import validation
from scripts.lib.costs import batch_seconds
from scripts.lib.errors import UserError
from scripts.lib.schedule import steady
from scripts.lib.simulation import ClosedLoop, OpenLoop, Setup, simulate
from scripts.lib.validation import Bench, Compared, Validated, validate, within
from scripts.lib.workloads import request_lengths
from tests.scripts.lib.profiles import profile

SETTINGS = {"task": "embedding", "workers": 2, "threads per worker": 1, "batch size": 8, "max batch delay ms": 2}


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "REQUESTS", 2000)


def point(**changes: Any) -> dict[str, Any]:
    spread = {"median": 100.0, "low": 90.0, "high": 110.0}
    values = {"workload": "short", "dtype": "float32", "batch_size": 8, "clients": 4, "requests_per_s": spread}
    return {**values, "p95_ms": 10.0, "effective_batch_size": 2.0, "rounds": [], **changes}


def bench(tmp_path: Path, *points: dict[str, Any], **settings: Any) -> Bench:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"machine": {}, "settings": {**SETTINGS, **settings}, "points": points, "notes": []}))
    return Bench.read(path)


def test_a_measurement_that_is_a_simulation_is_predicted_exactly(tmp_path: Path) -> None:
    known = profile(rates=profile().rates * 2)
    measured = []
    for load, named in (
        (ClosedLoop(16, validation.REQUESTS, validation.CLIENT_S), {"clients": 16}),
        (OpenLoop(list(steady(300, validation.REQUESTS / 300).times())), {"clients": None, "rate": 300}),
    ):
        requests = request_lengths("mixed", validation.POOL)
        outcome = simulate(Setup(2, 8, 2, workers_per_device=2), batch_seconds(known), requests, load)
        figures = {"p95_ms": outcome.latency_ms(95), "effective_batch_size": outcome.batch_size}
        measured.append(point(workload="mixed", requests_per_s=outcome.requests_per_s, **figures, **named))
    found, notes = validate(known, bench(tmp_path, *measured))
    assert not notes
    assert [each.load for each in found] == ["mixed, 16 clients, batch size 8", "mixed, 300/s poisson, batch size 8"]
    for each in found:
        assert each.p95_ms.ratio == each.batch_size.ratio == each.requests_per_s.ratio == 1
    assert within(found)


def test_what_the_profile_does_not_speak_of_is_said(tmp_path: Path) -> None:
    measured = bench(tmp_path, point(), point(dtype="bfloat16"), **{"threads per worker": 4, "task": "reranking"})
    found, notes = validate(profile(), measured)
    assert len(found) == 1
    assert len(notes) == 4
    assert "4 threads" in notes[0]
    assert "at most 1 busy" in notes[1]
    assert "measured reranking" in notes[2]
    assert "1 points left out" in notes[3]
    with pytest.raises(UserError, match="No point"):
        validate(profile(dtype="float16"), measured)


def test_within_takes_both_figures_of_all_points() -> None:
    def each(p95: float, batch: float | None) -> Validated:
        return Validated("", Compared(p95, 100.0), Compared(batch, 10.0), Compared(None, None), 0.5)

    assert within([each(119, 8.1), each(81, 11.9)])
    assert not within([each(121, 10)])
    assert not within([each(100, 7.9)])
    assert not within([each(100, 10), each(100, None)])


@pytest.mark.parametrize("content", ["{", "[]", '{"settings": {}, "points": []}'])
def test_what_is_no_result_is_said(content: str, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(content)
    with pytest.raises(UserError, match="is no result of bench"):
        Bench.read(path)
    with pytest.raises(UserError, match="can't be read"):
        Bench.read(tmp_path / "nowhere.json")
