"""The benchmark and the quickstart's demo, whole, on a real TorchServe: what they print, and that nothing stays."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ruamel.yaml import YAML

from tests.e2e.conftest import CLI, REPOSITORY, serving_mapping
from tests.generation_models import tiny_llama


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    """Every process that a test starts is gone after it."""
    yield
    deadline = time.monotonic() + 10
    while left := [process for process in psutil.Process().children(recursive=True) if _started_here(process)]:
        if time.monotonic() > deadline:
            pytest.fail(f"left running: {left}")
        time.sleep(0.1)


def _started_here(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.environ().get("STARTED_BY") == __name__
    return False


def start(directory: Path, *words: str) -> subprocess.Popen[str]:
    """A batchserve command in `directory`, its output readable line by line."""
    return subprocess.Popen(
        [*CLI, *words],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "STARTED_BY": __name__, "COLUMNS": "250"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(process: subprocess.Popen[str], words: str) -> str:
    """Read the process's output up to a line with `words`; what was read."""
    assert process.stdout is not None
    read = ""
    for line in process.stdout:
        read += line
        if words in line:
            return read
    pytest.fail(f"ended without {words!r}:\n{read}")


def write_serving(directory: Path) -> Path:
    path = directory / "serving.yaml"
    model = {"archive": "minilm.mar", "version": "1.0", "workers": 1, "batch_size": 32, "max_batch_delay": 2}
    mapping = serving_mapping(Path("store"), {"minilm": model})
    with path.open("w") as file:
        YAML().dump(mapping, file)
    (directory / "config").mkdir()
    return path


def test_a_small_benchmark(tmp_path: Path, tiny_model: Path) -> None:
    pytest.importorskip("sentence_transformers")
    words = ["bench", "--model", str(tiny_model), "--workload", "short", "--clients", "1,4", "--requests", "40"]
    words += ["--rounds", "1", "--workers", "1", "--threads", "1"]
    with start(tmp_path, *words, "--json", "out.json") as process:
        output = process.communicate()[0]
    assert process.returncode == 0, output
    document = json.loads((tmp_path / "out.json").read_bytes())
    points = {(point["clients"], point["batch_size"]): point for point in document["points"]}
    assert sorted(points) == [(1, 32), (4, 1), (4, 32)]
    for point in points.values():
        assert point["errors"] == 0
        assert point["rounds"][0]["batching"]["requests"] == 40
        assert point["peak_memory_bytes"] > 1e8
        assert point["ratio_to_offline"]["median"] > 0
        assert 0 <= point["padding_share"] < 1
    assert points[1, 32]["effective_batch_size"] == points[4, 1]["effective_batch_size"] == 1
    assert points[4, 32]["effective_batch_size"] > 1
    assert document["agreement_with_offline"]["float32"] > 0.9999
    assert {target["name"]: target["reached"] for target in document["targets"]}[
        "build of the archive, without its verification"
    ]
    assert "over HTTP" in output


def test_a_small_benchmark_of_generation(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "llama", positions=4096)
    words = ["bench", "--model", str(model), "--task", "generation", "--workload", "replies,first_token"]
    with start(tmp_path, *words, "--requests", "8", "--threads", "1", "--json", "out.json") as process:
        output = process.communicate()[0]
    assert process.returncode == 0, output
    document = json.loads((tmp_path / "out.json").read_bytes())
    runs = {(run["workload"], run["side"]): run for run in document["windows"]}
    # `prefix` wants a process more; the yardstick's own tests run it
    assert set(runs) == {("replies", side) for side in ("static", "served", "engine")}
    assert {run["tokens"] for run in runs.values()} == {6 * 8 + 2 * 128}
    assert document["agreement_with_generate"]["float32"] == 1
    assert document["first_tokens"][0]["busy_s"] > 0
    measured = [target["measured"] is not None for target in document["targets"]]
    assert measured == [True, True, False, False, True, True, False]
    assert "TorchServe, over HTTP" in output


@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_a_benchmark_that_is_interrupted_leaves_nothing(tmp_path: Path, tiny_model: Path, number: int) -> None:
    pytest.importorskip("sentence_transformers")
    words = ["bench", "--model", str(tiny_model), "--workload", "short", "--clients", "4", "--duration", "60"]
    words += ["--workers", "1"]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(scratch))
        process = start(tmp_path, *words, "--no-compare-batch-1")
    with process:
        wait_for(process, "TorchServe starts")
        time.sleep(3)
        process.send_signal(number)
        output = process.communicate(timeout=30)[0]
    assert process.returncode not in (0, None)
    assert "Traceback" not in output
    assert list(scratch.iterdir()) == []


def test_the_demo_shows_everything_and_ends(tmp_path: Path) -> None:
    path = write_serving(tmp_path)
    with start(tmp_path, "demo", "--serving", str(path)) as process:
        output = wait_for(process, "stop with Ctrl-C")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 0, output
    assert "384 numbers" in output
    assert "64 answers in" in output
    assert "served them" in output
    assert "curl -sS -H 'Authorization: Bearer " in output
    assert (tmp_path / "store" / "minilm.mar").is_file()

    # The second time nothing is built.
    with start(tmp_path, "demo", "--serving", str(path)) as process:
        wait_for(process, "minilm.mar is unchanged")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)


def test_a_port_that_is_taken_is_named_before_anything_is_built(tmp_path: Path) -> None:
    import socket

    path = write_serving(tmp_path)
    port = YAML(typ="safe").load(path)["server"]["metrics_port"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with start(tmp_path, "demo", "--serving", str(path), "--once") as process:
            output = process.communicate()[0]
    assert process.returncode == 1
    assert f"metrics_port: 127.0.0.1:{port} cannot be used" in output
    assert not (tmp_path / "store").exists()
