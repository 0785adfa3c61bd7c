"""`batchserve token` and what `batchserve serve` prints; the serving itself is tested in tests/e2e."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.lib import supervisor
from scripts.lib.errors import UserError
from scripts.lib.server import TorchServe
from scripts.lib.state import State, running
from scripts.serve import KeyKind, curl, current_key

EXPIRES = "2999-01-01T00:00:00.123456789Z"


@pytest.fixture
def living() -> Iterator[int]:
    """The process id of something that looks like a supervisor."""
    process = subprocess.Popen([sys.executable, "-c", "input()", supervisor.__file__], stdin=subprocess.PIPE)
    yield process.pid
    process.communicate(b"\n")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def key_file(path: Path, expires: str = EXPIRES) -> None:
    entries = {kind: {"key": f"{kind}-key", "expiration time": expires} for kind in ("inference", "management")}
    path.write_text(json.dumps({**entries, "API": {"key": "x"}}))


def server(pid: int, port: int = 8080, auth: str = "token", expires: str = EXPIRES) -> None:
    directory = Path(".batchserve") / f"server-{port}"
    directory.mkdir(parents=True)
    State(pid, f"http://127.0.0.1:{port}", "http://127.0.0.1:8081", "http://127.0.0.1:8082", "x", auth).write(directory)
    key_file(directory / "key_file.json", expires)


def test_the_keys_of_the_one_server(living: int) -> None:
    server(living)
    assert current_key(KeyKind.INFERENCE) == "inference-key"
    assert current_key(KeyKind.MANAGEMENT) == "management-key"


def test_no_server() -> None:
    with pytest.raises(UserError, match="no server runs from this directory"):
        current_key(KeyKind.INFERENCE)


def test_a_dead_server_is_none(living: int) -> None:
    server(2**22 + 1)
    # Another process that took the number.
    server(os.getpid(), port=9090)
    assert running() == {}


def test_a_server_without_tokens(living: int) -> None:
    server(living, auth="none")
    with pytest.raises(UserError, match="uses no tokens"):
        current_key(KeyKind.INFERENCE)


def test_an_expired_key(living: int) -> None:
    server(living, expires="2020-01-01T00:00:00Z")
    with pytest.raises(UserError, match="expired at 2020-01-01 00:00 UTC"):
        current_key(KeyKind.INFERENCE)


def test_several_servers_are_told_apart_by_their_deployment(living: int) -> None:
    server(living)
    server(living, port=9090)
    with pytest.raises(UserError, match=r"several servers run.*:8080.*:9090"):
        current_key(KeyKind.INFERENCE)
    deployment = Path("serving.yaml")
    deployment.write_text('server: {inference_port: 9090}\nmodels: {a: {archive: a.mar, version: "1"}}\n')
    assert current_key(KeyKind.INFERENCE, deployment) == "inference-key"
    deployment.write_text('server: {inference_port: 9999}\nmodels: {a: {archive: a.mar, version: "1"}}\n')
    with pytest.raises(UserError, match=r"no server of serving.yaml runs"):
        current_key(KeyKind.INFERENCE, deployment)


def test_plain_torchserve_leaves_its_keys_in_the_directory() -> None:
    key_file(Path("key_file.json"))
    assert current_key(KeyKind.MANAGEMENT) == "management-key"
    Path("key_file.json").write_text("{}")
    with pytest.raises(UserError, match="not a key file"):
        current_key(KeyKind.INFERENCE)


def test_the_command_to_paste_survives_a_shell(tmp_path: Path) -> None:
    config = tmp_path / "config.properties"
    config.write_text("model_store=/x\ninference_address=http://0.0.0.0:9000\n")
    torchserve = TorchServe(config, work_dir=tmp_path)
    key_file(tmp_path / "key_file.json")
    printed = curl(torchserve, "m").removeprefix("curl")
    words = subprocess.run(["sh", "-c", f"printf '%s|' {printed}"], capture_output=True, text=True, check=True).stdout
    assert words.split("|")[:-1] == [
        "-sS", "-H", "Authorization: Bearer inference-key", "-H", "Content-Type: application/json",
        "-d", '{"text": "Hello, world"}', "http://127.0.0.1:9000/predictions/m",
    ]  # fmt: skip
