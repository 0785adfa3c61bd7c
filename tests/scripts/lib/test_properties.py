"""config.properties: escapes that Java and TorchServe's launcher both read, and what a deployment becomes."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import javaproperties
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.lib import properties
from scripts.lib.errors import UserError
from scripts.lib.serving import PORT_FIELDS, Serving

ROUND_TRIP = """
import java.io.*;
import java.nio.charset.StandardCharsets;
import java.util.*;

public class RoundTrip {
    public static void main(String[] arguments) throws IOException {
        Properties properties = new Properties();
        properties.load(new FileInputStream(arguments[0]));
        PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        for (String key : new TreeSet<>(properties.stringPropertyNames())) {
            out.print(key + "\\u0001" + properties.getProperty(key) + "\\u0002");
        }
        out.flush();
    }
}
"""

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
mappings = st.dictionaries(texts.filter(bool), texts, max_size=6)
AWKWARD = {
    "plain": "value",
    "spaces": "  two before, one after ",
    "signs": "a=b:c#d!e",
    "backslash": "C:\\store\\new",
    "unicode": "ströme/日本/😀",
    "breaks": "a\nb\tc\rd\fe",
    "empty": "",
    "# no comment": "x",
    "a key: with=signs!": "y",
    "control": "\x00\x7f\x85\xa0\u2028",
}


def declare(server: dict[str, Any] | None = None, **models: Any) -> Serving:
    models = models or {"m": {}}
    full = {name: {"archive": f"{name}.mar", "version": "1.0", **model} for name, model in models.items()}
    return Serving.from_mapping({"server": server or {}, "models": full}, "test")


@given(mappings)
def test_what_is_written_is_read_back(mapping: dict[str, str]) -> None:
    text = properties.dumps(mapping, "a comment\nof two lines = x")
    assert text.isascii()
    assert properties.loads(text) == mapping
    assert javaproperties.loads(text) == mapping


def test_a_lone_surrogate_survives() -> None:
    assert properties.loads(properties.dumps({"a": "\ud83d"})) == {"a": "\ud83d"}


def test_java_reads_what_is_written(tmp_path: Path) -> None:
    java = shutil.which("java")
    if java is None or shutil.which("javac") is None:
        pytest.skip("needs a JDK: only that runs a source file")
    source, written = tmp_path / "RoundTrip.java", tmp_path / "awkward.properties"
    source.write_text(ROUND_TRIP, encoding="utf-8")
    written.write_text(properties.dumps(AWKWARD, "comment"), encoding="ascii")
    result = subprocess.run([java, source, written], capture_output=True, check=True, timeout=120)
    pairs = result.stdout.decode().split("\2")[:-1]
    assert dict(pair.split("\1") for pair in pairs) == AWKWARD


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters="\\"), min_size=1).map(str.strip))
def test_the_launcher_reads_plain_paths_as_java_does(path: str) -> None:
    """TorchServe's launcher takes vmargs and model_store from the raw line."""
    line = properties.dumps({"model_store": f"/{path}"}).splitlines()[0]
    assert line.split("=", 1)[1].strip() == f"/{path}"


def test_every_declared_value_is_in_the_file(tmp_path: Path) -> None:
    ports = dict(zip(PORT_FIELDS, range(9001, 9006), strict=True))
    server = {
        **ports, "host": "10.1.2.3", "auth": "token", "token_expiration_min": 99, "model_store": str(tmp_path),
        "max_request_size": 1100, "max_response_size": 1200, "gpus": 1, "java_heap": "2g",
        "java_args": ["-XX:+UseSerialGC"], "model_api": False,
        "extra": {"number_of_netty_threads": 4, "async_logging": True, "cors_allowed_origin": "*"},
    }  # fmt: skip
    serving = declare(
        server,
        a={
            "workers": 2,
            "batch_size": 8,
            "max_batch_delay": 3,
            "queue": 77,
            "response_timeout": 5,
            "startup_timeout": 6,
        },
        b={"version": "2", "queue": 77},
    )
    written = properties.loads(properties.render(serving))
    models = json.loads(written.pop("models"))
    assert models == {
        "a": {"1.0": {"defaultVersion": True, "marName": "a.mar", "minWorkers": 2, "maxWorkers": 2, "batchSize": 8,
                      "maxBatchDelay": 3, "responseTimeout": 5, "startupTimeout": 6}},
        "b": {"2": {"defaultVersion": True, "marName": "b.mar", "minWorkers": 1, "maxWorkers": 1, "batchSize": 32,
                    "maxBatchDelay": 2}},
    }  # fmt: skip
    assert written == {
        "inference_address": "http://10.1.2.3:9001",
        "management_address": "http://10.1.2.3:9002",
        "metrics_address": "http://10.1.2.3:9003",
        "grpc_inference_address": "10.1.2.3",
        "grpc_management_address": "10.1.2.3",
        "grpc_inference_port": "9004",
        "grpc_management_port": "9005",
        "disable_token_authorization": "false",
        "token_expiration_min": "99",
        "enable_model_api": "false",
        "enable_envvars_config": "false",
        "allowed_urls": properties.allowed_urls(tmp_path),
        "install_py_dep_per_model": "false",
        "max_request_size": "1100",
        "max_response_size": "1200",
        "metrics_mode": "prometheus",
        "metrics_config": str(properties.METRICS_CONFIG),
        "job_queue_size": "77",
        "number_of_gpu": "1",
        "vmargs": "-Xmx2g -XX:+UseSerialGC",
        "number_of_netty_threads": "4",
        "async_logging": "true",
        "cors_allowed_origin": "*",
        "model_store": str(tmp_path),
        "load_models": "a=a.mar,b=b.mar",
    }


def test_paths_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written = properties.from_serving(declare({"model_store": "store"}))
    assert written["model_store"] == str(tmp_path / "store")
    assert Path(written["metrics_config"]).is_file()


def test_pip_runs_only_where_a_model_asks_for_it() -> None:
    assert properties.from_serving(declare(a={"install_requirements": True}))["install_py_dep_per_model"] == "true"


def test_different_queues_are_refused() -> None:
    with pytest.raises(UserError, match=r"queues differ \(a: 100, b: 200\)"):
        properties.from_serving(declare(a={"queue": 100}, b={"queue": 200}))


def test_what_torchserve_would_replace_is_refused() -> None:
    with pytest.raises(UserError, match="environment variable"):
        properties.from_serving(declare({"model_store": "/a$$HOME$$b"}))


@pytest.mark.parametrize("store", ["/plain", "/a.b/[c] (d)+$1", "/a,b", "/back\\slash", "/ünï^x", "/a{2}|b?*"])
def test_allowed_urls_match_files_of_the_store_alone(store: str) -> None:
    pattern = properties.allowed_urls(Path(store))
    assert "," not in pattern
    assert re.fullmatch(pattern, f"file://{store}/x.mar")
    for other in (f"file://{store}/sub/x.mar", "file:///etc/x.mar", "http://h/x.mar", f"http://h{store}/x.mar"):
        assert not re.fullmatch(pattern, other)


def test_reading_a_file_that_is_not_there_or_not_valid(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        properties.load(tmp_path / "none")
    (tmp_path / "bad").write_text("a=\\u12")
    with pytest.raises(UserError, match="not a properties file"):
        properties.load(tmp_path / "bad")


def test_models_of_a_parsed_file() -> None:
    assert properties.models({}) == {}
    assert list(properties.models(properties.from_serving(declare(a={}, b={})))) == ["a", "b"]


def test_the_jvm_is_small_where_there_are_few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, expected in ((2, "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"), (16, None)):
        monkeypatch.setattr(properties, "cores", lambda count=count: count)
        assert properties.from_serving(declare()).get("vmargs") == expected
        assert properties.from_serving(declare({"java_args": []})).get("vmargs") is None


def test_json_logs_are_a_configuration_that_the_launcher_can_split_off() -> None:
    server = {"log_format": "json", "java_args": ["-Da=b"]}
    first, second = properties.from_serving(declare(server))["vmargs"].split(" ")
    assert first == "-Da=b"
    name, _, uri = second.partition("=")
    assert name == "-Dlog4j.configurationFile"
    assert Path(unquote(urlsplit(uri).path)) == properties.JSON_LOG_CONFIG
    assert properties.JSON_LOG_CONFIG.is_file()
