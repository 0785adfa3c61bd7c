"""The order in which workers are held and killed, on a pretended server; the real one is in tests/e2e."""

from collections.abc import Mapping
from typing import Any

import pytest

from handlers.parking import PARK_HEADER
from scripts.lib import scaling
from scripts.lib.errors import UserError
from scripts.lib.management import ApiError, ManagementClient, Model
from scripts.lib.scaling import Scaler


class Pretended(ManagementClient):
    """A server whose describe requests go round its free workers; `events` tells what was asked of it."""

    def __init__(self, workers: int, parkable: bool = True, pending: int = 0) -> None:
        super().__init__()
        state = {"pids": [100 + i for i in range(workers)], "next": 0, "held": set(), "ready": True,
                 "parkable": parkable, "pending": pending, "full": 0, "events": [], "minimum": workers}  # fmt: skip
        object.__setattr__(self, "state", state)

    state: dict[str, Any]

    def describe(self, name: str, version: str | None = None) -> Model:
        state = self.state
        workers = [
            {"id": str(9000 + i), "status": "READY" if state["ready"] else "UNLOADING", "pid": pid}
            for i, pid in enumerate(state["pids"])
        ]
        return Model.model_validate(
            {"modelName": name, "modelVersion": "1.0", "minWorkers": state["minimum"], "maxWorkers": state["minimum"],
             "workers": workers, "jobQueueStatus": {"remainingCapacity": 9, "pendingRequests": state["pending"]}}
        )  # fmt: skip

    def ask(self, name: str, version: str, headers: Mapping[str, str] | None = None, timeout: float = 60.0) -> Model:
        state = self.state
        if state["full"]:
            state["full"] -= 1
            raise ApiError("full", status=503, kind="ServiceUnavailableException")
        model = self.describe(name)
        if not state["parkable"]:
            return model
        free = [pid for pid in state["pids"] if pid not in state["held"]]
        pid = free[state["next"] % len(free)]
        state["next"] += 1
        parked = str(pid) in (headers or {}).get(PARK_HEADER, "").split(",")
        if parked:
            state["held"].add(pid)
            state["events"].append(("held", pid))
        return model.model_copy(update={"customized_metadata": {"worker": {"pid": pid, "parked": parked}}})

    def scale(self, name: str, version: str, workers: int, timeout: float = 120.0) -> str:
        state = self.state
        state["events"].append(("scale", workers))
        state["minimum"] = workers
        state["pids"] = (state["pids"] + [200 + i for i in range(workers)])[:workers]
        return ""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "TICK", 0.001)
    monkeypatch.setattr(scaling, "QUIET", 0.02)
    monkeypatch.setattr(Scaler.wait_quiet, "__defaults__", (0.02,))


def test_the_last_workers_are_held_before_the_kill() -> None:
    server = Pretended(4)
    assert Scaler(server, "m", "1.0", 5).to(2).ready == 2
    assert sorted(server.state["events"][:2]) == [("held", 102), ("held", 103)]
    assert server.state["events"][2:] == [("scale", 2)]


def test_none_is_held_to_scale_up_or_to_stay() -> None:
    server = Pretended(2)
    Scaler(server, "m", "1.0", 5).to(2)
    assert server.state["events"] == []
    Scaler(server, "m", "1.0", 5).to(3)
    assert server.state["events"] == [("scale", 3)]


def test_now_holds_none() -> None:
    server = Pretended(3)
    Scaler(server, "m", "1.0", 5).to(1, now=True)
    assert server.state["events"] == [("scale", 1)]


def test_a_full_queue_is_waited_for() -> None:
    server = Pretended(3)
    server.state["full"] = 9
    Scaler(server, "m", "1.0", 5).to(2)
    assert server.state["events"] == [("held", 102), ("scale", 2)]


def test_a_worker_whose_time_has_run_out_is_held_again(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Pretended(3)
    scaler = Scaler(server, "m", "1.0", 5)
    scaler._parked[102] = 0.0
    scaler.to(2)
    assert server.state["events"] == [("held", 102), ("scale", 2)]


def test_a_handler_that_cannot_be_held_waits_for_quiet_and_says_so() -> None:
    server, said = Pretended(2, parkable=False), []
    Scaler(server, "m", "1.0", 5, said.append).to(1)
    assert server.state["events"] == [("scale", 1)]
    assert "may fail" in said[0]


@pytest.mark.parametrize("counted", [True, False])
def test_without_quiet_nothing_is_killed(counted: bool) -> None:
    server = Pretended(2, parkable=False, pending=0 if counted else 3)
    ticks = iter(range(10**6))
    scaler = Scaler(server, "m", "1.0", 0.1, arrivals=(lambda: float(next(ticks))) if counted else lambda: None)
    with pytest.raises(UserError, match="keep coming") as caught:
        scaler.to(1)
    assert "--now" in caught.value.hint
    assert server.state["events"] == []


def test_workers_that_do_not_get_ready() -> None:
    server = Pretended(1)
    server.state["ready"] = False
    with pytest.raises(UserError, match=r"0 of 2 workers of m are ready after 0\.1 s"):
        Scaler(server, "m", "1.0", 0.1).to(2)


def test_a_worker_that_dies_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Pretended(1)
    server.state["ready"] = False
    original = Pretended.describe

    def reborn(self: Pretended, name: str, version: str | None = None) -> Model:
        self.state["pids"] = [pid + 1 for pid in self.state["pids"]]
        return original(self, name, version)

    monkeypatch.setattr(Pretended, "describe", reborn)
    with pytest.raises(UserError, match="dies whenever it starts"):
        Scaler(server, "m", "1.0", 5).to(1)


def test_continuous_batching_is_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Pretended(1)
    original = Pretended.describe
    monkeypatch.setattr(
        Pretended, "describe", lambda *args: original(*args).model_copy(update={"continuous_batching": True})
    )
    assert not Scaler(server, "m", "1.0", 5).can_park(1)
