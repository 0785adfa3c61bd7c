"""Which server is meant, and that no server gets another one's key."""

import json
from pathlib import Path

import pytest

from scripts.lib import connection
from scripts.lib.connection import connect
from scripts.lib.errors import UserError
from scripts.lib.state import State

SERVING = 'server: {{management_port: {port}, metrics_port: 9002}}\nmodels: {{m: {{archive: m.mar, version: "1.0"}}}}\n'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def declare(here: Path, port: int = 8081) -> Path:
    path = here / "config" / "serving.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(SERVING.format(port=port))
    return path


def keys(directory: Path, key: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    entry = {"key": key, "expiration time": "2999-01-01T00:00:00.0Z"}
    (directory / "key_file.json").write_text(json.dumps({"management": entry, "inference": entry}))


def runs(monkeypatch: pytest.MonkeyPatch, *ports: int) -> None:
    """Pretend that servers run from here, each with a key of its own."""
    found = {}
    for port in ports:
        directory = Path(".batchserve") / f"server-{port}"
        keys(directory, f"key{port}")
        found[directory] = State(1, "http://127.0.0.1:1", f"http://127.0.0.1:{port}", "http://127.0.0.1:9", "", "token")
    monkeypatch.setattr(connection, "running", lambda: found)


def test_with_nothing_here_it_is_torchserves_default() -> None:
    found = connect()
    assert (found.client.url, found.client.token, found.serving, found.store) == (
        "http://127.0.0.1:8081", None, None, None)  # fmt: skip


def test_the_declared_server(here: Path) -> None:
    declare(here, 9001)
    found = connect()
    assert (found.client.url, found.metrics) == ("http://127.0.0.1:9001", "http://127.0.0.1:9002")
    assert found.serving is not None


def test_the_one_that_runs_here_with_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    runs(monkeypatch, 9001)
    found = connect()
    assert (found.client.url, found.client.token) == ("http://127.0.0.1:9001", "key9001")


def test_the_declared_one_of_several(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs(monkeypatch, 9001, 9005)
    with pytest.raises(UserError, match="several servers"):
        connect()
    declare(here, 9005)
    assert connect().client.token == "key9005"


def test_a_named_url_gets_its_own_key_only(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(here, 9001)
    runs(monkeypatch, 9001)
    assert connect("localhost:9001").client.token == "key9001"
    other = connect("http://elsewhere:9001")
    assert (other.client.token, other.serving, other.metrics) == (None, None, None)
    assert connect("http://127.0.0.1:9002").client.token is None
    assert connect("http://elsewhere:9001", "mine").client.token == "mine"


def test_the_key_of_a_plain_torchserve_stays_on_this_machine(here: Path) -> None:
    keys(here, "plain")
    assert connect("http://127.0.0.1:8081").client.token == "plain"
    assert connect("http://elsewhere:8081").client.token is None


def test_a_serving_file_that_is_named_is_compared_with_whatever_url(here: Path) -> None:
    path = declare(here, 9001)
    assert connect("http://elsewhere:1", serving=path).serving is not None
    with pytest.raises(UserError, match="no such file"):
        connect(serving=here / "nothing.yaml")


def test_a_broken_serving_file_that_nobody_named_is_only_a_warning(here: Path) -> None:
    path = declare(here)
    path.write_text("models: [")
    found = connect("http://elsewhere:1")
    assert (found.client.url, found.serving, found.source) == ("http://elsewhere:1", None, None)
    assert found.warning.startswith("nothing is compared with config/serving.yaml, which cannot be used")
    for named in ({"serving": path}, {"serving": path, "management": "http://elsewhere:1"}, {}):
        with pytest.raises(UserError, match=r"serving\.yaml"):
            connect(**named)
