import json
from pathlib import Path
from typing import Any

import pytest

from scripts.lib import validation
from scripts.lib.costs import batch_seconds
from scripts.lib.errors import UserError
from scripts.lib.schedule import steady
from scripts.lib.simulation import ClosedLoop, OpenLoop, Outcome, Setup, simulate
from scripts.lib.validation import Compared, Validated, read, validate, within
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


def bench(tmp_path: Path, *points: dict[str, Any], **settings: Any) -> Any:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"machine": {}, "settings": {**SETTINGS, **settings}, "points": points, "notes": []}))
    return read(path)


def test_a_benchmark_that_is_a_simulation_is_predicted_exactly(tmp_path: Path) -> None:
    known = profile(rates=profile().rates * 2)
    load = ClosedLoop(16, validation.REQUESTS, validation.CLIENT_S)
    requests = request_lengths("mixed", validation.POOL)
    outcome = simulate(Setup(2, 8, 2, workers_per_device=2), batch_seconds(known), requests, load)
    measured = point(
        workload="mixed",
        clients=16,
        p95_ms=outcome.latency_ms(95),
        effective_batch_size=outcome.batch_size,
        requests_per_s={"median": outcome.requests_per_s},
    )
    # what is declared says nothing about a server that the benchmark started
    (found,), notes = validate(known, bench(tmp_path, measured), Setup(9, 9, 9), [(1,)])
    assert not notes
    assert found.load == "mixed, 16 clients, batch size 8"
    assert found.p95_ms.ratio == found.batch_size.ratio == found.requests_per_s.ratio == 1
    assert within([found])


def window(label: str, outcome: Outcome, **changes: Any) -> dict[str, Any]:
    summary = {"p95_ms": outcome.latency_ms(95), "requests_per_s": outcome.requests_per_s}
    batching = {"effective_batch_size": outcome.batch_size}
    values = {"label": label, "open_loop": True, "clients": 20, "due_per_s": 1, "summary": summary}
    return {**values, "batching": batching, "part": False, **changes}


def test_a_load_that_is_a_simulation_is_predicted_exactly(tmp_path: Path) -> None:
    known, setup, requests = profile(), Setup(1, 8, 2), [(30,), (40,)]
    times = list(steady(300, validation.REQUESTS / 300, "constant").times())
    opened = simulate(setup, batch_seconds(known), requests, OpenLoop(times))
    closed = simulate(setup, batch_seconds(known), requests, ClosedLoop(5, validation.REQUESTS, validation.CLIENT_S))
    windows = [
        window("310/s", opened, due_per_s=300),  # a draw differs from the rate that was asked for
        window("5 clients", closed, open_loop=False, clients=5),
        window("steps 1x2,3x4", opened),
        window("1/s", opened, part=True),
    ]
    path = tmp_path / "load.json"
    path.write_text(json.dumps({"settings": {"server": "x", "arrivals": "constant"}, "windows": windows}))
    found, notes = validate(known, read(path), setup, requests)
    assert [each.load for each in found] == ["310/s", "5 clients"]
    for each in found:
        assert each.p95_ms.ratio == each.batch_size.ratio == each.requests_per_s.ratio == 1
    assert notes[1:] == ["2 windows left out: their load changes"]
    path.write_text(json.dumps({"settings": {}, "windows": windows[2:]}))
    with pytest.raises(UserError, match="steady"):
        validate(known, read(path), setup, requests)


def test_what_the_profile_does_not_speak_of_is_said(tmp_path: Path) -> None:
    measured = bench(tmp_path, point(), point(dtype="bfloat16"), **{"threads per worker": 4, "task": "reranking"})
    found, notes = validate(profile(), measured, Setup(1, 1, 1), [(1,)])
    assert len(found) == 1
    assert len(notes) == 4
    assert "4 threads" in notes[0]
    assert "at most 1 busy" in notes[1]
    assert "measured reranking" in notes[2]
    assert "1 points left out" in notes[3]
    with pytest.raises(UserError, match="No point"):
        validate(profile(dtype="float16"), measured, Setup(1, 1, 1), [(1,)])


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
        read(path)
    with pytest.raises(UserError, match="can't be read"):
        read(tmp_path / "nowhere.json")
