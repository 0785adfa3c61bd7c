"""The search against a machine that is a simulation itself: what it finds, what it never says, and what it spends."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.lib.search import GAIN, NO_TIME, SPENT, UNVERIFIED, Budget, Ledger, Search
from scripts.lib.tuning import Kind, Outcome, Point, Setting, Space

SPACE = Space(crews=((1, 2), (2, 1)), batch_sizes=(1, 4, 16, 32), delays=(1, 5, 20), queue=200)
SETTINGS = list(SPACE.settings())
DEFAULTS = Setting(workers=2, threads=1, batch_size=1, max_batch_delay=100)
TUTORIAL = Setting(workers=1, threads=2, batch_size=32, max_batch_delay=20)
BASELINES = {"defaults": DEFAULTS, "tutorial": TUTORIAL}
SWITCH_S = 12.0


@dataclass(frozen=True)
class Formula:
    """A server in three lines: a request waits for its batch, then for the workers, the longer the busier they are.

    Args:
        two, one: milliseconds of a request in a worker of two threads, and of one.
        per_batch: milliseconds of each batch.
        bound: milliseconds that a request may take.
    """

    two: float = 3.0
    one: float = 5.0
    per_batch: float = 10.0
    bound: float = 200.0

    def batch_ms(self, setting: Setting, size: float) -> float:
        return self.per_batch + size * (self.two if setting.threads == 2 else self.one)

    def capacity(self, setting: Setting) -> float:
        size = setting.batch_size
        return 1e3 * setting.workers * size / self.batch_ms(setting, size)

    def margin(self, setting: Setting, rate: float | None) -> float:
        assert rate is not None
        size, busy = setting.batch_size, rate / self.capacity(setting)
        if busy >= 1:
            return -10.0
        waits = 0.0 if size == 1 else min(setting.max_batch_delay, 1e3 * (size - 1) / rate)
        filled = min(size, 1 + rate * waits / 1e3)
        return max(-10.0, 1 - (waits + self.batch_ms(setting, filled) / (1 - busy)) / self.bound)

    def rate(self, setting: Setting, at_least: float = 0.0) -> float:
        low, high = 0.0, self.capacity(setting)
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (middle, high) if self.margin(setting, middle) >= 0 else (low, middle)
        return low if low >= at_least and self.margin(setting, 1e-3) >= 0 else 0.0

    def lone_ms(self, setting: Setting) -> float:
        return (0.0 if setting.batch_size == 1 else setting.max_batch_delay) + self.batch_ms(setting, 1)

    def lone(self, setting: Setting) -> float:
        return 1 - self.lone_ms(setting) / self.bound


@dataclass
class Simulated:
    """A machine whose truth is a formula, its margins disturbed by noise; time passes on its own clock."""

    truth: Formula
    noise: float = 0.0
    broken: frozenset[Setting] = frozenset()
    now: float = 0.0
    asked: list[tuple[Setting, Kind, float | None]] = field(default_factory=list)
    interrupt_at: int | None = None
    serving: Setting | None = None

    def seconds(self, kind: Kind, rate: float | None) -> float:
        return {Kind.SEARCH: 10.0, Kind.FINAL: 30.0, Kind.QUIET: 8.0}[kind]

    def measure(self, setting: Setting, kind: Kind, rate: float | None) -> Point:
        if len(self.asked) == self.interrupt_at:
            raise KeyboardInterrupt
        self.asked.append((setting, kind, rate))
        seconds = self.seconds(kind, rate)
        self.now += seconds + 2 + (SWITCH_S if setting != self.serving else 0)
        self.serving = setting
        if setting in self.broken:
            return Point(setting=setting, kind=kind, rate=rate, seconds=seconds, met=False, failure="no memory")
        if kind == Kind.QUIET:
            margin = self.truth.lone(setting)
        else:
            margin = self.truth.margin(setting, rate)
            margin += self.noise * random.Random(repr((setting, kind, rate))).uniform(-1, 1)
        return Point(
            setting=setting, kind=kind, rate=rate, seconds=seconds, met=margin >= 0,
            margin=None if margin < -1 else margin, judged_ms=10.0, p95_ms=10.0, stopped=margin < -1,
        )  # fmt: skip


def search(machine: Simulated, known: Formula, budget: float = 3600.0, points: list[Point] | None = None) -> Search:
    ledger = Ledger(machine, Budget(budget, lambda: machine.now), [] if points is None else points)
    return Search(ledger, known, SETTINGS, BASELINES)


def true_best(truth: Formula) -> float:
    return max(truth.rate(each) for each in SETTINGS)


def check(outcome: Outcome, machine: Simulated, asked_for: float | None = None) -> None:
    """What is reported was verified at just that load, by a window of full length that met the objective."""
    for found in (outcome.winner, *(each.verified for each in outcome.baselines)):
        if found is not None:
            assert (found.setting, Kind.FINAL, found.rate) in machine.asked
            assert found.point.met
            assert (found.point.kind, found.point.setting, found.point.rate) == (Kind.FINAL, found.setting, found.rate)
            assert asked_for is None or found.rate == asked_for
    if outcome.winner is not None:
        assert outcome.winner.setting in SETTINGS
        assert outcome.quiet is not None
        assert (outcome.quiet.kind, outcome.quiet.setting) == (Kind.QUIET, outcome.winner.setting)


def test_with_a_right_prediction_the_best_setting_is_found_in_a_few_windows() -> None:
    machine = Simulated(Formula())
    outcome = search(machine, Formula()).maximise()
    check(outcome, machine)
    assert outcome.winner is not None
    assert outcome.winner.rate is not None
    assert outcome.winner.rate >= 0.9 * true_best(machine.truth)
    assert len({setting for setting, *_ in machine.asked} - set(BASELINES.values())) <= 7, "not the whole grid"
    assert [each.name for each in outcome.baselines] == ["defaults", "tutorial"]
    for each in outcome.baselines:
        assert each.verified is not None
        assert each.verified.rate == pytest.approx(machine.truth.rate(each.setting), rel=0.12)


@settings(max_examples=200, deadline=None)
@given(
    two=st.floats(1, 10),
    one=st.floats(1, 10),
    per_batch=st.floats(1, 50),
    error=st.floats(0.75, 1.33),
    skew=st.floats(0.8, 1.25),
    noise=st.floats(0, 0.1),
)
def test_a_wrong_prediction_costs_little(
    two: float, one: float, per_batch: float, error: float, skew: float, noise: float
) -> None:
    machine = Simulated(Formula(two, one, per_batch), noise)
    outcome = search(machine, Formula(two * error, one * error * skew, per_batch * error)).maximise()
    check(outcome, machine)
    best = true_best(machine.truth)
    assert outcome.winner is not None
    assert outcome.winner.rate is not None
    assert outcome.winner.rate >= 0.82 * best
    beaten = [each.verified.rate or 0.0 for each in outcome.baselines if each.verified and each.setting in SETTINGS]
    assert outcome.winner.rate >= max(beaten, default=0.0), "never worse than a baseline that may be chosen"


@settings(max_examples=100, deadline=None)
@given(budget=st.floats(60, 900), error=st.floats(0.7, 1.4))
def test_the_budget_holds(budget: float, error: float) -> None:
    machine = Simulated(Formula())
    outcome = search(machine, Formula(3 * error, 5 * error), budget).maximise()
    check(outcome, machine)
    # A setting under way is ended by its first window, and the winner's last two windows are never left out
    assert machine.now <= budget + 3 * (30 + 2 + SWITCH_S) + 10
    if outcome.winner is None:
        assert budget < 300


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 25), maximum=st.booleans())
def test_an_interrupted_search_goes_on_where_it_was(at: int, maximum: bool) -> None:
    def run(each: Search) -> Outcome:
        return each.maximise() if maximum else each.satisfy(120.0)

    whole = Simulated(Formula(), noise=0.05)
    expected = run(search(whole, Formula(2.5, 5)))
    points: list[Point] = []
    first = Simulated(Formula(), noise=0.05, interrupt_at=at)
    try:
        run(search(first, Formula(2.5, 5), points=points))
    except KeyboardInterrupt:
        assert len(points) == at
    second = Simulated(Formula(), noise=0.05)
    assert run(search(second, Formula(2.5, 5), points=points)) == expected
    assert first.asked + second.asked == whole.asked, "nothing is measured twice, and nothing left out"


def test_windows_that_were_shorter_are_measured_again() -> None:
    machine = Simulated(Formula())
    old = machine.measure(SETTINGS[0], Kind.SEARCH, 100.0).model_copy(update={"seconds": 5.0})
    ledger = Ledger(machine, Budget(100, lambda: machine.now), [old])
    assert ledger.ask(SETTINGS[0], Kind.SEARCH, 100.0) is not old
    assert ledger.ask(SETTINGS[0], Kind.SEARCH, 100.0) is ledger.points[-1]


def test_a_setting_that_cannot_be_served_is_passed_over() -> None:
    right = search(Simulated(Formula()), Formula()).maximise()
    assert right.winner is not None
    machine = Simulated(Formula(), broken=frozenset({right.winner.setting, DEFAULTS}))
    outcome = search(machine, Formula()).maximise()
    check(outcome, machine)
    assert outcome.winner is not None
    assert outcome.winner.setting != right.winner.setting
    assert outcome.baselines[0].verified is None


def test_a_setting_that_passes_short_windows_only_is_not_reported() -> None:
    class Short(Simulated):
        def measure(self, setting: Setting, kind: Kind, rate: float | None) -> Point:
            point = super().measure(setting, kind, rate)
            return point.model_copy(update={"met": False, "margin": -0.1}) if kind == Kind.FINAL else point

    for run in (Search.maximise, lambda each: each.satisfy(50.0)):
        ask: Callable[[Search], Outcome] = run
        outcome = ask(search(Short(Formula()), Formula()))
        assert outcome.winner is None
        assert all(each.verified is None for each in outcome.baselines)
        assert outcome.unknown is (not outcome.given), "lower rates may do; another load was not asked for"


@dataclass
class Strict(Simulated):
    """Full windows meet the objective up to a rate only, whatever short ones say; and no lower than it."""

    most: float = 0.0

    def measure(self, setting: Setting, kind: Kind, rate: float | None) -> Point:
        point = super().measure(setting, kind, rate)
        missed = kind == Kind.FINAL and (rate or 0.0) > self.most
        return point.model_copy(update={"met": False, "margin": -0.1}) if missed else point


def test_a_rate_far_below_the_short_windows_is_verified_too() -> None:
    best = true_best(Formula())
    machine = Strict(Formula(), most=0.5 * best)
    outcome = Search(Ledger(machine, Budget(3600, lambda: machine.now)), Formula(), SETTINGS).maximise()
    check(outcome, machine)
    assert outcome.winner is not None
    assert 0.3 * best < (outcome.winner.rate or 0.0) <= 0.5 * best


def test_that_time_ended_the_verification_is_said() -> None:
    machine = Strict(Formula())
    outcome = Search(Ledger(machine, Budget(150, lambda: machine.now)), Formula(), SETTINGS).maximise()
    assert outcome.winner is None
    assert outcome.unknown
    assert UNVERIFIED in outcome.ended
    machine = Strict(Formula())
    outcome = Search(Ledger(machine, Budget(70, lambda: machine.now)), Formula(), SETTINGS).satisfy(50.0)
    assert (outcome.winner, outcome.unknown, outcome.ended) == (None, True, SPENT)


def test_a_baseline_whose_search_was_cut_short_has_at_least_its_rate() -> None:
    """Half of the budget is the winner's; and a server that is faster than predicted takes more windows."""
    truth = Formula()
    for budget, cut_short in ((3600.0, False), (110.0, True)):
        machine = Simulated(truth)
        ledger = Ledger(machine, Budget(budget, lambda machine=machine: machine.now))  # type: ignore[misc]
        slower = Formula(two=6, one=9, per_batch=16)
        outcome = Search(ledger, slower, SETTINGS, {"tutorial": TUTORIAL}).maximise()
        (tutorial,) = outcome.baselines
        assert tutorial.verified is not None
        assert tutorial.at_least is cut_short
        assert ((tutorial.verified.rate or 0.0) < 0.9 * truth.rate(TUTORIAL)) is cut_short


def test_windows_stopped_before_their_first_answer_are_told_too() -> None:
    class Silent(Simulated):
        def measure(self, setting: Setting, kind: Kind, rate: float | None) -> Point:
            return super().measure(setting, kind, rate).model_copy(update={"met": False, "margin": None})

    for ask in (Search.maximise, lambda each: each.satisfy(50.0)):
        outcome = ask(search(Silent(Formula()), Formula()))  # type: ignore[operator]
        assert outcome.winner is None
        assert outcome.closest is not None


def test_no_baseline_is_measured_when_no_time_is_left() -> None:
    machine = Simulated(Formula())
    outcome = search(machine, Formula(), budget=20).maximise()
    assert [each.missed for each in outcome.baselines] == [NO_TIME, NO_TIME]
    assert {setting for setting, *_ in machine.asked}.isdisjoint(BASELINES.values())
    check(outcome, machine)


def test_what_no_setting_can_meet_is_said() -> None:
    impossible = Formula(bound=5)
    machine = Simulated(impossible)
    outcome = search(machine, impossible).maximise()
    assert outcome.winner is None
    assert outcome.closest is not None
    assert any(kind == Kind.QUIET for _, kind, _ in machine.asked), "whether the load is at fault"
    assert machine.now < 1200


# A given rate


def test_a_rate_gets_the_cheapest_setting_that_meets_it() -> None:
    cheap = Space(crews=((1, 1), (1, 2), (2, 1)), batch_sizes=(1, 8, 32), delays=(1, 20))
    truth = Formula()
    most = max(truth.rate(each) for each in cheap.settings() if each.cores == 1)
    for rate, cores in ((0.6 * most, 1), (1.25 * most, 2)):
        machine = Simulated(truth)
        ledger = Ledger(machine, Budget(3600, lambda machine=machine: machine.now))  # type: ignore[misc]
        outcome = Search(ledger, Formula(), list(cheap.settings()), BASELINES).satisfy(rate)
        assert outcome.winner is not None
        assert outcome.winner.setting.cores == cores
        assert outcome.winner.rate == pytest.approx(rate, rel=0.01)
        assert outcome.winner.point.kind == Kind.FINAL
        # Of its cost, about the largest margin there is
        margins = [truth.margin(each, rate) for each in cheap.settings() if each.cores == cores]
        assert truth.margin(outcome.winner.setting, rate) >= max(margins) - 0.15


@settings(max_examples=100, deadline=None)
@given(rate=st.floats(20, 900), error=st.floats(0.7, 1.4), noise=st.floats(0, 0.1))
def test_a_rate_is_met_by_what_is_reported(rate: float, error: float, noise: float) -> None:
    machine = Simulated(Formula(), noise)
    outcome = search(machine, Formula(3 * error, 5 * error)).satisfy(rate)
    check(outcome, machine, asked_for=rate)
    best = true_best(machine.truth)
    if rate < 0.6 * best:
        assert outcome.winner is not None
    if rate > 1.5 * best:
        assert outcome.winner is None
        assert outcome.closest is not None


def test_challengers_must_gain() -> None:
    machine = Simulated(Formula())
    outcome = search(machine, Formula()).maximise()
    assert outcome.winner is not None
    tutorial = outcome.baselines[1].verified
    assert tutorial is not None
    challenged = [
        rate for setting, kind, rate in machine.asked if setting not in BASELINES.values() and kind == "search"
    ]
    assert challenged[0] == pytest.approx((tutorial.rate or 0.0) * GAIN, rel=0.01)
