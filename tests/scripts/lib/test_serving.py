"""serving.yaml: what it takes, and what it says when it does not."""

import re
from pathlib import Path
from typing import Any

import pytest

from scripts.lib.errors import UserError
from scripts.lib.serving import Serving, is_loopback

MODEL = {"archive": "minilm.mar", "version": "1.0"}
THE_ISSUES_EXAMPLE = """
server: {host: 127.0.0.1, inference_port: 8080, management_port: 8081, metrics_port: 8082, grpc_inference_port: 7070,
         grpc_management_port: 7071, auth: token, model_store: model_store}      # auth: token | none (none: loopback only)
models:
  minilm: {archive: minilm.mar, version: "1.0", workers: 2, batch_size: 32, max_batch_delay: 2, queue: 1000}   # delay in ms
"""  # noqa: E501
SHIPPED = Path(__file__).resolve().parents[3] / "config" / "serving.yaml"


def load(tmp_path: Path, text: str) -> Serving:
    path = tmp_path / "serving.yaml"
    path.write_text(text, encoding="utf-8")
    return Serving.load(path)


def declared(server: dict[str, Any] | None = None, **model: Any) -> Serving:
    return Serving.from_mapping({"server": server or {}, "models": {"minilm": {**MODEL, **model}}}, "s.yaml")


def test_a_short_form_and_the_shipped_file_say_the_same(tmp_path: Path) -> None:
    example = load(tmp_path, THE_ISSUES_EXAMPLE)
    assert example == Serving.load(SHIPPED)
    assert example.models["minilm"].workers == 2
    assert example.server.model_store == Path("model_store")


def test_defaults_are_loopback_with_tokens() -> None:
    server = declared().server
    assert (server.host, server.auth, server.model_api_enabled) == ("127.0.0.1", "token", True)
    assert server.token_expiration_min >= 365 * 24 * 60


def test_without_tokens_models_cannot_be_registered_unless_said_so() -> None:
    assert not declared({"auth": "none"}).server.model_api_enabled
    assert declared({"auth": "none", "model_api": True}).server.model_api_enabled


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"batchsize": 8}, "models.minilm.batchsize: unknown key; did you mean batch_size? (allowed: archive, version"),
        ({"zzz": 8}, "models.minilm.zzz: unknown key (allowed: archive"),
        (
            {"max_batch_delay": 0},
            "models.minilm.max_batch_delay: must be at least 1 (ms): TorchServe takes 0 for unset",
        ),
        ({"max_batch_delay": -1}, "models.minilm.max_batch_delay: must be at least 1, not -1"),
        ({"batch_size": 0}, "models.minilm.batch_size: must be at least 1, not 0"),
        ({"batch_size": "8"}, "models.minilm.batch_size: must be a whole number, not '8'"),
        ({"batch_size": 8.5}, "models.minilm.batch_size: must be a whole number, not 8.5"),
        ({"workers": True}, "models.minilm.workers: must be a whole number, not True"),
        ({"version": 1.0}, 'models.minilm.version: must be text: write "1.0" in quotation marks'),
        ({"version": ""}, "models.minilm.version: must be letters"),
        ({"archive": "minilm"}, "models.minilm.archive: must be the name of a .mar file"),
        ({"archive": "a/minilm.mar"}, "models.minilm.archive: must be the bare name"),
        ({"archive": "a,b.mar"}, "models.minilm.archive: must be the bare name"),
        ({"queue": 63, "workers": 2}, "models.minilm: queue 63 is smaller than batch_size × workers = 64"),
        ({"install_requirements": "yes"}, "models.minilm.install_requirements: must be true or false, not 'yes'"),
    ],
)
def test_a_fault_of_a_model_is_named(model: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"s.yaml: {message}")):
        declared(**model)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"port": 1}, "server.port: unknown key; did you mean"),
        ({"inference_port": 80}, "server.inference_port: must be a port from 1024 to 65535 (below 1024"),
        ({"metrics_port": 70000}, "server.metrics_port: must be a port from 1024 to 65535"),
        ({"inference_port": 8081}, "server: inference_port and management_port are both 8081"),
        ({"grpc_management_port": 8080}, "server: inference_port and grpc_management_port are both 8080"),
        ({"auth": "basic"}, "server.auth: must be 'token' or 'none', not 'basic'"),
        ({"auth": "none", "host": "0.0.0.0"}, "server: auth is none and host is 0.0.0.0"),
        ({"auth": "none", "host": "example.org"}, "server: auth is none and host is example.org"),
        ({"host": "::1"}, "server.host: must be an IPv4 address or a host name"),
        ({"host": "a b"}, "server.host: must be"),
        ({"java_heap": "2"}, "server.java_heap: must be a number and a unit"),
        ({"java_args": ["-Dx=a b"]}, "server.java_args: '-Dx=a b': each must"),
        ({"log_format": "xml"}, "server.log_format: must be 'text' or 'json', not 'xml'"),
        (
            {"log_format": "json", "java_args": ["-Dlog4j.configurationFile=/x.xml"]},
            "server: log_format is json, and java_args names another configuration",
        ),
        ({"extra": {"batch_size": 4}}, "server.extra: batch_size: TorchServe ignores it here"),
        ({"extra": {"number_of_netty_thread": 4}}, "server.extra: number_of_netty_thread: not a property that"),
        ({"extra": {"inference_address": "http://0.0.0.0:1"}}, "server.extra: inference_address: not a property"),
        ({"model_store": ""}, "server.model_store: must be the path of a directory"),
        ({"max_response_size": 2**31}, "server.max_response_size: must be at most 2147483647"),
    ],
)  # fmt: skip
def test_a_fault_of_the_server_is_named(server: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"s.yaml: {message}")):
        declared(server)


def test_others_may_come_without_tokens_when_said_by_name() -> None:
    assert declared({"auth": "none", "host": "0.0.0.0", "allow_remote": True}).server.host == "0.0.0.0"


def test_every_fault_is_in_the_message() -> None:
    with pytest.raises(UserError) as caught:
        declared({"auth": "x", "inference_port": 1}, workers=0)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: {a: {archive: a.mar, version: '1'}, a: {archive: b.mar, version: '1'}}", "line 1: a is there twice"),
        ("models:\n  a: {archive: a.mar,\n    archive: b.mar}", "line 3: archive is there twice"),
        ("models: [", "not YAML"),
        ("", "must hold the sections server and models"),
        ("- 1", "must hold the sections server and models"),
        ("server: {}", "models: missing"),
        ("models: {}", "models: must name at least one model"),
        ("models: {a: 3}", "models.a: must be a section, not 3"),
        ("models: {'a b': {archive: a.mar, version: '1'}}", "a model's name is letters"),
        ("models: {tokens: {archive: a.mar, version: '1'}}", "for its token API"),
        ("modles: {}", "modles: unknown key; did you mean models?"),
        ("models: {a: {archive: a.mar, version: 1.0}}", 'write "1.0" in quotation marks'),
        ("models: !!python/object/apply:os.system ['true']", "not YAML"),
    ],
)
def test_a_file_that_does_not_fit_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        load(tmp_path, text)
    assert "serving.yaml" in str(caught.value)


def test_a_missing_or_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        Serving.load(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="cannot be read"):
        Serving.load(tmp_path)
    (tmp_path / "latin").write_bytes(b"models: {\xe9: 1}")
    with pytest.raises(UserError, match="cannot be read"):
        Serving.load(tmp_path / "latin")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("localhost", True), ("0.0.0.0", False), ("10.0.0.1", False),
     ("localhost.example.org", False)],
)  # fmt: skip
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
