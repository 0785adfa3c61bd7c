"""batchserve doctor, as a person at a terminal meets it."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from scripts.build import build
from scripts.configure import configure
from scripts.doctor import doctor
from scripts.lib.diagnosis.deployment import Host
from tests.e2e.archives import write_archive
from tests.fake_server import Reply, refusal, serve

APP = typer.Typer(pretty_exceptions_enable=False)
for verb in (build, configure, doctor):
    APP.command()(verb)
BROKEN = """# my server
model_store=model_store
keystore_pass=secret
token_expiration_min=5256000
load_models=m=m.mar
batch_size=8
models={"m":{"1.0":{"minWorkers":1,"maxWorkers":1,"maxBatchDelay":5}}}
"""


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a foreign archive and a config.properties that has one fault."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("scripts.lib.diagnosis.host.this_host", lambda: Host(4, 16 << 30))
    for name in ("TS_CONFIG_FILE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "model_store").mkdir()
    write_archive(tmp_path / "model_store" / "m.mar", name="m")
    (tmp_path / "config.properties").write_text(BROKEN)
    return tmp_path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(APP, ["doctor", *map(str, arguments)])


def as_json(*arguments: object) -> dict[str, Any]:
    result = run("--json", *arguments)
    assert result.exit_code in (0, 1), result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_findings_and_effective_values_with_their_places(desk: Path) -> None:
    result = run()
    assert result.exit_code == 1
    assert "error ignored-key  config.properties:6" in result.output
    assert '    fix: put "batchSize": 8 under the model\'s name and version in the models property' in result.output
    rows = [line.split() for line in result.output.splitlines()]
    assert ["maxBatchDelay", "5", "config.properties:7", "models"] in rows
    assert ["batchSize", "1", "TorchServe's", "default"] in rows
    assert "secret" not in result.output


def test_for_programs(desk: Path) -> None:
    found = as_json("--ts-config", "config.properties")
    assert [finding["code"] for finding in found["findings"]] == ["ignored-key"]
    assert set(found["findings"][0]) == {"code", "severity", "where", "what", "consequence", "fix"}
    assert found["properties"]["keystore_pass"]["value"] == "***"
    assert found["models"][0]["settings"]["maxBatchDelay"] == {"value": 5, "from": "config.properties:7 models"}


def test_fix_changes_the_file_alone_and_says_how(desk: Path) -> None:
    result = run("--fix")
    assert result.exit_code == 0, result.output
    assert "changed config.properties: line 6: batch_size is batchSize of m 1.0, in models" in result.output
    assert "nothing is wrong" in result.output
    text = (desk / "config.properties").read_text()
    assert text.startswith(
        BROKEN.partition("batch_size")[0] + "# (TorchServe ignores it here: see models) batch_size=8\n"
    )
    assert '"batchSize":8' in text
    assert run("--fix").exit_code == 0
    assert (desk / "config.properties").read_text() == text


def test_without_fix_nothing_is_written(desk: Path) -> None:
    before = {path: path.read_bytes() for path in desk.rglob("*") if path.is_file()}
    run()
    assert {path: path.read_bytes() for path in desk.rglob("*") if path.is_file()} == before


def test_what_our_own_commands_make_is_clean(desk: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.lib.verification.answer_one", lambda *_, **__: {"card": {}})
    made = CliRunner().invoke(APP, ["build", str(tiny_model), "--name", "tiny"])
    assert made.exit_code == 0, made.output
    (desk / "model_store" / "m.mar").unlink()
    models = {"tiny": {"archive": "tiny.mar", "version": "1.0", "workers": 2}}
    for auth in ("token", "none"):
        Path("serving.yaml").write_text(json.dumps({"server": {"auth": auth}, "models": models}))
        assert CliRunner().invoke(APP, ["configure", "--serving", "serving.yaml"]).exit_code == 0
        result = run("--ts-config", "config/config.properties")
        assert (result.exit_code, "nothing is wrong" in result.output) == (0, True), result.output


def test_a_store_alone(desk: Path) -> None:
    write_archive(desk / "model_store" / "n.mar", name="n", config="batch_size: 4\n")
    found = as_json("--model-store", "model_store")
    assert {finding["code"] for finding in found["findings"]} >= {"yaml-key"}
    assert [model["name"] for model in found["models"]] == ["m", "n"]


def test_an_unreadable_archive_is_named_and_the_rest_is_told(desk: Path) -> None:
    (desk / "model_store" / "n.mar").write_bytes(b"PK\x03\x04")
    result = run()
    assert result.exit_code == 2
    assert "archive-unreadable  n.mar" in result.output
    assert "ignored-key" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["--ts-config", "gone.properties"],
        ["--ts-config", "model_store"],
        ["--model-store", "gone"],
        ["--log", "gone.log"],
        ["--management", "http://127.0.0.1:1"],
        ["--management", "nonsense:"],
        ["--management", "http://[::1"],
        ["--management", "http://127.0.0.1:99999"],
        ["--management", "http://127.0.0.1:1", "--token", "k\u20acy\n"],
    ],
)
def test_what_cannot_be_read(desk: Path, arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert "error: " in result.output
    told = run("--json", *arguments)
    assert told.exit_code == 2
    assert json.loads(told.stdout)["unreadable"]


def test_nothing_to_look_at(desk: Path) -> None:
    (desk / "config.properties").unlink()
    result = run()
    assert result.exit_code == 2
    assert "name one with --ts-config FILE" in result.output


class Server:
    """Answers as a TorchServe with m 1.0; `methods` are those it was called with."""

    def __init__(self, **changes: Any) -> None:
        self.methods: set[str] = set()
        self.model = {"modelName": "m", "modelVersion": "1.0", "modelUrl": "m.mar", "minWorkers": 1, "maxWorkers": 1,
                      "batchSize": 1, "maxBatchDelay": 5, "loadedAtStartup": True,
                      "workers": [{"id": "9000", "status": "READY", "pid": 1}],
                      "jobQueueStatus": {"remainingCapacity": 100, "pendingRequests": 0}, **changes}  # fmt: skip

    def __call__(self, method: str, path: str) -> Reply:
        self.methods.add(method)
        listed = path.startswith("/models?")
        return 200, json.dumps({"models": [self.model]} if listed else [self.model]).encode()


def test_a_running_server_is_compared_and_only_read(desk: Path) -> None:
    server = Server(batchSize=32, workers=[])
    with serve(server) as url:
        found = as_json("--ts-config", "config.properties", "--management", url, "--token", "t")
        result = run("--management", url)
    codes = {finding["code"] for finding in found["findings"]}
    assert codes >= {"server-differs", "server-health", "ignored-key"}
    assert found["server"][0]["batch_size"]["value"] == 32
    assert "m 1.0 on the server (0 of 1 workers ready)" in result.output
    assert server.methods == {"GET"}


def test_a_server_as_the_files_have_it(desk: Path) -> None:
    with serve(Server()) as url:
        found = as_json("--ts-config", "config.properties", "--management", url)
    assert [finding["code"] for finding in found["findings"]] == ["ignored-key"]
    assert found["server"][0]["max_batch_delay"] == {"value": 5, "source": "config.properties"}


@pytest.mark.parametrize("scheme", ["http://", ""])
def test_a_server_here_is_held_against_this_machine(desk: Path, scheme: str) -> None:
    """However its URL is written."""
    text = (
        BROKEN.replace("batch_size=8\n", "")
        .replace('"maxWorkers":1', '"maxWorkers":8')
        .replace('Workers":1', 'Workers":8')
    )
    (desk / "config.properties").write_text(text)
    workers = [{"id": str(9000 + i), "status": "READY", "pid": 1 + i} for i in range(8)]
    with serve(Server(minWorkers=8, maxWorkers=8, workers=workers)) as url:
        address = scheme + url.removeprefix("http://")
        found = as_json("--ts-config", "config.properties", "--management", address)
    assert "workers-over-cores" in {finding["code"] for finding in found["findings"]}


def test_a_server_without_models(desk: Path) -> None:
    with serve(lambda *_: (200, b'{"models": []}')) as url:
        alone, beside = run("--management", url), run("--management", url, "--ts-config", "config.properties")
    assert (alone.exit_code, beside.exit_code) == (0, 1)
    assert "the server runs no models" in alone.output
    assert "error server-missing  m 1.0" in beside.output


def test_a_wrong_token(desk: Path) -> None:
    with serve(lambda *_: refusal(400, "InvalidKeyException", "Token Authorization failed.")) as url:
        assert run("--management", url, "--token", "wrong").exit_code == 2


def test_a_log(desk: Path) -> None:
    Path("ts_log.log").write_text(
        "2026-11-29T18:47:20,465 [INFO ] W-9001-m_1.0 org.pytorch.serve.wlm.WorkerThread - Retry worker: 9001 in 1 s"
        "econds.\n"
    )
    found = as_json("--log", "ts_log.log")
    assert [finding["code"] for finding in found["findings"]] == ["log-worker-died"]


def test_control_characters_do_not_reach_the_terminal(desk: Path) -> None:
    (desk / "config.properties").write_bytes(b'\x1b[31mkey=\\ud800\nmodels={"\\ud800\\u001b":{}}\n')
    result = run()
    assert result.exit_code == 1
    assert "\x1b" not in result.output
    assert "unknown-key" in result.output


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(
    st.binary(max_size=60)
    | st.lists(st.sampled_from([*BROKEN.splitlines(), "models={", "}", "a=\\", "model_store=\\u0000", "models=\\u12"]))
    .map("\n".join)
    .map(str.encode)
)
def test_no_bytes_in_the_file_break_it(desk: Path, content: bytes) -> None:
    for options in ((), ("--fix",), ("--json",)):
        (desk / "config.properties").write_bytes(content)
        result = run(*options)
        assert result.exit_code in (0, 1, 2), result.exception
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
