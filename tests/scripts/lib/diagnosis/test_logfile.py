"""What a log tells."""

import json
from pathlib import Path

import pytest

from scripts.lib.diagnosis.deployment import LogFacts
from scripts.lib.diagnosis.logfile import facts, read_log
from scripts.lib.errors import UserError

T = "2026-11-29T21:18:10,252"
W = f"{T} [{{}}] W-9000-a_b_1.0 org.pytorch.serve.wlm.WorkerThread - "
LINES = f"""{T} [INFO ] main org.pytorch.serve.snapshot.SnapshotManager - Started restoring models from snapshot {{}}
{T} [WARN ] main org.pytorch.serve.archive.model.ModelConfig - Invalid batchSize: 8x, should be integer
{T} [WARN ] main org.pytorch.serve.ModelServer - Failed to load model: gone.mar
org.pytorch.serve.archive.model.ModelNotFoundException: Model not found at: gone.mar
{T} [DEBUG] W-9000-a_b_1.0 org.pytorch.serve.wlm.WorkerThread - Flushing req.cmd PREDICT repeats 1 to backend at: 1
{T} [DEBUG] W-9000-a_b_1.0 org.pytorch.serve.wlm.WorkerThread - Flushing req.cmd PREDICT repeats 1 to backend at: 1
{T} [DEBUG] W-9000-a_b_1.0 org.pytorch.serve.job.RestJob - Waiting time ns: 1, Backend time ns: 3
{T} [DEBUG] W-9000-a_b_1.0 org.pytorch.serve.job.RestJob - Waiting time ns: 2, Backend time ns: 3
{T} [INFO ] W-9000-a_b_1.0-stdout MODEL_LOG - KeyError: 'body'
{T} [INFO ] W-9000-a_b_1.0 org.pytorch.serve.wlm.WorkerThread - Retry worker: 9000 in 1 seconds.
{T} [INFO ] W-9000-a_b_1.0 org.pytorch.serve.wlm.WorkerThread - Retry worker: 9000 in 1 seconds.
{T} - /127.0.0.1:47140 "POST /predictions/a_b/1.0 HTTP/1.1" 503 7
{T} - /127.0.0.1:47140 "POST /predictions/a_b HTTP/1.1" 200 7
"""
BACK = (
    f"{T} [DEBUG] W-9000-a_b_1.0 o.p.WorkerThread - W-9000-a_b_1.0 State change WORKER_STARTED -> WORKER_MODEL_LOADED\n"
)


def test_everything_that_it_tells(tmp_path: Path) -> None:
    path = tmp_path / "ts_log.log"
    path.write_text(LINES)
    found = read_log(path)
    assert found.restored
    assert found.refused == ("Invalid batchSize: 8x, should be integer",)
    assert found.failures[0] == "Failed to load model: gone.mar"
    assert found.batches == {("a_b", "1.0"): (1, 2)}
    assert found.restarts == {"W-9000-a_b_1.0": 1}
    assert found.dead == {"W-9000-a_b_1.0": "KeyError: 'body'"}
    assert found.unavailable == {"a_b": 1}


def test_a_worker_that_came_back_is_not_dead() -> None:
    found = facts(Path("log"), [*LINES.splitlines(), BACK])
    assert found.dead == {}
    assert found.restarts == {"W-9000-a_b_1.0": 1}


def test_an_uneventful_log() -> None:
    found = facts(Path("log"), [BACK])
    assert (found.failures, found.dead, found.restarts, found.restored, found.refused) == ((), {}, {}, False, ())


@pytest.mark.parametrize("directory", [True, False])
def test_no_log(tmp_path: Path, directory: bool) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_log(tmp_path if directory else tmp_path / "gone")


def test_bytes_of_any_kind(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(bytes(range(256)) * 3 + b"\n" + BACK.encode())
    assert read_log(tmp_path / "log").restarts == {}


def test_a_json_log_tells_the_same() -> None:
    place = {"time": T, "level": "DEBUG", "thread": "W-9000-a_b_1.0", "logger": "org.pytorch.serve.wlm.WorkerThread"}
    flushed = {**place, "message": "Flushing req.cmd PREDICT repeats 1 to backend at: 1"}
    refused = {"time": T, "client": "1.2.3.4:5", "method": "POST", "path": "/predictions/a_b", "status": 503}
    found = facts(Path("log"), [json.dumps(flushed), json.dumps({**refused, "milliseconds": 7})])
    assert found.batches == {("a_b", "1.0"): (1, 0)}
    assert found.unavailable == {"a_b": 1}


def test_what_was_before_the_last_start_is_over() -> None:
    banner = [f"{T} [INFO ] main org.pytorch.serve.ModelServer - ", "Torchserve version: 0.12.0"]
    found = facts(Path("log"), [*LINES.splitlines(), *banner, BACK])
    assert found == LogFacts(Path("log"))
    record = {"time": T, "level": "INFO", "thread": "main", "logger": "org.pytorch.serve.ModelServer",
              "message": "\nTorchserve version: 0.12.0"}  # fmt: skip
    assert facts(Path("log"), [*LINES.splitlines(), json.dumps(record)]) == LogFacts(Path("log"))


@pytest.mark.parametrize(
    "content", [b"root:x:0:0::/root:/bin/sh\n", b"\x00\xff" * 100, b"2026-01-01 10:00 all is well\n"]
)
def test_another_log_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "some.log"
    path.write_bytes(content)
    with pytest.raises(UserError, match="no line of it is TorchServe's"):
        read_log(path)
    path.write_bytes(b"\n")
    assert read_log(path) == LogFacts(path)
