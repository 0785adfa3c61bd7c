"""What the verbs check before they call a server, and how they show what it says; the real one is in tests/e2e."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from handlers import threads
from scripts import workers
from scripts.lib.errors import UserError
from tests.e2e.archives import write_archive
from tests.fake_server import Reply, serve

NAME = "a-model-with-a-rather-long-name"


def described(**changes: Any) -> dict[str, Any]:
    rows = [{"id": "9000", "status": "READY", "pid": 1, "startTime": "2026"}]
    return {"modelName": NAME, "modelVersion": "1.0", "modelUrl": "m.mar", "minWorkers": 1, "maxWorkers": 1,
            "batchSize": 32, "maxBatchDelay": 2, "loadedAtStartup": False, "workers": rows,
            "jobQueueStatus": {"remainingCapacity": 1000, "pendingRequests": 0}, **changes}  # fmt: skip


class Server:
    """Answers as a TorchServe with one model; `calls` holds what changes it."""

    def __init__(self, **changes: Any) -> None:
        self.model = described(**changes)
        self.calls: list[tuple[str, str, dict[str, str]]] = []

    def __call__(self, method: str, path: str) -> Reply:
        parts = urlsplit(path)
        if method != "GET":
            self.calls.append((method, parts.path, {key: value[0] for key, value in parse_qs(parts.query).items()}))
            return 200, b'{"status": "done"}'
        if parts.path == "/models":
            return 200, json.dumps({"models": [self.model]}).encode()
        return 200, json.dumps([self.model]).encode()


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model store and serving.yaml."""
    monkeypatch.chdir(tmp_path)
    store = tmp_path / "model_store"
    store.mkdir()
    write_archive(store / "m.mar", name=NAME)
    write_archive(store / "fixed.mar", name="fixed", config="minWorkers: 4\nmaxWorkers: 4\nbatchSize: 9\n")
    entry = {"archive": "m.mar", "version": "1.0", "workers": 1, "batch_size": 16, "max_batch_delay": 5}
    path = tmp_path / "serving.yaml"
    path.write_text(json.dumps({"models": {NAME: entry}}))
    return path


def test_the_table_is_whole_on_a_narrow_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with serve(Server()) as url:
        workers.status(management=url)
    said = capsys.readouterr()
    for part in (NAME, "1.0", "1/1 ready (REST)", "32 (REST)", "2 ms (REST)", "0/1000 (unknown)"):
        assert part in said.out
    assert said.err == ""


def test_a_server_without_models(capsys: pytest.CaptureFixture[str]) -> None:
    with serve(lambda *_: (200, b'{"models": []}')) as url:
        workers.status(management=url)
    assert "runs no models" in capsys.readouterr().out


def test_registration_is_explicit_and_takes_what_is_declared(
    deployment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(batchSize=16, maxBatchDelay=7)
    with serve(server) as url:
        workers.register(Path("model_store/m.mar"), max_batch_delay=7, management=url, serving=deployment)
    assert server.calls == [
        ("POST", "/models", {"url": "m.mar", "model_name": NAME, "initial_workers": "1", "batch_size": "16",
                             "max_batch_delay": "7", "synchronous": "true"})
    ]  # fmt: skip
    said = capsys.readouterr()
    assert "1 worker is ready, batches of at most 16 after 7 ms" in said.out
    assert "warning" not in said.err


def test_registration_warns_when_the_server_took_something_else(capsys: pytest.CaptureFixture[str]) -> None:
    with serve(Server(batchSize=1)) as url:
        workers.register(Path("m.mar"), name=NAME, management=url)
    assert "warning: batch_size is 1, asked for was 32" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("elsewhere/m.mar", "not in the model store"),
        ("m.zip", r"does not end in \.mar"),
        ("missing.mar", "there is no archive"),
        ("fixed.mar", "minWorkers: 4"),
    ],
)
def test_what_cannot_be_registered_is_refused_before_the_call(deployment: Path, path: str, message: str) -> None:
    server = Server()
    with serve(server) as url, pytest.raises(UserError, match=message):
        workers.register(Path(path), management=url, serving=deployment)
    assert server.calls == []


def test_too_many_workers_are_warned_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 2)
    rows = [{"id": str(9000 + i), "status": "READY", "pid": i + 1} for i in range(3)]
    with serve(Server(workers=rows, minWorkers=3, maxWorkers=3)) as url:
        workers.scale(NAME, 3, management=url)
    assert "3 workers on 2 cores" in capsys.readouterr().err


def test_a_name_that_cannot_be_managed_is_refused_before_the_call() -> None:
    """TorchServe takes /models/token… for its token API."""
    with pytest.raises(UserError, match="'tokens' can't be a model's name"):
        workers.register(Path("m.mar"), name="tokens", management="http://127.0.0.1:9")


def test_now_unregisters_at_once() -> None:
    server = Server(jobQueueStatus={"remainingCapacity": 1, "pendingRequests": 5})
    with serve(server) as url:
        workers.unregister(NAME, now=True, management=url)
    assert server.calls == [("DELETE", f"/models/{NAME}/1.0", {})]
