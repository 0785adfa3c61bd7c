import json
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from scripts.lib.machine import Machine
from scripts.lib.objective import Objective
from scripts.lib.tune_report import TuneReport, markdown, page, pareto, pareto_plot, ratio_to, show, to_json
from scripts.lib.tuning import Baseline, Kind, Outcome, Point, Setting, Verified

MACHINE = Machine("a CPU", 2, (), 8.0, 0.1, {"python": "3.11"}, "2026-11-30T00:00:00+00:00")


def setting(size: int = 8, delay: int = 5) -> Setting:
    return Setting(workers=2, threads=1, batch_size=size, max_batch_delay=delay)


def point(rate: float | None = 80.0, ms: float | None = 150.0, kind: Kind = Kind.SEARCH, **changes: Any) -> Point:
    values: dict[str, Any] = {
        "setting": setting(), "kind": kind, "rate": rate, "seconds": 30.0, "met": True, "margin": 0.25,
        "judged_ms": ms, "p50_ms": 40.0, "p95_ms": ms, "p99_ms": ms, "requests": 2400, "per_s": 79.0,
    }  # fmt: skip
    return Point(**values | changes)


def verified(rate: float | None = 80.0, size: int = 8) -> Verified:
    return Verified(setting=setting(size), rate=rate, point=point(rate, kind=Kind.FINAL, setting=setting(size)))


def report(outcome: Outcome | None, *points: Point, **changes: Any) -> TuneReport:
    settings = {"archive": "m.mar", "load": "the highest rate"}
    return TuneReport("m", MACHINE, settings, Objective.parse("p95<=200ms"), outcome, points, **changes)


def found() -> Outcome:
    baselines = (
        Baseline(name="TorchServe's defaults", setting=setting(1, 100), verified=verified(40.0, 1)),
        Baseline(name="the tutorials' setting", setting=setting(32, 20), verified=None, missed="at no rate tried"),
    )
    quiet = point(None, 60.0, Kind.QUIET, p50_ms=50.0)
    return Outcome(winner=verified(), quiet=quiet, baselines=baselines, ended="the budget was used up")


def printed(told: TuneReport) -> str:
    console = Console(width=400, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as capture:
        show(told, console)
    return capture.get()


def test_the_winner_its_quiet_hour_and_the_ratios_are_told() -> None:
    told = report(found(), point(), point(100.0, 250.0, met=False, margin=-0.25, stopped=True))
    for text in (printed(told), markdown(told)):
        assert "80 requests/s within p95&lt;=200ms" in text or "80 requests/s within p95<=200ms" in text
        assert "workers: 2, batch_size: 8, max_batch_delay: 5" in text
        assert "the delay costs 5 ms of each, 10% of the p50" in text
        assert "2.00 ×" in text
        assert "at no rate tried" in text
        assert "MISSED, stopped" in text
    assert "must be built with" not in printed(told)
    assert "--threads 1" in printed(report(found(), changes={"threads": 1}))


def test_batches_of_one_wait_for_nobody() -> None:
    quiet = point(None, 60.0, Kind.QUIET, setting=setting(1))
    outcome = Outcome(winner=verified(size=1), quiet=quiet, ended="e")
    assert "the delay costs nothing" in printed(report(outcome))


def test_that_no_setting_meets_it_is_said_plainly_with_what_would() -> None:
    closest = point(40.0, 320.0, met=False, margin=-0.6)
    alone = point(None, 90.0, Kind.QUIET)
    outcome = Outcome(winner=None, ended="no setting met the objective", closest=closest)
    text = printed(report(outcome, closest, alone, advice=["a GPU: see"]))
    assert "No setting meets p95<=200ms" in text
    assert "Closest: 2 workers × 1 thread, batch size 8, delay 5 ms at 40/s, p95 320.0 ms." in text
    assert "A lone client there meets it" in text
    assert "What would: a GPU: see." in text


def test_that_time_ran_out_is_no_verdict() -> None:
    outcome = Outcome(winner=None, ended="the budget was used up", closest=point(40.0), unknown=True)
    text = printed(report(outcome, point(40.0)))
    assert "No setting is verified to meet p95<=200ms: the budget was used up. A larger --budget may find one." in text
    assert "No setting meets" not in text


def test_a_setting_that_was_never_served_says_why() -> None:
    failed = point(40.0, None, met=False, margin=None, failure="no memory\nmore")
    outcome = Outcome(winner=None, ended="e")
    text = printed(report(outcome, failed))
    assert "could not be served: no memory" in text
    assert "not served" in text


def test_an_interrupted_one_says_how_to_go_on() -> None:
    told = report(None, point())
    assert "run the same command again" in printed(told)
    document = json.loads(to_json(told))
    assert document["interrupted"] is True
    assert len(document["points"]) == 1


def test_json_holds_everything() -> None:
    told = report(found(), point(), advice=["a"], notes=["n"])
    document = json.loads(to_json(told))
    assert document["outcome"]["winner"]["setting"]["batch_size"] == 8
    assert document["ratios"] == {"TorchServe's defaults": 2.0, "the tutorials' setting": None}
    assert document["points"][0]["p95_ms"] == 150.0
    assert (document["advice"], document["notes"], document["interrupted"]) == (["a"], ["n"], False)


def test_only_highest_rates_have_a_ratio() -> None:
    baseline = Baseline(name="b", setting=setting(), verified=verified(60.0))
    highest = Outcome(winner=verified(90.0), ended="e", baselines=(baseline,))
    assert ratio_to(highest, baseline) == 1.5
    assert ratio_to(highest.model_copy(update={"winner": None}), baseline) is None
    cut_short = baseline.model_copy(update={"at_least": True})
    assert ratio_to(highest, cut_short) is None
    text = printed(report(highest.model_copy(update={"baselines": (cut_short,)})))
    assert "at least 60" in text
    assert "1.50 ×" not in text


@pytest.mark.parametrize("load", [90.0, None])
def test_a_given_load_has_no_ratio(load: float | None) -> None:
    baseline = Baseline(name="b", setting=setting(1), verified=verified(load))
    outcome = Outcome(winner=verified(load), ended="e", baselines=(baseline,), given=True)
    assert ratio_to(outcome, baseline) is None
    text = printed(report(outcome))
    assert "tuned" in text
    assert "tuned ÷ this" not in text
    assert "×" not in text.partition("Beside what people use")[2].replace("workers ×", "")


def test_the_page_has_the_pareto_plot_and_escapes_what_it_is_given() -> None:
    outcome = found().model_copy(update={"ended": "<script>alert(1)</script>"})
    told = report(outcome, point(), point(100.0, 180.0), point(120.0, 900.0, met=False, stopped=True))
    made = page(told)
    assert "<script" not in made
    plot = pareto_plot(told)
    assert plot in made
    names = [text.text for text in ElementTree.fromstring(plot).iter("text")]
    assert "Pareto front" in names
    assert "p95<=200ms" in names
    assert str(setting()) in names


@given(st.lists(st.tuples(st.floats(1, 100), st.floats(1, 500)), max_size=20))
def test_the_front_holds_what_nothing_beats(places: list[tuple[float, float]]) -> None:
    points = [point(rate, ms) for rate, ms in places]
    front = pareto([*points, point(1e6, 0.1, stopped=True), point(None, 0.1, Kind.QUIET)])
    told = {(each.rate, each.judged_ms) for each in front}
    expected = {
        (rate, ms)
        for rate, ms in places
        if not any((a >= rate and b < ms) or (a > rate and b <= ms) for a, b in places)
    }
    assert told == expected
    assert [each.rate for each in front] == sorted(each.rate or 0.0 for each in front)


@pytest.mark.parametrize("text", ["a|b", "a<b>"])
def test_markdown_tables_stay_whole(text: str) -> None:
    told = report(found(), point(), notes=[text])
    lines = [line for line in markdown(told).splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines if "tuned" not in line}) <= 2
    assert text not in markdown(told)
