"""Which settings `batchserve tune` measures, at which rates, and when that is enough. No clock, no server of its own.

Every setting's highest rate is found the same way: short windows at rates that close in on it, then a window of full
length at the rate found, a little lower as long as that misses. What is measured also corrects the prediction that
chose it: each group of settings (workers, threads, dtype) by its own factor.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

from scripts.lib.tuning import Baseline, Kind, Outcome, Point, Setting, Verified, rounded

STEP = 1.25  # up from a rate that was met, where none was missed yet
DOWN = (0.8, 0.65, 0.5)  # from rates that were missed, where none was met yet; the last one again and again
PRECISION = 1.08  # of the highest rate, in short windows
MOST_WINDOWS = 8  # short ones of one setting
GAIN = 1.03  # that a challenger must bring
UNKNOWN, KNOWN = 1.2, 1.08  # how much better than predicted a group without, and with, measurements may be
LOSSES = 4  # challengers in a row, after which no better one is expected
BACK_OFF = (0.95, 0.95, 0.95, 0.8, 0.7, 0.6)  # from full windows of one setting that missed, one after the other
FAR_OFF = 0.88  # at most, from one that missed by a lot
PRUNED = 1.6  # settings predicted worse than the best by this factor are not considered
FLOOR = 1 / 50  # of the first rate asked for, below which a setting is given up
BASELINES_SHARE = 0.5  # of the budget, at most
HOPELESS = -0.5  # a predicted margin that no error of the prediction makes up for
MOST_OF_GROUP = 5  # settings of a group that are measured at a given load
SPENT = "the budget was used up"
NO_TIME, UNVERIFIED = (f"not {done}: no time was left" for done in ("measured", "verified"))
SLACK = 0.05  # of the margin, by which a setting may do better than predicted


class Machine(Protocol):
    """Measures."""

    def seconds(self, kind: Kind, rate: float | None) -> float:
        """How long a window lasts."""
        ...

    def measure(self, setting: Setting, kind: Kind, rate: float | None) -> Point:
        """Measure a window; the setting is served first, where another one was."""
        ...


class Predicted(Protocol):
    """Predicts, as `forecast.Forecast` does."""

    def rate(self, setting: Setting, at_least: float = 0.0) -> float: ...
    def margin(self, setting: Setting, rate: float | None) -> float: ...
    def lone_ms(self, setting: Setting) -> float: ...


@dataclass
class Budget:
    """Seconds to spend.

    Args:
        seconds: from now.
        clock: tells the time.
    """

    seconds: float
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._end = self.clock() + self.seconds

    @property
    def left(self) -> float:
        """What is left, negative when it is overspent."""
        return self._end - self.clock()


@dataclass
class Ledger:
    """Everything measured: asked once, remembered, kept for a later run; and what a next window will take.

    Args:
        machine: measures.
        budget: of this run.
        points: measured by earlier runs.
        keep: called with each new point.
    """

    machine: Machine
    budget: Budget
    points: list[Point] = field(default_factory=list)
    keep: Callable[[Point], None] = lambda point: None
    _serving: Setting | None = None
    _switch_s: float = 15.0
    _around_s: float = 2.0

    def ask(self, setting: Setting, kind: Kind, rate: float | None) -> Point:
        """A window's result."""
        seconds = self.machine.seconds(kind, rate)
        for point in self.points:
            if (point.setting, point.kind, point.rate) == (setting, kind, rate) and point.seconds >= 0.99 * seconds:
                return point
        start = self.budget.clock()
        point = self.machine.measure(setting, kind, rate)
        self._learn(setting, point, self.budget.clock() - start - seconds)
        self.points.append(point)
        self.keep(point)
        return point

    def cost(self, setting: Setting, kind: Kind, rate: float | None) -> float:
        """Seconds that a window will take, the change to its setting included."""
        around = self._around_s if setting == self._serving else self._switch_s
        return around + self.machine.seconds(kind, rate)

    def _learn(self, setting: Setting, point: Point, more_s: float) -> None:
        changed, self._serving = setting != self._serving, setting
        if point.stopped or point.failure:  # says nothing of a whole window
            return
        if changed:
            self._switch_s = max(more_s, 0.5 * (self._switch_s + more_s))
        else:
            self._around_s = max(more_s, 0.5 * (self._around_s + more_s))


@dataclass
class Search:
    """A search over settings.

    Args:
        ledger: measures.
        forecast: predicts.
        settings: to choose from.
        baselines: settings to compare with, by name.
    """

    ledger: Ledger
    forecast: Predicted
    settings: Sequence[Setting]
    baselines: Mapping[str, Setting] = field(default_factory=dict)
    _factors: dict[tuple[int, int | None, str | None], float] = field(default_factory=dict)
    _measured: set[Setting] = field(default_factory=set)

    # The highest rate

    def maximise(self) -> Outcome:
        """The setting with the highest rate that meets the objective."""
        allowed = set(self.settings)
        spendable = (1 - BASELINES_SHARE) * self.ledger.budget.left
        baselines = tuple(self._baseline(name, each, spendable) for name, each in self.baselines.items())
        known = [each.verified for each in baselines if each.verified is not None and each.setting in allowed]
        best = max(known, key=lambda each: each.rate or 0.0, default=None)
        setting, rate = (best.setting, best.rate or 0.0) if best else (None, 0.0)
        setting, rate, ended = self._challenge(setting, rate)
        winner, unknown = best, setting is not None or ended == SPENT
        if setting is not None and (best is None or setting != best.setting):
            verified, why = self._verify(setting, rate)
            if verified is None:
                ended = f"{ended}; {setting} met the objective in short windows at {rate:g}/s: {why}"
            elif best is None or (verified.rate or 0.0) > (best.rate or 0.0):
                winner = verified
        return self._outcome(Outcome(winner=winner, baselines=baselines, ended=ended, unknown=unknown))

    def _baseline(self, name: str, setting: Setting, reserve: float) -> Baseline:
        guess = self._expected(setting)
        if self.ledger.budget.left < max(0.0, reserve) + self.ledger.cost(setting, Kind.SEARCH, guess):
            return Baseline(name=name, setting=setting, verified=None, missed=NO_TIME)
        rate, closed = self._highest(setting, guess, reserve=reserve)
        verified, why = self._verify(setting, rate, reserve) if rate else (None, "at no rate tried")
        at_least = verified is not None and verified.rate == rate and not closed
        return Baseline(name=name, setting=setting, verified=verified, missed=why, at_least=at_least)

    def _challenge(self, best: Setting | None, rate: float) -> tuple[Setting | None, float, str]:
        """Let settings compete with the best one so far; the best one then, its rate, and why it ended."""
        candidates = self._candidates()
        losses = 0
        while losses < LOSSES:
            setting = self._next(candidates, rate)
            if setting is None:
                return best, rate, "no other setting is expected to do better"
            above = rate * GAIN
            guess = max(self._expected(setting), above)
            reserve = self._reserve(setting, guess)
            if best is not None and self.ledger.budget.left < reserve + self.ledger.cost(setting, Kind.SEARCH, guess):
                return best, rate, SPENT
            found, _ = self._highest(setting, guess, above=above, reserve=reserve)
            if found:
                best, rate, losses = setting, found, 0
            else:
                losses += 1
            if best is None and self.ledger.budget.left < 0:
                return None, 0.0, SPENT
        return best, rate, f"{LOSSES} settings in a row did no better"

    def _candidates(self) -> dict[Setting, float]:
        """The settings that the prediction doesn't rule out, with their predicted rates; all of them where it rules
        out every one."""
        found: dict[Setting, float] = {}
        best = 0.0
        for setting in sorted(self.settings, key=lambda each: (each.max_batch_delay, -each.batch_size)):
            found[setting] = self.forecast.rate(setting, best / PRUNED)
            best = max(best, found[setting])
        if not best:
            quickest = min(self.settings, key=self.forecast.lone_ms)
            return {quickest: self._rate_alone(quickest)}
        return {setting: rate for setting, rate in found.items() if rate >= best / PRUNED}

    def _next(self, candidates: Mapping[Setting, float], rate: float) -> Setting | None:
        """The unmeasured candidate with the best prospects, or None where none is expected to beat a rate.

        Of candidates that promise the same, to 2 %, the one that costs a quiet hour least, then the smallest.
        """

        def prospects(setting: Setting) -> float:
            doubt = KNOWN if setting.group in self._factors else UNKNOWN
            return candidates[setting] * self._factor(setting) * doubt

        left = [each for each in candidates if each not in self._measured and prospects(each) >= rate * GAIN]
        return min(
            left,
            key=lambda each: (
                -math.floor(math.log(prospects(each)) / math.log(1.02)),
                each.max_batch_delay,
                each.cores,
                each.workers,
                each.batch_size,
            ),
            default=None,
        )

    def _expected(self, setting: Setting) -> float:
        """The predicted rate, corrected by what was measured."""
        return self.forecast.rate(setting) * self._factor(setting) or self._rate_alone(setting)

    def _rate_alone(self, setting: Setting) -> float:
        """A rate to begin with where none is predicted to meet the objective: half of what lone clients would make."""
        return 0.5 * setting.workers * 1e3 / max(self.forecast.lone_ms(setting), 1e-3)

    def _factor(self, setting: Setting) -> float:
        """Measured ÷ predicted: the group's, or the mean of the others'."""
        if setting.group in self._factors or not self._factors:
            return self._factors.get(setting.group, 1.0)
        return math.exp(sum(map(math.log, self._factors.values())) / len(self._factors))

    def _highest(
        self, setting: Setting, guess: float, *, above: float = 0.0, reserve: float = 0.0
    ) -> tuple[float, bool]:
        """The highest rate that met the objective in short windows, 0 where none did; and whether it is known to be it.

        Args:
            setting: to measure.
            guess: where it is expected.
            above: a rate of interest only beyond this: one that misses there is given up.
            reserve: seconds of the budget that must be left.
        """
        self._measured.add(setting)
        low, high, rate = 0.0, math.inf, above or guess
        for number in range(MOST_WINDOWS):
            if number and self.ledger.budget.left < reserve + self.ledger.cost(setting, Kind.SEARCH, rate):
                break
            rate = rounded(rate)
            point = self.ledger.ask(setting, Kind.SEARCH, rate)
            if point.failure:
                return 0.0, False
            if point.met:
                low = rate
                further = guess if guess > rate * PRECISION else rate * STEP
                rate = further if high == math.inf else math.sqrt(low * high)
            elif above and not low:
                self._correct(setting, rate, ceiling=True)
                return 0.0, False
            else:
                high = rate
                rate = math.sqrt(low * high) if low else rate * DOWN[min(number, len(DOWN) - 1)]
            if high / max(low, 1e-9) <= PRECISION or rate < FLOOR * guess:
                break
        if low:
            self._correct(setting, low)
        return low, high <= low * PRECISION

    def _correct(self, setting: Setting, rate: float, *, ceiling: bool = False) -> None:
        """Learn the factor of a setting's group from its rate, or from one that it did not reach."""
        predicted = self.forecast.rate(setting)
        if predicted:
            factor = rate / predicted
            known = self._factors.get(setting.group)
            if not ceiling or known is None or known > factor:
                self._factors[setting.group] = factor

    def _verify(self, setting: Setting, rate: float, reserve: float = 0.0) -> tuple[Verified | None, str]:
        """The first rate, from this one down, that meets the objective in a window of full length; else why none is."""
        next_rate = rate
        for number, step in enumerate(BACK_OFF):
            rate = rounded(next_rate)
            if number and self.ledger.budget.left < reserve + self.ledger.cost(setting, Kind.FINAL, rate):
                return None, UNVERIFIED
            point = self.ledger.ask(setting, Kind.FINAL, rate)
            if point.met:
                return Verified(setting=setting, rate=rate, point=point), ""
            next_rate = rate * (min(step, FAR_OFF) if point.stopped else step)
        return None, f"missed in windows of full length, down to {rate:g}/s"

    # A load that is given

    def satisfy(self, rate: float | None) -> Outcome:
        """The setting of the least cost that meets the objective at a rate, or at the trace where it is None; among
        those of one cost the one with the largest margin."""
        predicted = {setting: self.forecast.margin(setting, rate) for setting in self.settings}
        winner, spent, ended = None, False, "no setting met the objective"
        for number, group in enumerate(self._groups(predicted)):
            if spent or (number and self._spent(rate)):
                spent = True
                break
            winner, spent = self._of_group(group, rate, predicted)
            if winner is not None:
                ended = "the cheapest setting that meets the objective was found"
                break
        baselines = []
        for name, setting in self.baselines.items():
            if self.ledger.budget.left < self.ledger.cost(setting, Kind.FINAL, rate):
                baselines.append(Baseline(name=name, setting=setting, verified=None, missed=NO_TIME))
                continue
            point = self.ledger.ask(setting, Kind.FINAL, rate)
            verified = Verified(setting=setting, rate=point.rate, point=point) if point.met else None
            why = "" if verified else "not at this load"
            baselines.append(Baseline(name=name, setting=setting, verified=verified, missed=why))
        ended = SPENT if spent else ended
        return self._outcome(Outcome(winner=winner, baselines=tuple(baselines), ended=ended, given=True, unknown=spent))

    def _groups(self, predicted: Mapping[Setting, float]) -> Iterator[list[Setting]]:
        """Settings of one cost, the cheapest first; those without hope left out, but never all of them."""
        ordered = sorted(predicted, key=lambda each: (each.cores, each.workers))
        groups = [list(each) for _, each in groupby(ordered, key=lambda each: (each.cores, each.workers))]
        hopeful = [group for group in groups if max(predicted[each] for each in group) > HOPELESS]
        yield from hopeful or [max(groups, key=lambda group: max(predicted[each] for each in group))]

    def _of_group(
        self, group: Iterable[Setting], rate: float | None, predicted: Mapping[Setting, float]
    ) -> tuple[Verified | None, bool]:
        """The verified setting of the largest margin in a group, None without one; and whether the time was up."""
        ranked = sorted(group, key=lambda each: (-round(predicted[each], 2), each.max_batch_delay, each.batch_size))
        passed: list[Point] = []
        offset, spent = 0.0, False
        for setting in ranked[:MOST_OF_GROUP]:
            best = max((point.margin or 0.0 for point in passed), default=-math.inf)
            if passed and (predicted[setting] + offset + SLACK < best or self._spent(rate)):
                break
            point = self.ledger.ask(setting, Kind.SEARCH, rate)
            if point.met:
                passed.append(point)
                offset = (point.margin or 0.0) - predicted[setting]
            elif spent := self._spent(rate):
                break
        for point in sorted(passed, key=lambda point: -(point.margin or 0.0)):
            final = self.ledger.ask(point.setting, Kind.FINAL, rate)
            if final.met:
                return Verified(setting=final.setting, rate=final.rate, point=final), False
            if spent := self._spent(rate):
                break
        return None, spent

    def _spent(self, rate: float | None) -> bool:
        """Whether the budget is too short for one more short window and one of full length."""
        any_setting = self.settings[0]
        needed = self.ledger.cost(any_setting, Kind.SEARCH, rate) + self.ledger.cost(any_setting, Kind.FINAL, rate)
        return self.ledger.budget.left < needed

    # Both

    def _reserve(self, setting: Setting, rate: float) -> float:
        """Seconds to keep for the winner: it is served again, verified, perhaps twice, and seen with one client."""
        full = self.ledger.machine.seconds(Kind.FINAL, rate)
        return self.ledger.cost(setting, Kind.FINAL, rate) + full + self.ledger.machine.seconds(Kind.QUIET, None)

    def _outcome(self, found: Outcome) -> Outcome:
        """With what a lone client meets at the winner, or without one with the window that came nearest."""
        if found.winner is not None:
            quiet = self.ledger.ask(found.winner.setting, Kind.QUIET, None)
            return found.model_copy(update={"quiet": quiet, "unknown": False})
        # One that was stopped has no margin: of those the one at the lowest rate
        loaded = [each for each in self.ledger.points if each.kind != Kind.QUIET and not each.failure]
        closest = max(
            loaded,
            key=lambda each: (-math.inf if each.margin is None else each.margin, -(each.rate or 0.0)),
            default=None,
        )
        if closest is not None and self.ledger.budget.left > 0:
            # Whether the load is at fault, or the objective: what a lone client meets
            self.ledger.ask(closest.setting, Kind.QUIET, None)
        return found.model_copy(update={"closest": closest})
