from pathlib import Path
from typing import Any

import pytest

from scripts.lib.errors import UserError
from scripts.lib.tune_state import Costs, Finished, TuneState
from scripts.lib.tuning import Kind, Outcome, Point, Setting, Verified
from tests.scripts.lib.profiles import profile

ABOUT: dict[str, Any] = {"archive": "abc", "objective": "p95<=200ms", "machine": ["a CPU", 2, 0]}
SETTING = Setting(workers=2, threads=1, batch_size=8, max_batch_delay=5)
POINT = Point(setting=SETTING, kind=Kind.FINAL, rate=81.3, seconds=30.0, met=True, margin=0.125, p95_ms=175.1)


def test_what_was_measured_is_found_again(tmp_path: Path) -> None:
    state = TuneState.open(tmp_path / "a" / "b", "m", ABOUT)
    state.points.append(POINT)
    state.costs = [Costs(threads=1, dtype=None, profile=profile())]
    verified = Verified(setting=SETTING, rate=81.3, point=POINT)
    state.finished = Finished(budget_s=600, space="s", outcome=Outcome(winner=verified, ended="why"))
    state.save()
    again = TuneState.open(tmp_path / "a" / "b", "m", dict(reversed(ABOUT.items())))
    assert (again.points, again.costs, again.finished) == (state.points, state.costs, state.finished)
    assert len(list(state.path.parent.iterdir())) == 1


@pytest.mark.parametrize(
    "other",
    [{"archive": "abd"}, {"objective": "p95<=201ms"}, {"machine": ["a CPU", 4, 0]}, {"machine": ["another", 2, 0]}],
)
def test_what_was_measured_otherwise_is_not(tmp_path: Path, other: dict[str, Any]) -> None:
    state = TuneState.open(tmp_path, "m", ABOUT)
    state.points.append(POINT)
    state.save()
    assert TuneState.open(tmp_path, "m", ABOUT | other).points == []
    assert TuneState.open(tmp_path, "m", ABOUT, fresh=True).points == []
    assert TuneState.open(tmp_path, "m", ABOUT).points == [POINT]


@pytest.mark.parametrize("content", ["", "{", '{"format": 2}', "[]", '{"format": 1, "key": "other"}'])
def test_a_damaged_file_is_measured_anew(tmp_path: Path, content: str) -> None:
    state = TuneState.open(tmp_path, "m", ABOUT)
    state.path.write_text(content)
    again = TuneState.open(tmp_path, "m", ABOUT)
    assert (again.points, again.finished) == ([], None)
    again.save()
    assert TuneState.open(tmp_path, "m", ABOUT).path == state.path


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="can't be made"):
        TuneState.open(tmp_path / "file" / "below", "m", ABOUT)


def test_what_failed_is_measured_again(tmp_path: Path) -> None:
    state = TuneState.open(tmp_path, "m", ABOUT)
    state.points += [POINT.model_copy(update={"met": False, "failure": "no memory"}), POINT]
    state.save()
    assert TuneState.open(tmp_path, "m", ABOUT).points == [POINT]
