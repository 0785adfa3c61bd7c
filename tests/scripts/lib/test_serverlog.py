"""What is made of TorchServe's log; the lines are of real runs, shortened."""

import json
from pathlib import Path

import pytest

from scripts.lib.serverlog import ServerLog, first_traceback, plain, startup_failure

W = "2026-11-29T18:47:20,173 [INFO ] W-9000-raises_1.0-stdout MODEL_LOG - "
SAID = [
    "s_name_part0=/tmp/x/.ts.sock, s_name_part1=9000, pid=6223",
    "Listening on port: /tmp/x/.ts.sock.9000",
    "Torch worker started.",
    "model_name: raises, batchSize: 8",
    "Failed to load model raises, exception weights are missing",
    "Traceback (most recent call last):",
    '  File "/v/site-packages/ts/model_service_worker.py", line 133, in load_model',
    "    service = model_loader.load(",
    "              ^^^^^^^^^^^^^^^^^^",
    '  File "/tmp/models/f71/echo.py", line 6, in initialize',
    "    raise RuntimeError('weights are missing')",
    "RuntimeError: weights are missing",
    "Backend worker process died.",
    "Traceback (most recent call last):",
    '  File "/v/site-packages/ts/model_service_worker.py", line 301, in <module>',
    "RuntimeError: 500 - Unknown exception",
]
DIED = "W-9000-raises_1.0 State change WORKER_STARTED -> WORKER_STOPPED"


def log(*lines: str) -> ServerLog:
    found = ServerLog(Path("unused"))
    for line in lines:
        found.feed(line)
    return found


def died(worker: str = "W-9000-raises_1.0") -> str:
    return f"2026-11-29T18:47:20,538 [DEBUG] {worker} org.pytorch.serve.wlm.WorkerThread - {DIED}"


def test_a_dead_worker_is_found_with_its_first_traceback() -> None:
    found = log(*(W + line for line in SAID), died())
    assert found.dead == ["W-9000-raises_1.0"]
    assert found.worker_error("W-9000-raises_1.0").splitlines() == [
        "Traceback (most recent call last):",
        '  File "/tmp/models/f71/echo.py", line 6, in initialize',
        "    raise RuntimeError('weights are missing')",
        "RuntimeError: weights are missing",
    ]


def test_a_worker_that_loaded_is_not_dead() -> None:
    loaded = "2026-11-29T18:47:20,538 [DEBUG] W-9000-a_1.0 o.p.WorkerThread - W-9000-a_1.0 State change X -> {}"
    assert log(loaded.format("WORKER_STARTED"), loaded.format("WORKER_MODEL_LOADED")).dead == []


def test_a_worker_without_words() -> None:
    found = log(W + SAID[0], died())
    assert "without a word" in found.worker_error(found.dead[0])


def test_a_message_of_several_lines_is_kept() -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "/a.py", line 1, in f',
        "ValueError: one",
        "two",
        "",
        "three",
    ]
    assert first_traceback(lines)[-2:] == ["ValueError: one", "two"]


def test_without_a_traceback_the_last_lines_are_kept() -> None:
    assert first_traceback([str(number) for number in range(50)]) == [str(number) for number in range(30, 50)]


def test_a_model_that_cannot_be_registered() -> None:
    found = log(
        "2026-11-29T18:47:12,687 [WARN ] main org.pytorch.serve.ModelServer - Failed to load model: gone.mar",
        "org.pytorch.serve.archive.model.ModelNotFoundException: Model not found at: gone.mar",
        "\tat org.pytorch.serve.archive.model.ModelArchive.downloadModel(ModelArchive.java:118) ~[model-server.jar:?]",
        "2026-11-29T18:47:12,694 [INFO ] main org.pytorch.serve.ModelServer - Initialize Inference server",
        "not of the failure",
    )
    assert found.fatal == ["Failed to load model: gone.mar", "ModelNotFoundException: Model not found at: gone.mar"]


def test_the_file_is_read_as_it_grows_and_old_runs_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "ts_log.log"
    path.write_text(died("W-9000-old_1.0") + "\n")
    found = ServerLog(path)
    found.skip()
    found.read()
    with path.open("a") as file:
        file.write(died("W-9001-new_1.0")[:40])
        file.flush()
        found.read()
        assert found.dead == []
        file.write(died("W-9001-new_1.0")[40:] + "\n")
    found.read()
    assert found.dead == ["W-9001-new_1.0"]


def test_the_reason_that_java_gave() -> None:
    assert (
        startup_failure("x\nFailed to bind to address: http://127.0.0.1:1\n")
        == "the address http://127.0.0.1:1 is in use"
    )
    assert "refuses the configuration: Bad" in startup_failure("Invalid configuration: Bad\n")
    assert startup_failure("") == "it printed nothing"
    assert startup_failure("a\n\tat b\nc") == "a\nc"


def test_a_log_that_was_rolled_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "ts_log.log"
    path.write_text("an old line\n" * 100 + "cut o")
    found = ServerLog(path)
    found.read()
    path.write_text(died("W-9001-new_1.0") + "\n")
    found.read()
    assert found.dead == ["W-9001-new_1.0"]


def as_json(line: str, exception: str = "") -> str:
    """A line of text as log4j2-json.xml writes it."""
    time, level, thread, logger, _, message = line.replace("[", "").replace("]", "").split(maxsplit=5)
    found = {"time": time, "level": level, "thread": thread, "logger": logger, "message": message}
    return json.dumps({**found, **({"exception": exception} if exception else {})})


def test_a_json_log_tells_the_same() -> None:
    failed = "2026-11-29T18:47:12,687 [WARN ] main org.pytorch.serve.ModelServer - Failed to load model: gone.mar"
    thrown = (
        "org.pytorch.serve.archive.model.ModelNotFoundException: Model not found at: gone.mar\n\tat a.b(C.java:1)\n"
    )
    found = log(as_json(failed, thrown), as_json(W + SAID[-1]), as_json(died()))
    assert found.fatal == ["Failed to load model: gone.mar", "ModelNotFoundException: Model not found at: gone.mar"]
    assert found.dead == ["W-9000-raises_1.0"]
    assert found.worker_error(found.dead[0]) == SAID[-1]


def test_a_line_of_the_access_log() -> None:
    line = '{"time":"T","client":"1.2.3.4:5","method":"POST","path":"/predictions/a","status":503,"milliseconds":7}'
    assert plain(line) == ['T - /1.2.3.4:5 "POST /predictions/a HTTP/1.1" 503 7']


@pytest.mark.parametrize("line", ["{", "{}", "{'a': 1}", '{"level":1}', "a", ""])
def test_what_is_no_json_of_ours_stays(line: str) -> None:
    assert plain(line) == [line]
