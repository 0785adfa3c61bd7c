"""TorchServe as `scripts.lib.server` runs it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from typer.testing import CliRunner

from scripts.__main__ import app
from scripts.lib.errors import UserError
from scripts.lib.inference import InferenceClient
from scripts.lib.management import ManagementClient
from scripts.lib.server import StartError, TorchServe
from scripts.lib.state import sweep
from tests.e2e.archives import EXITS, FAILS, IMPORTS, RAISES, SLOW, write_archive
from tests.e2e.conftest import REPOSITORY, serving_mapping, start_server


def post(server: TorchServe, model: str) -> requests.Response:
    return requests.post(
        f"{server.urls.inference}/predictions/{model}", json={"text": "x"}, headers=server.headers(), timeout=30
    )


def broken(tmp_path: Path, source: str, **options: Any) -> TorchServe:
    write_archive(tmp_path / "bad.mar", name="bad", source=source)
    models = {"bad": {"archive": "bad.mar", "version": "1.0"}}
    return start_server(tmp_path, serving_mapping(tmp_path, models), **options)


def test_the_management_api_shows_what_was_declared(echo_server: TorchServe) -> None:
    echo, other = echo_server.management.describe("echo"), echo_server.management.describe("other")
    assert (echo.batch_size, echo.max_batch_delay, echo.min_workers, echo.max_workers) == (16, 3, 2, 2)
    assert (echo.response_timeout, echo.startup_timeout) == (45, 55)
    assert echo.job_queue_status.remaining_capacity == 321
    assert len(echo.workers) == 2
    assert (other.batch_size, other.max_batch_delay, other.response_timeout) == (4, 50, 30)
    assert other.model_version == "2.1"
    assert other.job_queue_status.remaining_capacity == 321


def test_requests_need_the_inference_key(echo_server: TorchServe) -> None:
    assert post(echo_server, "echo").status_code == 200
    url = f"{echo_server.urls.inference}/predictions/echo"
    assert requests.post(url, json={}, timeout=30).status_code == 400
    assert requests.post(url, json={}, headers=echo_server.headers("management"), timeout=30).status_code == 400
    for token in (None, "wrong", echo_server.management_key):
        with (
            InferenceClient(echo_server.urls.inference, token) as client,
            pytest.raises(UserError, match="wrong token"),
        ):
            client.probe("echo")
        if token != echo_server.management_key:
            with pytest.raises(UserError, match="wrong token"):
                ManagementClient(echo_server.urls.management, token).describe("echo")


def test_metrics_need_no_key_and_name_the_models(echo_server: TorchServe) -> None:
    post(echo_server, "echo")
    text = requests.get(f"{echo_server.urls.metrics}/metrics", timeout=30).text
    assert 'ts_inference_requests_total{model_name="echo"' in text


def test_top_shows_a_server_that_is_not_ours(echo_server: TorchServe) -> None:
    """Of a foreign handler TorchServe's own metrics are all there is."""
    words = ["top", "--once", "--json", "--interval", "1", "--management", echo_server.urls.management]
    words += ["--metrics", echo_server.urls.metrics, "--token", str(echo_server.management_key)]
    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(CliRunner().invoke, app, words)
        while not seen.done():
            url = f"{echo_server.urls.inference}/predictions/echo"
            assert requests.post(url, data=b"x", headers=echo_server.headers(), timeout=30).status_code == 200
    assert seen.result().exit_code == 0, seen.result().output
    echo, other = json.loads(seen.result().stdout)["models"]
    assert (echo["name"], echo["room"], echo["batching"], echo["generation"]) == ("echo", 321, None, None)
    assert [worker["status"] for worker in echo["workers"]] == ["READY", "READY"]
    assert echo["requests_per_s"] > 0
    assert echo["latency_ms"] > 0
    assert other["requests_per_s"] == 0


def test_no_log_quotes_a_request(echo_server: TorchServe) -> None:
    """Neither a query string nor a form that cannot be read; what handlers say is tested in test_watch."""
    secret, url = "xyzzysecret", f"{echo_server.urls.inference}/predictions/echo"
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    sent: list[dict[str, Any]] = [
        {"json": {"text": secret}},
        {"params": {"text": secret}},
        {"data": f"%{secret}&", "headers": form},
        {"data": f"a=%{secret}\n\tat a.b({secret})\n&b", "headers": form},
    ]
    for each in sent:
        headers = {**echo_server.headers(), **each.pop("headers", {})}
        requests.post(url, headers=headers, timeout=30, **each)
    logs = list((echo_server.work_dir / "logs").iterdir())
    assert "ErrorDataDecoderException\n\tat " in echo_server.log_text(), "its type and place are told"
    assert [path for path in logs if secret in path.read_text(errors="replace")] == []


def test_a_batch_is_filled_up_to_its_declared_size(echo_server: TorchServe) -> None:
    batches: list[int] = []
    threads = [
        threading.Thread(target=lambda: batches.append(post(echo_server, "other").json()["batch"])) for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(batches) == 4


def test_only_the_model_store_may_be_registered_from(echo_server: TorchServe, tmp_path: Path) -> None:
    def register(url: str, name: str) -> requests.Response:
        return requests.post(
            f"{echo_server.urls.management}/models",
            params={"url": url, "model_name": name},
            headers=echo_server.headers("management"),
            timeout=60,
        )

    outside = write_archive(tmp_path / "outside.mar", name="outside")
    assert register(outside.as_uri(), "outside").status_code == 404
    assert register(f"file://{echo_server.model_store}/../outside.mar", "outside").status_code == 404
    assert register("http://127.0.0.1:9/x.mar", "outside").status_code == 404
    answer = register("echo.mar", "again")
    assert answer.status_code == 200, answer.text
    requests.delete(
        f"{echo_server.urls.management}/models/again", headers=echo_server.headers("management"), timeout=60
    ).raise_for_status()


def test_workers_see_no_pythonpath_of_ours(echo_server: TorchServe) -> None:
    """The server was started with a directory in PYTHONPATH whose trivial_handler.py would take the archive's place."""
    worker = post(echo_server, "echo").json()
    assert not [entry for entry in worker["pythonpath"].split(os.pathsep) + worker["path"] if "hostile" in entry]


def test_the_state_directory_is_private(echo_server: TorchServe) -> None:
    assert echo_server.work_dir.stat().st_mode & 0o777 == 0o700
    assert (echo_server.work_dir / "key_file.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (RAISES, "RuntimeError: the weights are not there"),
        (IMPORTS, "No module named 'a_module_that_is_not_there'"),
        (EXITS, "ended without a word"),
        ("nothing = 1\n", "Expected only one class"),
    ],
    ids=["raises", "imports", "exits", "no class"],
)
def test_a_worker_that_dies_is_named_with_its_own_error(tmp_path: Path, source: str, reason: str) -> None:
    server = broken(tmp_path, source)
    started = time.monotonic()
    with pytest.raises(StartError, match="a worker of bad died") as caught, server:
        pytest.fail("it started")
    assert reason in str(caught.value)
    assert time.monotonic() - started < 60
    assert server.processes() == []
    assert not (server.work_dir / "state.json").exists()


def test_a_handler_that_fails_the_probe_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="cannot handle this"), broken(tmp_path, FAILS):
        pytest.fail("it started")


def test_a_worker_that_dies_of_the_probe_is_named(tmp_path: Path) -> None:
    source = FAILS.replace('raise ValueError("cannot handle this")', "os._exit(3)")
    with pytest.raises(
        StartError, match=r"a worker of bad died while answering a request|bad answers a request with 50"
    ):
        broken(tmp_path, source).__enter__()


def test_stopping_while_a_worker_loads_leaves_nothing(tmp_path: Path) -> None:
    server = broken(tmp_path, SLOW)
    server.start()
    while len(server.processes()) < 2:
        time.sleep(0.05)
    with pytest.raises(StartError, match="not ready in time: bad"):
        server.wait_ready(timeout=0.5)
    tree = server.processes()
    scratch = Path(tree[0].environ()["TMPDIR"])
    server.stop(graceful=False)
    assert not any(process.is_running() for process in tree)
    assert not scratch.exists()


def test_an_archive_that_is_missing_ends_the_start(tmp_path: Path) -> None:
    models = {"bad": {"archive": "gone.mar", "version": "1.0"}}
    with pytest.raises(StartError, match=r"Failed to load model: gone.mar"):
        start_server(tmp_path, serving_mapping(tmp_path, models)).__enter__()


def test_a_port_in_use_is_said_before_anything_starts(tmp_path: Path) -> None:
    mapping = serving_mapping(tmp_path, {"bad": {"archive": "gone.mar", "version": "1.0"}})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", mapping["server"]["metrics_port"]))
        taken.listen()
        with pytest.raises(UserError, match=r"metrics_port: .* Address already in use"):
            start_server(tmp_path, mapping).start()
    assert not (tmp_path / "state").exists()


def test_odd_paths_and_two_servers_at_once(echo_server: TorchServe, tmp_path: Path) -> None:
    store = tmp_path / "ström, [a+b] $1 #é=x"
    store.mkdir()
    write_archive(store / "écho (1).mar")
    mapping = serving_mapping(store, {"e.1-x_y": {"archive": "écho (1).mar", "version": "1.0"}}, auth="none")
    with start_server(tmp_path, mapping) as server:
        assert server.headers() == {}
        assert post(server, "e.1-x_y").status_code == 200
        assert post(echo_server, "echo").status_code == 200
        answer = requests.post(f"{server.urls.management}/models", params={"url": "x.mar"}, timeout=30)
        assert answer.status_code == 405
    assert post(echo_server, "echo").status_code == 200


HOLDER = """
import sys, time
from pathlib import Path
from scripts.lib.server import TorchServe
server = TorchServe(Path(sys.argv[1]), work_dir=Path(sys.argv[2]))
server.start()
server.wait_ready()
print("ready", *[process.pid for process in server.processes()], flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("victim", ["owner", "supervisor", "java"])
def test_kill_9_of_any_of_them_leaves_no_process(tmp_path: Path, victim: str) -> None:
    write_archive(tmp_path / "echo.mar")
    mapping = serving_mapping(tmp_path, {"echo": {"archive": "echo.mar", "version": "1.0"}})
    server = start_server(tmp_path, mapping)
    command = [sys.executable, "-c", HOLDER, str(server.properties_path), str(server.work_dir)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    try:
        assert owner.stdout is not None
        words = owner.stdout.readline().split()
        assert words[0] == "ready"
        tree = [psutil.Process(int(pid)) for pid in words[1:]]
        scratch = tree[0].environ()["TMPDIR"]
        supervisor = psutil.Process(owner.pid).children()[0]
        target = {"owner": owner.pid, "supervisor": supervisor.pid, "java": tree[0].pid}[victim]
        os.kill(target, signal.SIGKILL)
        # While the owner lives, its dead supervisor stays in the table until the owner takes note.
        watched = [*tree, supervisor] if victim == "owner" else tree
        _gone, alive = psutil.wait_procs(watched, timeout=20)
        assert alive == []
    finally:
        owner.kill()
        owner.wait()
        assert owner.stdout is not None
        owner.stdout.close()
    # What nobody was left to remove, the next start removes.
    sweep(server.work_dir)
    assert not Path(scratch).exists()
