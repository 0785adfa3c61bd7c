"""What the figures of a benchmark of generation say about its goals."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scripts.lib.comparison import compare
from scripts.lib.generation_report import SERVED, FirstToken, Report, Run, judge, show, write_json
from scripts.lib.generation_yardstick import ENGINE, STATIC, UNSHARED, VLLM
from scripts.lib.machine import Machine

HERE = Machine("a processor", 2, (), 8.0, 0.0, {"python": "3.11"}, "2026-01-01T00:00:00+00:00")


def ran(workload: str, side: str, seconds: float, short: float | None = None, number: int = 0) -> Run:
    return Run(workload, "float32", side, number, 4, 100, seconds, short, 0.5)


def report(*runs: Run, first: tuple[FirstToken, ...] = ()) -> Report:
    return Report(HERE, {"task": "generation"}, runs, first, {"float32": 1.0})


GOOD = (
    ran("replies", SERVED, 20.0, 2.0), ran("replies", STATIC, 44.0, 20.0), ran("replies", ENGINE, 19.5),
    ran("sharegpt", SERVED, 10.0), ran("sharegpt", STATIC, 19.0),
    ran("prefix", ENGINE, 2.0), ran("prefix", UNSHARED, 8.0),
    ran("http", SERVED, 10.0), ran("http", ENGINE, 9.2),
)  # fmt: skip
FIRST = FirstToken("float32", 0, 8, step_s=0.1, prefill_s=0.2, busy_s=0.45)


def test_every_goal_is_judged_by_its_own_two_sides() -> None:
    found = [(target.measured, target.reached) for target in judge(report(*GOOD, first=(FIRST,)))]
    measured = [value for value, _ in found]
    assert measured == pytest.approx([2.2, 0.1, 1.9, 4.0, 2.5, 2.5, 8.0])
    assert [reached for _, reached in found] == [True, True, False, True, True, True, False]


def test_beside_vllm_the_engines_are_compared() -> None:
    runs = (*GOOD, ran("replies", VLLM, 15.6), ran("sharegpt", ENGINE, 9.0), ran("sharegpt", VLLM, 6.3))
    found = {target.name: (target.measured, target.reached) for target in judge(report(*runs))[7:]}
    assert list(found) == [f"{name}: the engine's tokens/s ÷ vLLM's, float32" for name in ("replies", "sharegpt")]
    assert [measured for measured, _ in found.values()] == pytest.approx([0.8, 0.7])
    assert [reached for _, reached in found.values()] == [True, False]


def test_ratios_are_of_one_round_and_their_median_counts() -> None:
    rounds: list[Any] = [(10, 20, 0), (10, 50, 1), (30, 90, 2)]
    runs = [ran("sharegpt", SERVED, served, number=number) for served, _, number in rounds]
    runs += [ran("sharegpt", STATIC, static, number=number) for _, static, number in rounds]
    target = judge(report(*runs))[2]
    assert target.measured == pytest.approx(3.0)
    assert target.note == "median of 3 rounds, 2.00–5.00"


def test_what_was_not_measured_says_so() -> None:
    targets = judge(report(ran("replies", SERVED, 20.0, 2.0)))
    assert [target.measured for target in targets] == [None] * 7
    assert {target.verdict for target in targets} == {"not measured"}


def test_table_and_json_tell_the_same(tmp_path: Path) -> None:
    made = report(*GOOD, first=(FIRST,))
    out = io.StringIO()
    show(made, Console(file=out, width=200))
    assert "generate, static batches" in out.getvalue()
    assert "first token beside 8 that decode, float32: 450 ms" in out.getvalue()
    assert "MISSED by" in out.getvalue()
    write_json(made, tmp_path / "out.json")
    document = json.loads((tmp_path / "out.json").read_bytes())
    rates = [window["summary"]["generated_per_s"] for window in document["windows"]]
    assert rates == pytest.approx([run.tokens_per_s for run in GOOD])
    assert [target["reached"] for target in document["targets"]].count(True) == 5
    assert document["first_tokens"][0]["steps"] == pytest.approx(2.5)


def test_two_results_can_be_compared(tmp_path: Path) -> None:
    write_json(report(ran("prefix", ENGINE, 2.0)), tmp_path / "a.json")
    write_json(report(ran("prefix", ENGINE, 1.0)), tmp_path / "b.json")
    found = {each.figure: each.ratio for each in compare(tmp_path / "a.json", tmp_path / "b.json").ratios}
    assert found["tokens written/s"] == 2.0
    assert found["1st token p50 ms"] == 1.0
