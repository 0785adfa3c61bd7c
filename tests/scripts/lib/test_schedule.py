import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from scripts.lib.errors import UserError
from scripts.lib.schedule import (
    CONSTANT,
    POISSON,
    Phase,
    Schedule,
    parse_phases,
    read_bodies,
    read_trace,
    steady,
)

phases = st.builds(Phase, st.floats(0.1, 20), st.floats(0, 50), st.floats(0.1, 50))


@given(phases, st.floats(0, 1))
def test_a_moment_is_the_inverse_of_what_is_expected(phase: Phase, share: float) -> None:
    count = share * phase.expected(phase.seconds)
    moment = phase.moment(count)
    assert 0 <= moment <= phase.seconds * (1 + 1e-9)
    assert phase.expected(moment) == pytest.approx(count, rel=1e-6, abs=1e-6)


@given(st.lists(phases, min_size=1, max_size=4), st.sampled_from([POISSON, CONSTANT]), st.integers(0, 5))
def test_times_ascend_within_the_schedule_and_are_the_seeds(many: list[Phase], arrivals: str, seed: int) -> None:
    schedule = Schedule(tuple(many), arrivals, seed)
    times = list(schedule.times())
    assert times == sorted(times)
    assert all(0 <= time <= schedule.seconds * (1 + 1e-9) for time in times)
    assert times == list(Schedule(tuple(many), arrivals, seed).times())
    if arrivals == CONSTANT:
        assert abs(len(times) - sum(phase.expected(phase.seconds) for phase in many)) <= 1


def test_poisson_gaps_are_exponential() -> None:
    times = list(steady(100, 100, POISSON, seed=3).times())
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert stats.kstest(gaps, "expon", args=(0, 0.01)).pvalue > 0.01
    assert len(times) == pytest.approx(10_000, rel=0.04)


def test_constant_gaps_are_even() -> None:
    assert list(steady(4, 1, CONSTANT).times()) == [0, 0.25, 0.5, 0.75]


def test_steps_and_ramps() -> None:
    assert parse_phases("20x30, 20-200x60") == (Phase(30, 20, 20), Phase(60, 20, 200))
    for text in ("", "20", "20x", "x3", "axb", "-3x5", "0x5", "20x-1", "20xinf", "nanx3"):
        with pytest.raises(UserError) as error:
            parse_phases(text)
        assert "20-200x60" in error.value.hint


def test_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"at": 12.5, "body": {"text": "b"}, "headers": {"X-A": "1"}}, {"at": 12, "body": "raw"}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    first, second = read_trace(path)
    assert (first.at, first.body, first.headers) == (0, b"raw", {})
    assert (second.at, json.loads(second.body), second.headers) == (0.5, {"text": "b"}, {"X-A": "1"})


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"at": "x", "body": 1}', '{"at": 1}', '{"at": 1, "body": 1, "headers": 3}', '{"at": NaN, "body": 1}'],
)
def test_a_line_of_a_trace_that_is_none_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at": 0, "body": 1}\n' + line)
    with pytest.raises(UserError, match="line 2"):
        read_trace(path)


def test_bodies(tmp_path: Path) -> None:
    path = tmp_path / "bodies.jsonl"
    path.write_text('{"text": "é"}\n\n"plain"\n')
    assert read_bodies(path) == ['{"text": "é"}'.encode(), b"plain"]
    path.write_text("")
    with pytest.raises(UserError, match="no requests"):
        read_bodies(path)
    with pytest.raises(UserError, match="can't be read"):
        read_bodies(tmp_path / "none")
