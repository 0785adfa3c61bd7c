import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.lib.errors import UserError
from scripts.lib.objective import Condition, Objective
from scripts.lib.stats import percentile


@pytest.mark.parametrize(
    ("text", "conditions"),
    [
        ("p95<=200ms", [("p95", 200)]),
        (" P99 <= 0.1 s ", [("p99", 100)]),
        ("p50<20ms,p99.9<=1s", [("p50", 20), ("p99.9", 1000)]),
        ("max<=2s, mean<=30ms", [("max", 2000), ("mean", 30)]),
    ],
)
def test_objectives_as_people_write_them(text: str, conditions: list[tuple[str, float]]) -> None:
    assert [(c.figure, c.bound_ms) for c in Objective.parse(text).conditions] == conditions


@pytest.mark.parametrize(
    "text", ["", "p95", "p95<=200", "95<=200ms", "p95>=200ms", "p95<=0ms", "p0<=1s", "p95<=1s,p95<=2s"]
)
def test_what_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UserError) as error:
        Objective.parse(text)
    assert "p95<=200ms" in error.value.hint


@given(st.lists(st.floats(1, 1000), max_size=40), st.floats(1, 1000))
def test_met_is_what_its_figures_say(latencies: list[float], bound: float) -> None:
    objective = Objective((Condition("p90", bound), Condition("max", 900)))
    expected = bool(latencies) and (percentile(latencies, 90) or 0) <= bound and max(latencies) <= 900
    assert objective.met(latencies) == expected
    margin = objective.margin(latencies)
    assert (margin is not None and margin >= 0) == expected


def test_an_objective_reads_back() -> None:
    text = "p95<=200ms,max<=1000ms"
    assert str(Objective.parse(text)) == text
    assert Objective.parse(text).limit_ms == 1000
    assert Objective.parse("p50<=10ms,p99<=50ms").limit_ms == 50
