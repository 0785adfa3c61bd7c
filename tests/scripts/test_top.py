"""`batchserve top` against a server that answers as TorchServe does."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from scripts.__main__ import app
from tests.fake_server import Reply, refusal, serve

RUNNER = CliRunner()
DESCRIBED = {
    "modelName": "m",
    "modelVersion": "1.0",
    "workers": [{"id": "9000", "status": "READY", "pid": 7, "memoryUsage": 1, "gpu": False}],
    "jobQueueStatus": {"remainingCapacity": 90, "pendingRequests": 10},
}
COUNTER = '# TYPE ts_inference_requests_total counter\nts_inference_requests_total{{model_name="m",}} {}\n'


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither a serving.yaml nor a server is."""
    monkeypatch.chdir(tmp_path)


def answer(path: str, page: Reply) -> Reply:
    """A TorchServe of one model, whose metrics are `page`."""
    if path == "/metrics":
        return page
    if path.startswith("/models?"):
        return 200, json.dumps({"models": [{"modelName": "m", "modelUrl": "m.mar"}]}).encode()
    return 200, json.dumps([DESCRIBED]).encode()


def run(url: str, *words: str) -> str:
    result = RUNNER.invoke(app, ["top", "--interval", "0.5", "--management", url, *words])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def _two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The live view is ended at its third pause, and waits for none."""
    slept = itertools.count()

    def sleep(_: float) -> None:
        if next(slept) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("scripts.top.time", SimpleNamespace(sleep=sleep))  # not the clock of other threads


def test_once_in_json() -> None:
    counts = itertools.count(0, 100)

    def reply(_: str, path: str) -> Reply:
        return answer(path, (200, COUNTER.format(next(counts) if path == "/metrics" else "").encode()))

    with serve(reply) as url:
        told = json.loads(run(url, "--metrics", url, "--once", "--json"))
    assert told["server"] == url
    (model,) = told["models"]
    assert model["requests_per_s"] * told["seconds"] == pytest.approx(100)
    assert (model["pending"], model["room"], model["batching"]) == (10, 100, None)
    assert told["fault"] == ""


def test_once_for_a_person() -> None:
    with serve(lambda _, path: answer(path, (200, COUNTER.format(1).encode()))) as url:
        printed = run(url, "--metrics", url, "--once")
    assert "m 1.0" in printed
    assert "10/100" in printed


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        ((404, b"{}"), "no metrics at"),
        ((200, b"<html>"), "is not a Prometheus page"),
        ((200, b""), "set metrics_mode=prometheus"),
    ],
)
def test_without_metrics_workers_and_queue_are_left(page: Reply, fault: str) -> None:
    with serve(lambda _, path: answer(path, page)) as url:
        told = json.loads(run(url, "--metrics", url, "--once", "--json"))
        printed = run(url, "--metrics", url, "--once")
    assert fault in told["fault"]
    assert told["models"][0]["requests_per_s"] is None
    assert told["models"][0]["pending"] == 10
    assert fault in printed
    assert "10/100" in printed


def test_a_server_that_refuses_ends_it() -> None:
    with serve(lambda *_: refusal(400, "InvalidKeyException", "Token Authorization failed.")) as url:
        result = RUNNER.invoke(app, ["top", "--once", "--management", url])
    assert result.exit_code == 1
    assert "missing or wrong token" in str(result.exception)


@pytest.mark.usefixtures("_two_looks")
def test_one_that_stops_answering_is_shown_as_it_was() -> None:
    looks = 0

    def reply(_: str, path: str) -> Reply:
        nonlocal looks
        looks += path.startswith("/models?")
        return answer(path, (200, COUNTER.format(1).encode())) if looks < 3 else (500, b"{}")

    with serve(reply) as url:
        first, second = map(json.loads, run(url, "--metrics", url, "--json").splitlines())
    assert first["fault"] == ""
    assert "not TorchServe's management API" in second["fault"]
    assert second["models"] == first["models"]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.usefixtures("_two_looks")
def test_a_scrape_that_failed_does_not_make_rates_of_totals(failing: int) -> None:
    pages = iter([1_000_000, 1_000_100])
    looks = itertools.count()

    def reply(_: str, path: str) -> Reply:
        if path == "/metrics" and next(looks) == failing:
            return answer(path, (500, b"{}"))
        return answer(path, (200, COUNTER.format(next(pages) if path == "/metrics" else 0).encode()))

    with serve(reply) as url:
        first, second = map(json.loads, run(url, "--metrics", url, "--json").splitlines())
    assert "no metrics at" in first["fault"]
    assert (first["models"][0]["requests_per_s"], first["answers_per_s"]) == (None, {})
    assert second["fault"] == ""
    assert second["models"][0]["requests_per_s"] * second["seconds"] == pytest.approx(100)
