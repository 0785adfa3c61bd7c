"""batchserve doctor beside a real TorchServe: what only the live server shows, and that it is left as it was."""

import json
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from scripts.doctor import doctor
from scripts.lib import launch
from scripts.lib.addresses import free_ports
from scripts.lib.errors import UserError
from scripts.lib.java import find_java
from scripts.lib.management import ManagementClient
from scripts.lib.server import TorchServe
from scripts.lib.supervised import Supervised
from tests.e2e.archives import write_archive
from tests.e2e.conftest import CLI, REPOSITORY, serving_mapping, start_server
from tests.fake_server import serve

APP = typer.Typer(pretty_exceptions_enable=False)
APP.command()(doctor)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchServe]:
    """A clean deployment of one model, and an archive in its store that nothing loads."""
    directory = tmp_path_factory.mktemp("doctor")
    store = directory / "store"
    store.mkdir()
    write_archive(store / "echo.mar")
    write_archive(store / "spare.mar", name="spare", version="3.0")
    models = {
        "echo": {"archive": "echo.mar", "version": "1.0", "workers": 1, "batch_size": 8, "max_batch_delay": 3,
                 "queue": 50, "response_timeout": 45},
    }  # fmt: skip
    with start_server(directory, serving_mapping(store, models)) as running:
        yield running


@pytest.fixture
def client(server: TorchServe) -> ManagementClient:
    return ManagementClient(server.urls.management, server.management_key)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing of a deployment lies."""
    monkeypatch.chdir(tmp_path)
    for name in ("BATCHSERVE_MANAGEMENT_TOKEN", "TS_CONFIG_FILE", "LOG_LOCATION"):
        monkeypatch.delenv(name, raising=False)


def run(server: TorchServe, *arguments: object, token: str | None = None) -> Result:
    key = token or server.management_key or ""
    return CliRunner().invoke(APP, ["--management", server.urls.management, "--token", key, *map(str, arguments)])


def codes(server: TorchServe, file: Path, *arguments: object) -> set[tuple[str, str]]:
    """What is found, and where."""
    result = run(server, "--ts-config", file, "--json", *arguments)
    assert result.exit_code in (0, 1), result.output
    found = {(one["code"], one["where"]) for one in json.loads(result.stdout)["findings"]}
    assert result.exit_code == (1 if found else 0)
    return found


def rows(result: Result) -> list[list[str]]:
    return [line.split() for line in result.output.splitlines()]


def state(client: ManagementClient) -> list[Any]:
    """All that the server tells of itself, but for what its workers use by the moment."""
    found = [each for one in client.list_models() for each in client.versions(one.model_name)]
    return [
        one.model_copy(update={"workers": [(each.id, each.pid, each.start_time, each.status) for each in one.workers]})
        for one in found
    ]


def test_a_clean_deployment_is_clean_and_left_as_it_was(server: TorchServe, client: ManagementClient) -> None:
    before = state(client), server.properties_path.read_bytes()
    log = server.work_dir / "logs" / "ts_log.log"
    result = run(server, "--ts-config", server.properties_path, "--log", log)
    assert result.exit_code == 0, result.output
    assert "nothing is wrong" in result.output
    assert "echo 1.0 on the server (1 of 1 workers ready)" in result.output
    live = rows(result)[[line[:4] for line in rows(result)].index(["echo", "1.0", "on", "the"]) :]
    number = server.properties_path.read_text().splitlines().index
    line = 1 + number(next(each for each in server.properties_path.read_text().splitlines() if each[:7] == "models="))
    assert ["batchSize", "8", f"config.properties:{line}", "models"] in live
    assert ["responseTimeout", "45", f"config.properties:{line}", "models"] in live
    assert ["startupTimeout", "120", "TorchServe's", "default"] in live
    assert (state(client), server.properties_path.read_bytes()) == before


def test_without_a_file_the_server_alone_is_told(server: TorchServe) -> None:
    result = run(server)
    assert result.exit_code == 0, result.output
    assert ["batchSize", "8", "live", "server:", "in", "no", "file", "that", "was", "read"] in rows(result)
    assert ["startupTimeout", "120", "live", "server:", "TorchServe's", "default"] in rows(result)


def test_a_file_that_was_edited_after_the_start(server: TorchServe, tmp_path: Path) -> None:
    edited = tmp_path / "config.properties"
    text = server.properties_path.read_text()
    edited.write_text(text.replace('"batchSize":8', '"batchSize":16').replace('Timeout":45', 'Timeout":60'))
    assert codes(server, edited) == {
        ("server-differs", "echo 1.0 batchSize"),
        ("server-differs", "echo 1.0 responseTimeout"),
    }
    result = run(server, "--ts-config", edited)
    assert "the server runs with 8, the files come to 16 (config.properties:" in result.output
    edited.write_text(text.replace("load_models=", "load_models=spare=spare.mar,"))
    found = codes(server, edited)
    assert ("server-missing", "spare 3.0") in found
    assert not any(code == "server-undeclared" for code, _ in found)


def test_a_model_that_was_scaled(server: TorchServe, client: ManagementClient) -> None:
    for count in (2, 0):
        client.scale("echo", "1.0", count)
        deadline = time.monotonic() + 30
        while not ready(client, count) and time.monotonic() < deadline:
            time.sleep(0.1)
        found = codes(server, server.properties_path)
        assert found == {("server-differs", "echo 1.0 minWorkers")} | (
            {("server-health", "server")} if not count else set()
        )
    result = run(server)
    assert (result.exit_code, "echo 1.0 has no worker: every request gets 503" in result.output) == (1, True)
    client.scale("echo", "1.0", 1)
    while not ready(client, 1) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert codes(server, server.properties_path) == set()


def test_a_model_that_was_registered_over_the_api(server: TorchServe, client: ManagementClient) -> None:
    client.register("spare.mar", batch_size=64, max_batch_delay=2500, workers=1)
    try:
        where = "spare 3.0 on the server"
        assert codes(server, server.properties_path) == {
            ("server-undeclared", where),
            ("delay-long", f"{where} (live server: REST, or a restored snapshot)"),
            ("batch-over-queue", f"{where} (live server: in no file that was read)"),
        }
        assert run(server).exit_code == 1
    finally:
        client.unregister("spare")
    assert codes(server, server.properties_path) == set()


@pytest.mark.parametrize("which", ["management", "inference", "metrics"])
def test_what_is_no_management_api_or_refuses(server: TorchServe, which: str) -> None:
    key = (server.management_key or "") if which != "management" else "wrong"
    result = CliRunner().invoke(APP, ["--management", getattr(server.urls, which), "--token", key])
    assert (result.exit_code, result.exception.__class__) == (2, SystemExit)
    reason = {"metrics": "is a TorchServe but not its management API"}.get(which, "missing or wrong token")
    assert result.output.startswith("error: ")
    assert reason in result.output
    assert key not in result.output.replace("wrong token", "")


def test_a_closed_port_and_another_server(tmp_path: Path) -> None:
    with socket.socket() as unused, serve(lambda *_: (200, b'{"object": "list", "data": []}')) as stranger:
        unused.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{unused.getsockname()[1]}"
        for url, reason in {closed: "nothing listens there", stranger: "answered in an unknown shape"}.items():
            done = subprocess.run(
                [*CLI, "doctor", "--management", url, "--token", "t", "--json"],
                cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            assert (done.returncode, done.stderr) == (2, "")
            assert reason in json.loads(done.stdout)["unreadable"]


def test_the_log_of_the_server_is_read(server: TorchServe, tmp_path: Path) -> None:
    log = tmp_path / "ts_log.log"
    real = (server.work_dir / "logs" / "ts_log.log").read_text()
    (said,) = {line for line in real.splitlines() if "W-9000-echo_1.0 State change WORKER_STARTED" in line}
    log.write_text(
        real
        + said.split(" [")[0]
        + " [INFO ] W-9000-echo_1.0 o.p.s.wlm.WorkerThread - Retry worker: 9000 in 1 seconds.\n"
    )
    result = run(server, "--log", log)
    assert result.exit_code == 1
    assert "W-9000-echo_1.0 died 1 time and did not come back" in result.output
    log.write_text(log.read_text() + real)  # and then the server was started again
    assert run(server, "--log", log).exit_code == 0


@contextmanager
def plain_torchserve(directory: Path, url: str, *, file: Path | None) -> Iterator[ManagementClient]:
    """TorchServe as its own launcher starts it without --ncs, so that it keeps snapshots and restores them."""
    scratch = launch.scratch_directory()
    quick = {"vmargs": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"}
    command = launch.command(find_java(), scratch, file or Path(), quick, directory / "store")
    command.remove("-ncs")
    if file is None:
        at = command.index("-f")
        del command[at : at + 2]
    process = Supervised(command, scratch, directory, directory / "console.log", {})
    try:
        client, deadline = ManagementClient(url), time.monotonic() + 60
        while not ready(client, 1):
            assert process.running
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield client
    finally:
        process.stop(graceful=False)


def ready(client: ManagementClient, count: int) -> bool:
    """Whether echo has so many workers and all of them are there; False before the server answers."""
    try:
        model = client.describe("echo")
    except UserError:
        return False
    return (model.ready, len(model.workers)) == (count, count)


def test_a_restored_snapshot_is_seen(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    write_archive(tmp_path / "store" / "echo.mar")
    ports = free_ports(5)
    addresses = zip(("inference", "management", "metrics"), ports, strict=False)
    file = tmp_path / "config.properties"
    file.write_text(
        "".join(f"{name}_address=http://127.0.0.1:{port}\n" for name, port in addresses)
        + f"grpc_inference_port={ports[3]}\ngrpc_management_port={ports[4]}\ndisable_token_authorization=true\n"
        + f"job_queue_size=50\nmodel_store={tmp_path / 'store'}\nload_models=echo=echo.mar\nmodels="
        + '{"echo":{"1.0":{"minWorkers":1,"maxWorkers":1,"batchSize":4,"maxBatchDelay":7}}}\n'
    )
    url = f"http://127.0.0.1:{ports[1]}"
    arguments = [
        "--ts-config",
        str(file),
        "--management",
        url,
        "--log",
        str(tmp_path / "logs" / "ts_log.log"),
        "--json",
    ]

    def found() -> set[str]:
        result = CliRunner().invoke(APP, arguments)
        assert result.exit_code == 1, result.output
        return {one["code"] for one in json.loads(result.stdout)["findings"]}

    with plain_torchserve(tmp_path, url, file=file):
        assert found() == {"snapshot-wins"}  # the one that was written at this start
    file.write_text(file.read_text().replace('"batchSize":4', '"batchSize":8'))
    with plain_torchserve(tmp_path, url, file=None) as client:
        assert client.describe("echo").batch_size == 4
        assert found() == {"snapshot-wins", "log-snapshot", "server-restored", "server-differs"}
