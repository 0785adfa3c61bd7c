import pytest

from scripts.lib import forecast as module
from scripts.lib.advice import advise
from scripts.lib.costs import Rates
from scripts.lib.forecast import OVERLOADED, Forecast
from scripts.lib.objective import Objective
from scripts.lib.tuning import Setting
from tests.scripts.lib.profiles import profile

REQUESTS = ((20,),) * 9 + ((240,),)


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COUNT", 500)


def forecast(objective: str = "p95<=50ms", **changes: object) -> Forecast:
    def costs(per_token: float) -> object:
        rates = Rates(per_batch_s=2e-3, per_request_s=1e-4, seconds_per_token=per_token)
        return profile(requests=REQUESTS, rates=(rates,), launch_cost=30)

    profiles = {(2, None): costs(3e-5), (1, None): costs(5e-5)}
    return Forecast(profiles, Objective.parse(objective), **changes)  # type: ignore[arg-type]


def setting(workers: int = 1, threads: int | None = 2, size: int = 8, delay: int = 1) -> Setting:
    return Setting(workers=workers, threads=threads, batch_size=size, max_batch_delay=delay)


def test_the_margin_falls_with_the_rate_and_is_used_up_at_the_highest_one() -> None:
    known = forecast()
    best = known.rate(setting())
    margins = [known.margin(setting(), best * share) for share in (0.3, 0.8, 1.0, 1.15)]
    assert margins == sorted(margins, reverse=True)
    assert margins[2] >= 0 > margins[3]
    assert known.margin(setting(), 100 * best) == OVERLOADED


def test_a_rate_below_what_is_wanted_is_not_sought() -> None:
    known = forecast()
    assert known.rate(setting(size=1), at_least=1e6) == 0
    assert known.rate(setting(size=1)) > 0
    assert known.rate(setting(size=1), at_least=1e6) > 0, "once known it is told"


def test_settings_are_told_apart() -> None:
    known = forecast()
    assert known.rate(setting(2, 1)) > known.rate(setting(1, 2)), "2 × 5e-5 make more than 1 × 3e-5"
    assert known.lone_ms(setting(delay=20)) == pytest.approx(known.lone_ms(setting(delay=1)) + 19, abs=0.01)
    assert known.lone_ms(setting(size=1, delay=100)) < known.lone_ms(setting(delay=1))


def test_workers_of_gpus_have_one_each_before_they_share() -> None:
    on_gpu = Forecast({(None, None): profile(requests=REQUESTS, device="cuda")}, Objective.parse("p95<=50ms"), gpus=2)
    one, two, four = (on_gpu.rate(setting(workers, None)) for workers in (1, 2, 4))
    assert two == pytest.approx(2 * one, rel=0.2)
    assert four < 1.7 * two


def test_a_trace_is_predicted_as_it_came() -> None:
    calm = forecast(times=[0.1 * number for number in range(10)])
    burst = forecast(times=[0.0] * 10)
    assert calm.margin(setting(size=1), None) > burst.margin(setting(size=1), None)


def test_fewer_tokens_more_workers_and_a_gpu_are_advised_where_they_help() -> None:
    known = forecast()
    at = setting(1, 1)
    told = " / ".join(advise(known, at, 5 * known.rate(at), maximum=False))
    assert "more workers: " in told
    assert "a GPU" in told
    count = int(told.split("more workers: ")[1].split()[0])
    assert 4 <= count <= 10
    assert "lone client" not in told

    strict = forecast("p95<=12ms")  # 240 tokens take 15 ms and more
    told = " / ".join(advise(strict, setting(1, 1), None, maximum=True))
    assert "even a lone client" in told
    assert "more workers" not in told
    cut = int(told.split("texts cut at ")[1].split()[0])
    assert strict.cut(cut).lone(setting(1, 1)) >= 0 > strict.lone(setting(1, 1))


def test_on_a_gpu_no_gpu_is_advised() -> None:
    on_gpu = Forecast({(None, None): profile(requests=REQUESTS, device="cuda")}, Objective.parse("p95<=1ms"), gpus=1)
    assert not any("a GPU" in each for each in advise(on_gpu, setting(1, None), None, maximum=True))
