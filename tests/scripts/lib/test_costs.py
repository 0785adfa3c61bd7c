import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handlers.batching import Limits, cost, plan
from scripts.lib.costs import Profile, Rates, Timing, batch_seconds, fit, plan_cost
from scripts.lib.errors import UserError
from tests.scripts.lib.profiles import profile

lengths = st.lists(st.integers(1, 300), min_size=1, max_size=40)
limits = st.builds(
    Limits, st.integers(50, 1024), st.integers(1, 32), st.integers(0, 300), st.sampled_from([1, 8]), st.booleans()
)


@given(lengths, limits)
def test_a_plans_cost_is_the_handlers(texts: list[int], limits: Limits) -> None:
    assert plan_cost(texts, limits) == cost(plan(texts, limits), limits)


@given(st.floats(0, 0.01), st.floats(0, 0.001), st.floats(1e-7, 1e-4), st.integers(0, 9))
def test_costs_are_found_again_in_what_they_explain(batch: float, request: float, token: float, seed: int) -> None:
    truth = Rates(per_batch_s=batch, per_request_s=request, seconds_per_token=token)
    rng = random.Random(seed)
    sizes = [(n, n * rng.randint(5, 250)) for n in (1, 1, 2, 4, 4, 8, 16, 32, 32)]
    found, error = fit([Timing(n, tokens, truth.seconds(n, tokens)) for n, tokens in sizes])
    assert error < 1e-3
    for n, tokens in sizes:
        assert found.seconds(n, tokens) == pytest.approx(truth.seconds(n, tokens), rel=1e-2)


@given(st.lists(st.tuples(st.integers(1, 32), st.integers(0, 5000), st.floats(1e-4, 1)), min_size=1, max_size=20))
def test_no_fitted_cost_is_negative(measured: list[tuple[int, int, float]]) -> None:
    rates, error = fit([Timing(*each) for each in measured])
    assert min(rates.per_batch_s, rates.per_request_s, rates.seconds_per_token) >= 0
    assert error >= 0


def test_nothing_is_fitted_to_nothing() -> None:
    with pytest.raises(ValueError, match="took time"):
        fit([])
    with pytest.raises(ValueError, match="took time"):
        fit([Timing(1, 1, 0.0)])


def test_a_batch_takes_what_its_parts_take() -> None:
    seconds = batch_seconds(profile(transport_s=0.5))
    assert seconds([(10,), (20, 30)], 1) == pytest.approx(0.5 + 1e-3 + (100 + 60) * 1e-5)
    assert seconds([(1000,), (1000,)], 1) == pytest.approx(0.5 + 1e-3 + (2 * 100 + 2000) * 1e-5)
    assert seconds([()], 1) == pytest.approx(0.5 + 1e-3)


def test_beyond_what_was_measured_a_gpu_is_shared_and_cores_are_not() -> None:
    rates = (
        Rates(per_batch_s=1, per_request_s=0, seconds_per_token=2),
        Rates(per_batch_s=1, per_request_s=0, seconds_per_token=3),
    )
    gpu, cpu = profile(device="cuda", rates=rates), profile(rates=rates)
    assert [gpu.rates_with(busy).seconds_per_token for busy in (1, 2, 4)] == [2, 3, 6]
    assert [cpu.rates_with(busy).seconds_per_token for busy in (1, 2, 4)] == [2, 3, 3]
    assert batch_seconds(gpu)([(10,)], 4) > batch_seconds(gpu)([(10,)], 2) > batch_seconds(gpu)([(10,)], 1)


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(profile().model_dump_json())
    assert Profile.read(path) == profile()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is no profile: Invalid JSON"),
        ("[]", "is no profile"),
        ('{"format": 2}', "is no profile: format"),
        (profile().model_dump_json().replace('"launch_cost":100', '"launch_cost":-1'), "is no profile: launch_cost"),
        (profile().model_dump_json().replace('"task"', '"tusk"'), "is no profile: task"),
        (profile().model_dump_json().replace("[10]", "[0]"), "is no profile: requests.0.0"),
        (profile().model_dump_json().replace('"rates":[', '"rates":[3,'), "is no profile: rates.0"),
    ],
)
def test_what_is_no_profile_is_said(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(content)
    with pytest.raises(UserError, match=says):
        Profile.read(path)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gpu\.json can't be read"):
        Profile.read(tmp_path / "gpu.json")
