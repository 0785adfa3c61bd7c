"""`batchserve serve` as a person runs it, and TorchServe without us on the same file."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from ruamel.yaml import YAML

from tests.e2e.archives import RAISES, write_archive
from tests.e2e.conftest import CLI, REPOSITORY, serving_mapping

READY_S = 90


class Desk:
    """A directory of a user's: a serving.yaml, a model store, and the commands run there."""

    def __init__(self, path: Path, source: str | None = None) -> None:
        self.path = path
        (path / "model_store").mkdir()
        options = {} if source is None else {"source": source}
        write_archive(path / "model_store" / "echo.mar", config="responseTimeout: 60\n", **options)
        models = {"echo": {"archive": "echo.mar", "version": "1.0", "batch_size": 8, "max_batch_delay": 1}}
        self.started: list[subprocess.Popen[str]] = []
        self.mapping = serving_mapping(Path("model_store"), models)
        with (path / "serving.yaml").open("w") as file:
            YAML().dump(self.mapping, file)
        # A checkout, a configuration and a log directory of somebody else's must not matter.
        hostile = path / "hostile"
        hostile.mkdir()
        (hostile / "trivial_handler.py").write_text("raise RuntimeError('from PYTHONPATH')")
        self.env = {
            **os.environ,
            "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{hostile}",
            "TS_CONFIG_FILE": "/nowhere/config.properties",
            "TS_INFERENCE_ADDRESS": "http://127.0.0.1:1",
            "LOG_LOCATION": "/nowhere",
        }

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*CLI, *words], cwd=self.path, env=self.env, capture_output=True, text=True, timeout=120, check=False
        )

    def serve(self, *options: str) -> "subprocess.Popen[str]":
        with (self.path / "out.txt").open("w") as out:
            process = subprocess.Popen(
                [*CLI, "serve", "--serving", "serving.yaml", *options],
                cwd=self.path, env=self.env, stdout=out, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        self.started.append(process)
        return process

    def clear(self) -> None:
        """End what a failed test has left: the server goes with the process that made it."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.wait(10)

    @property
    def printed(self) -> str:
        return (self.path / "out.txt").read_text()

    def wait_ready(self, process: "subprocess.Popen[str]") -> list[psutil.Process]:
        """Wait for the last line of the greeting; returns the server's processes, the supervisor among them."""
        deadline = time.monotonic() + READY_S
        while "stop with Ctrl-C" not in self.printed:
            assert process.poll() is None, self.printed
            assert time.monotonic() < deadline, self.printed
            time.sleep(0.1)
        tree = psutil.Process(process.pid).children(recursive=True)
        assert len(tree) == 3, tree
        return tree


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.clear()


def gone(tree: list[psutil.Process], seconds: float = 15) -> bool:
    return psutil.wait_procs(tree, timeout=seconds)[1] == []


def test_serve_prints_a_command_that_works_and_token_the_same_key(desk: Desk) -> None:
    process = desk.serve()
    try:
        tree = desk.wait_ready(process)
        line = next(line.strip() for line in desk.printed.splitlines() if line.startswith("  curl"))
        answer = json.loads(subprocess.run(shlex.split(line), capture_output=True, check=True, timeout=30).stdout)
        assert answer["batch"] == 1
        key = desk.command("token")
        assert key.returncode == 0, key.stderr
        assert f"Bearer {key.stdout.strip()}" in line
        management = desk.command("token", "management").stdout.strip()
        url = f"http://127.0.0.1:{desk.mapping['server']['management_port']}/models/echo"
        headers = {"Authorization": f"Bearer {management}"}
        assert requests.get(url, headers=headers, timeout=30).json()[0]["batchSize"] == 8
        # The same ports again: refused before anything starts, and the first server goes on.
        again = desk.command("serve", "--serving", "serving.yaml")
        assert again.returncode == 1
        assert "Address already in use" in again.stderr
        assert requests.get(url, headers=headers, timeout=30).status_code == 200
        assert desk.command("token").stdout == key.stdout
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0, desk.printed
    assert gone(tree, 0)
    assert not list((desk.path / ".batchserve").glob("*/key_file.json"))
    late = desk.command("token")
    assert late.returncode == 1
    assert "no server runs from this directory" in late.stderr
    assert "Traceback" not in late.stderr + desk.printed


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)])
def test_a_signal_ends_the_server_too(desk: Desk, number: signal.Signals, status: int) -> None:
    process = desk.serve()
    tree = desk.wait_ready(process)
    scratch = Path(tree[-1].environ()["TMPDIR"])
    process.send_signal(number)
    assert process.wait(30) == status
    assert gone(tree, 15 if number == signal.SIGKILL else 0)
    assert not scratch.exists()


def test_a_signal_while_starting(desk: Desk) -> None:
    process = desk.serve()
    while not list((desk.path / ".batchserve").glob("*/java.pid")):
        time.sleep(0.05)
    tree = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    assert gone(tree, 0)


def test_a_handler_that_crashes_fails_serve_with_its_error(tmp_path: Path) -> None:
    desk = Desk(tmp_path, RAISES)
    started = time.monotonic()
    process = desk.serve()
    assert process.wait(90) == 1
    assert "RuntimeError: the weights are not there" in desk.printed
    assert "the whole log" in desk.printed
    assert "scripts/lib" not in desk.printed
    assert time.monotonic() - started < 60


def test_a_server_that_ends_by_itself_fails_serve(desk: Desk) -> None:
    process = desk.serve()
    tree = desk.wait_ready(process)
    next(each for each in tree if each.name() == "java").kill()
    assert process.wait(30) == 1
    assert "TorchServe ended by itself" in desk.printed
    assert gone(tree, 0)


def test_plain_torchserve_runs_on_what_configure_writes(desk: Desk, tmp_path: Path) -> None:
    written = desk.command("configure", "--serving", "serving.yaml")
    assert written.returncode == 0, written.stderr
    scratch = tmp_path / "t"
    scratch.mkdir()
    env: dict[str, Any] = {key: value for key, value in desk.env.items() if not key.startswith("TS_")}
    env = {**env, "TMPDIR": str(scratch), "TEMP": str(scratch), "LOG_LOCATION": str(tmp_path / "logs")}
    del env["PYTHONPATH"]
    torchserve = str(Path(sys.executable).with_name("torchserve"))
    command = next(line for line in written.stdout.splitlines() if line.startswith("torchserve --start"))
    subprocess.run([torchserve, *shlex.split(command)[1:]], cwd=desk.path, env=env, check=True, timeout=60,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    java = psutil.Process(int((scratch / ".model_server.pid").read_text()))
    try:
        management = f"http://127.0.0.1:{desk.mapping['server']['management_port']}/models/echo"
        deadline = time.monotonic() + READY_S
        described: dict[str, Any] = {"workers": []}
        while not any(worker["status"] == "READY" for worker in described["workers"]):
            assert time.monotonic() < deadline
            time.sleep(0.2)
            key = desk.command("token", "management")
            if key.returncode != 0:
                continue
            headers = {"Authorization": f"Bearer {key.stdout.strip()}"}
            try:
                described = requests.get(management, headers=headers, timeout=10).json()[0]
            except requests.ConnectionError:
                continue
        assert (described["batchSize"], described["maxBatchDelay"], described["maxWorkers"]) == (8, 1, 1)
        assert described["jobQueueStatus"]["remainingCapacity"] == 1000
        key = desk.command("token").stdout.strip()
        url = f"http://127.0.0.1:{desk.mapping['server']['inference_port']}/predictions/echo"
        answer = requests.post(url, json={}, headers={"Authorization": f"Bearer {key}"}, timeout=30)
        assert answer.status_code == 200
        assert re.search(r'"batch": 1', answer.text)
    finally:
        tree = [java, *java.children(recursive=True)]
        subprocess.run([torchserve, "--stop"], cwd=desk.path, env=env, check=False, timeout=60,
                       stdout=subprocess.DEVNULL)  # fmt: skip
        if not gone(tree, 20):
            for process in tree:
                if process.is_running():
                    process.kill()
            pytest.fail("torchserve --stop left processes")
