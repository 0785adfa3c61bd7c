"""Trials without a server: what a setting needs of the archive, how long windows are, what becomes of samples."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.lib import trials
from scripts.lib.archive import Archive
from scripts.lib.errors import UserError
from scripts.lib.load import LoadResult, Sample
from scripts.lib.objective import Objective
from scripts.lib.sent import Sent
from scripts.lib.server import StartError
from scripts.lib.trials import LEAST_REQUESTS, Trials, Windows, _point, changes_for, least_requests
from scripts.lib.tuning import Kind, Setting
from scripts.lib.workloads import Body

OBJECTIVE = Objective.parse("p95<=100ms")
SETTING = Setting(workers=2, threads=1, batch_size=8, max_batch_delay=5)


def about(path: Path = Path("m.mar"), **handler: Any) -> Archive:
    manifest = {"model": {"modelName": "m", "modelVersion": "1.0", "handler": "handlers.embedding"}}
    return Archive(path, manifest, {"handler": {"task": "embedding", **handler}}, {}, {})


def made(tmp_path: Path, **changes: Any) -> Trials:
    sent = Sent([Body(b"{}", 1, 1)])
    windows = Windows(10.0, 30.0, 5.0)
    return Trials(about(tmp_path / "m.mar"), sent, OBJECTIVE, windows, tmp_path, 2, 0, 100, lambda _: nullcontext())


@pytest.mark.parametrize(
    ("handler", "threads", "dtype", "changes"),
    [
        ({}, 1, None, {}),  # 2 cores ÷ 2 workers
        ({}, 2, None, {"threads": 2}),
        ({}, None, None, {}),
        ({"threads": 2}, 2, None, {}),
        ({"threads": 2}, 1, None, {"threads": 1}),
        ({"dtype": "auto"}, 1, "bfloat16", {"dtype": "bfloat16"}),
        ({"dtype": "bfloat16"}, 2, "bfloat16", {"threads": 2}),
    ],
)
def test_the_archive_changes_only_where_it_must(
    handler: dict[str, Any], threads: int | None, dtype: str | None, changes: dict[str, Any]
) -> None:
    setting = SETTING.model_copy(update={"threads": threads, "dtype": dtype})
    assert changes_for(about(**handler), setting, 2) == changes


def test_beside_other_models_threads_are_fixed() -> None:
    """Their workers are counted too where cores are divided."""
    assert changes_for(about(), SETTING, 2, alone=False) == {"threads": 1}
    assert changes_for(about(threads=1), SETTING, 2, alone=False) == {}


@pytest.mark.parametrize(
    ("objective", "search", "final"),
    [("p95<=1s", 60, 200), ("p50<=1s", 60, 200), ("max<=1s,mean<=1s", 60, 200), ("p95<=1s,p99<=2s", 300, 1000)],
)
def test_a_window_needs_requests_for_the_strictest_percentile(objective: str, search: int, final: int) -> None:
    found = Objective.parse(objective)
    assert (least_requests(found, Kind.SEARCH), least_requests(found, Kind.FINAL)) == (search, final)


@pytest.mark.parametrize(("left", "patience"), [(1000.0, 300.0), (100.0, 100.0), (-5.0, 60.0)])
def test_a_start_takes_no_more_than_the_budget(tmp_path: Path, left: float, patience: float) -> None:
    tried = made(tmp_path)
    tried.left = lambda: left
    assert tried._patience == patience


@given(st.floats(10, 7200), st.floats(0.01, 1000), st.sampled_from([Kind.SEARCH, Kind.FINAL]))
def test_windows_hold_enough_requests_or_are_as_long_as_they_may(budget: float, rate: float, kind: Kind) -> None:
    windows = Windows.within(budget)
    tried = made(Path())
    tried.windows = windows
    usual = windows.search if kind == Kind.SEARCH else windows.final
    seconds = tried.seconds(kind, rate)
    assert usual <= seconds <= trials.LONGEST * usual
    assert seconds * rate >= LEAST_REQUESTS[kind] * 0.999 or seconds == trials.LONGEST * usual
    assert windows.search <= windows.final <= max(2.0, budget / 20)
    assert windows.search <= max(1.0, budget / 60)


def result(*samples: tuple[float, int], unanswered: int = 0) -> LoadResult:
    found = tuple(Sample(0.0, latency, status, 1, 1, 1) for latency, status in samples)
    return LoadResult(found, 1, 2.0, 0.3, 0.3, unanswered=unanswered)


def test_samples_become_a_point() -> None:
    good = _point(SETTING, Kind.FINAL, 10.0, 2.0, result(*[(0.05, 200)] * 20), None, False, OBJECTIVE)
    assert good.met
    assert (good.margin, good.judged_ms, good.per_s, good.errors) == (pytest.approx(0.5), pytest.approx(50), 10.0, 0)
    shed = [(0.05, 200)] * 18 + [(0.001, 503)] * 2
    bad = _point(SETTING, Kind.FINAL, 10.0, 2.0, result(*shed), None, False, OBJECTIVE)
    assert not bad.met, "what was shed never came"
    assert (bad.margin, bad.shed, bad.judged_ms) == (trials.WORST, 2, pytest.approx(50))
    stopped = _point(SETTING, Kind.SEARCH, 10.0, 2.0, result((0.05, 200), unanswered=30), None, True, OBJECTIVE)
    assert not stopped.met
    assert (stopped.requests, stopped.margin) == (31, None), "those in time were the first, not the typical ones"
    nothing = _point(SETTING, Kind.SEARCH, 10.0, 2.0, result(unanswered=3), None, True, OBJECTIVE)
    assert (nothing.met, nothing.margin, nothing.judged_ms) == (False, None, None)


class Server:
    """In place of a TorchServe: does not start."""

    def __init__(self, error: UserError) -> None:
        self.error, self.stopped, self.running = error, 0, False

    def start(self) -> None:
        raise self.error

    def stop(self, graceful: bool = True) -> None:
        self.stopped += 1


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, error: UserError) -> Iterator[list[Server]]:
    servers: list[Server] = []

    def make(*_: object, **__: object) -> Server:
        servers.append(Server(error))
        return servers[-1]

    monkeypatch.setattr(trials, "make_server", make)
    monkeypatch.setattr(trials.archive, "read", lambda path: about(path))
    yield servers


def test_a_setting_that_does_not_start_is_a_point_and_its_server_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.mar").write_bytes(b"m")
    with failing(monkeypatch, StartError("a worker died: no memory")) as servers, made(tmp_path) as tried:
        for number in (1, 2):
            point = tried.measure(SETTING, Kind.SEARCH, 10.0)
            assert (point.met, point.failure) == (False, "a worker died: no memory")
            assert [server.stopped for server in servers] == [1] * number


def test_where_nothing_can_start_at_all_the_reason_is_the_command_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.mar").write_bytes(b"m")
    with failing(monkeypatch, UserError("there is no Java")) as servers, made(tmp_path) as tried:
        with pytest.raises(UserError, match="no Java"):
            tried.measure(SETTING, Kind.SEARCH, 10.0)
        assert servers[0].stopped == 1
