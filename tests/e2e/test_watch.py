"""A real Prometheus on a real server: every query of rules and dashboard finds what it asks for. And the logs."""

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml
from typer.testing import CliRunner

from scripts.__main__ import app
from scripts.lib import archive
from scripts.lib.addresses import free_ports
from scripts.lib.recipe import Order, prepare
from scripts.lib.server import TorchServe
from scripts.lib.source import Source
from tests import queries
from tests.e2e.conftest import serving_mapping, start_server
from tests.generation_models import tiny_llama

PROMETHEUS = shutil.which("prometheus")
SECRET = "xyzzysecret"
# Fails on a text that is asked to, quoting it, and runs out of memory on more than three texts at once
HANDLER = """
import logging
from handlers.embedding import EmbeddingHandler

class TroubledHandler(EmbeddingHandler):
    def forward(self, encodings, precise):
        if len(encodings) > 3:
            raise MemoryError
        return super().forward(encodings, precise)

    def render(self, request, rows, encodings):
        if any("fail" in item for item in request.items):
            raise ValueError(f"cannot render {request.items}")
        return super().render(request, rows, encodings)
"""
# TorchServe's own collector on a machine with a GPU, whose driver this stands in for
COLLECTOR = """
import logging, sys, types
nvgpu, pynvml, list_gpus = (types.ModuleType(name) for name in ("nvgpu", "pynvml", "nvgpu.list_gpus"))
nvgpu.gpu_info = lambda: [{"index": "0", "mem_used_percent": 25.0, "mem_used": 4096}]
list_gpus.device_statuses = lambda: [{"utilization": 75}]
nvgpu.list_gpus = list_gpus
sys.modules |= {"nvgpu": nvgpu, "pynvml": pynvml, "nvgpu.list_gpus": list_gpus}
from ts.metrics import system_metrics
from ts.metrics.process_memory_metric import check_process_mem_usage
logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
system_metrics.collect_all(system_metrics, 1)
check_process_mem_usage(sys.stdin)
"""


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchServe]:
    """An encoder and a decoder, with JSON logs and a GPU that is made up."""
    work, store = tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("store")
    (work / "troubled.py").write_text(HANDLER)
    (work / "collector.py").write_text(COLLECTOR)
    llama = tiny_llama(work / "llama", positions=512)
    for order in (
        Order(source=Source(tiny_model, "bert"), name="bert", version="1.0", handler=work / "troubled.py"),
        Order(source=Source(llama, "llama"), name="llama", version="1.0", overrides={"cache_gib": 0.01}),
    ):
        (work / order.name).mkdir(exist_ok=True)
        with pytest.MonkeyPatch.context() as patch:  # the process that imports the handler takes seconds
            patch.setattr("scripts.lib.user_handler.check_import", lambda *_: None)
            recipe = prepare(order, work / order.name)
        archive.write(store / f"{order.name}.mar", recipe.contents, recipe.members)
    models = {
        "bert": {"archive": "bert.mar", "version": "1.0", "batch_size": 8, "max_batch_delay": 5, "queue": 16},
        "llama": {"archive": "llama.mar", "version": "1.0", "batch_size": 4, "max_batch_delay": 1, "queue": 16},
    }
    extra = {"system_metrics_cmd": str(work / "collector.py"), "metric_time_interval": "5"}
    mapping = serving_mapping(store, models, log_format="json", extra=extra)
    with start_server(tmp_path_factory.mktemp("server"), mapping) as server:
        yield server


def ask(server: TorchServe, path: str, **request: Any) -> int:
    """Send a request; returns the status."""
    headers = {**server.headers(), **request.pop("headers", {})}
    method = request.pop("method", "POST")
    url = f"{server.urls.inference}/predictions/{path}"
    return requests.request(method, url, headers=headers, timeout=60, **request).status_code


def traffic(server: TorchServe) -> list[int]:
    """Some of everything: texts that are right, long, wrong, that fail; more than the queue holds; generation."""
    texts: list[Any] = [
        {"text": "the cat"},
        {"texts": ["a dog runs", "hello " * 100] * 4},
        {"text": 3},
        {"text": "fail"},
    ]
    prompt = {"prompt": "the old house " * 8, "parameters": {"max_tokens": 8, "ignore_eos": True}}
    with ThreadPoolExecutor(40) as pool:
        sent = [pool.submit(ask, server, "bert", json=texts[number % 4]) for number in range(40)]
        sent += [pool.submit(ask, server, "llama", json=prompt) for _ in range(6)]
        return [each.result() for each in sent]


@pytest.fixture(scope="module")
def prometheus(server: TorchServe, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus with our rules that scrapes the server every second, after some traffic; its API's URL."""
    if PROMETHEUS is None:
        pytest.skip("prometheus (Debian package prometheus) is not installed")
    directory = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load(queries.PROMETHEUS.read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(queries.RULES)]
    (scraped,) = config["scrape_configs"]
    scraped["static_configs"] = [{"targets": [server.urls.metrics.removeprefix("http://")]}]
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    (port, *_) = free_ports()
    words = [
        PROMETHEUS,
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield f"http://127.0.0.1:{port}/api/v1"
    finally:
        process.terminate()
        process.wait(20)


def vector(api: str, expr: str) -> list[tuple[dict[str, str], float]]:
    """What a query yields now: labels and value of each series."""
    answer = requests.get(f"{api}/query", params={"query": expr}, timeout=10)
    assert answer.status_code == 200, (expr, answer.text)
    data = answer.json()["data"]
    assert data["resultType"] == "vector", expr
    return [(each["metric"], float(each["value"][1])) for each in data["result"]]


def most(unit: str) -> float:
    """The largest value that a unit allows."""
    return {"percentunit": 1.0, "percent": 100.0}.get(unit, float("inf"))


def faults(api: str) -> list[str]:
    """What is empty, or is not of its kind, among all queries and all series that they name."""
    units = {panel["title"]: panel["fieldConfig"]["defaults"].get("unit", "") for panel in queries.panels()}
    found = []
    for query in [*queries.rules(), *queries.dashboard("20s")]:
        highest = 1.0 if query.alert or "ratio" in query.record else most(units.get(query.where, ""))
        for text in [query.value, *(selector.text for selector in queries.selectors(query.expr))]:
            series = vector(api, text)
            if not series:
                found.append(f"{query.where}: {text}: nothing")
            if text == query.value:
                found += [f"{query.where}: {text}: {labels} is {value}" for labels, value in series
                          if not 0 <= value <= highest]  # fmt: skip
    return found


def test_every_query_finds_what_it_asks_for(server: TorchServe, prometheus: str) -> None:
    deadline, left, statuses = time.monotonic() + 90, ["not yet asked"], set[int]()
    while left and time.monotonic() < deadline:
        statuses.update(traffic(server))
        try:
            left = faults(prometheus)
        except requests.ConnectionError:  # it starts
            time.sleep(0.2)
    assert left == []
    assert {200, 400, 500, 503} <= statuses
    targets = requests.get(f"{prometheus}/targets", timeout=10).json()["data"]["activeTargets"]
    assert [(each["health"], each["lastError"]) for each in targets] == [("up", "")]
    rules = requests.get(f"{prometheus}/rules", timeout=10).json()["data"]["groups"]
    assert {rule["health"] for group in rules for rule in group["rules"]} == {"ok"}


def errors(api: str) -> dict[tuple[tuple[str, str], ...], float]:
    """The errors that Prometheus has counted, by model, status and code."""
    name = "sum by (model_name, status, code) (batchserve_errors_total)"
    return {tuple(sorted(labels.items())): value for labels, value in vector(api, name)}


def settled(api: str) -> dict[tuple[tuple[str, str], ...], float]:
    """Those errors when the last of the traffic before has been handed over and scraped."""
    deadline, found = time.monotonic() + 30, errors(api)
    while time.monotonic() < deadline:
        time.sleep(3)
        last, found = found, errors(api)
        if found == last:
            return found
    pytest.fail("errors are counted that nobody makes")


def test_values_are_those_of_the_traffic(server: TorchServe, prometheus: str) -> None:
    """Counters of Prometheus against what was sent."""
    before = settled(prometheus)
    refused = [ask(server, "bert", json={"text": 3}) for _ in range(7)]
    assert set(refused) == {400}
    wanted = (("code", "invalid_type"), ("model_name", "bert"), ("status", "400"))
    deadline, grown = time.monotonic() + 30, 0.0
    while grown < 7 and time.monotonic() < deadline:
        time.sleep(0.5)
        grown = errors(prometheus)[wanted] - before[wanted]
    assert grown == 7
    assert vector(prometheus, "max by (DeviceId) (GPUUtilization)") == [({"DeviceId": "0"}, 75.0)]
    assert {labels["model_name"]: value for labels, value in vector(prometheus, "batchserve_batch_size_limit")} == {
        "bert": 8,
        "llama": 4,
    }


def unmeasured(server: TorchServe) -> list[str]:
    """Workers whose memory TorchServe has not yet read, which it does at intervals."""
    versions = [model for name in ("bert", "llama") for model in server.management.versions(name)]
    return [worker.id for model in versions for worker in model.workers if not worker.memory_usage > 0]


def test_top_sees_the_traffic(server: TorchServe) -> None:
    deadline = time.monotonic() + 60
    while unmeasured(server) and time.monotonic() < deadline:
        time.sleep(0.2)
    words = ["top", "--once", "--json", "--interval", "4", "--management", server.urls.management]
    words += ["--metrics", server.urls.metrics, "--token", str(server.management_key)]
    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(CliRunner().invoke, app, words)
        while not seen.done():
            traffic(server)
    assert seen.result().exit_code == 0, seen.result().output
    told = json.loads(seen.result().stdout)
    assert told["fault"] == ""
    assert [gpu["busy"] for gpu in told["gpus"]] == [75.0]
    bert, llama = told["models"]
    assert bert["requests_per_s"] > 0
    assert bert["latency_ms"] > bert["queue_ms"] > 0
    assert bert["batching"]["limit"] == 8
    assert 1 <= bert["batching"]["effective_batch_size"] <= 8
    assert sum(bert["batching"]["window"]["batch_sizes"].values()) == bert["batching"]["window"]["batches"]
    assert {"invalid_type", "handler_failure"} <= set(bert["batching"]["window"]["errors"])
    assert llama["generation"]["generated_tokens_per_s"] > 0
    assert llama["generation"]["first_token_ms"]["p95"] > 0
    assert all(worker["memory_usage"] > 0 for model in (bert, llama) for worker in model["workers"])


def send_secrets(server: TorchServe) -> list[str]:
    """Send a text in every place that a client may; returns the ids of the requests."""
    texts = {"text": SECRET}
    requested: list[dict[str, Any]] = [
        {"json": texts},
        {"json": {"texts": [f"fail {SECRET}"]}},
        {"json": {"text": SECRET, SECRET: 1}},
        {"json": {"text": [SECRET]}},
        {"data": f'{{"text": "{SECRET}', "headers": {"Content-Type": "application/json"}},
        {"data": SECRET, "headers": {"Content-Type": "text/plain"}},
        {"data": SECRET, "headers": {"Content-Type": f"text/{SECRET}"}},
        {
            "data": f"%{SECRET}&\n\tat a.b({SECRET})".encode(),
            "headers": {"Content-Type": "application/x-www-form-urlencoded"},
        },
        {"data": texts},
        {"files": {"data": (SECRET, SECRET)}},
        {"params": texts},
        {"params": texts, "method": "GET"},
        {"json": texts, "headers": {"Authorization": f"Bearer {SECRET}"}},
        {"json": texts, "headers": {"x-request-id": SECRET}},
    ]
    generation: list[dict[str, Any]] = [
        {"json": {"prompt": SECRET, "parameters": {"max_tokens": 4}}},
        {"json": {"prompt": SECRET, "parameters": {"stop": {SECRET: 1}}}},
        {"data": f'{{"prompt": "{SECRET}', "headers": {"Content-Type": "application/json"}},
        {"json": {"messages": [{"role": SECRET, "content": SECRET}]}, "path": "/1.0/v1/chat/completions"},
    ]
    ids = []
    for model, bodies in (("bert", requested), ("llama", generation)):
        for body in bodies:
            headers = {**server.headers(), **body.pop("headers", {})}
            url = f"{server.urls.inference}/predictions/{model}{body.pop('path', '')}"
            answer = requests.request(body.pop("method", "POST"), url, headers=headers, timeout=60, **body)
            ids.append(answer.headers["x-request-id"])
    return ids


def test_logs_are_json_with_request_ids_and_without_request_texts(server: TorchServe) -> None:
    ids = send_secrets(server)
    logs = server.work_dir / "logs"
    deadline = time.monotonic() + 20
    while ids[-1] not in (written := server.log_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    every = [line for path in logs.rglob("*") for line in path.read_text(errors="replace").splitlines()]
    assert [line for line in every if "xyzzy" in line] == []
    lines = [json.loads(line) for line in written.splitlines()]
    assert all({"time", "level", "thread", "logger", "message"} <= set(line) for line in lines)
    named = {line["request_id"]: line for line in lines if "request_id" in line}
    assert set(ids[:7]) <= set(named), "the next one is a form that the frontend cannot read"
    refused = [line for line in lines if line["logger"] == "MODEL_LOG" and line.get("request_id") == ids[1]]
    assert [line["message"] for line in refused] == [f"request {ids[1]} is refused: 500 handler_failure"]
    assert any("troubled.py" in line["message"] for line in lines), "where it failed is told"
    assert any(line["message"] == f"request {ids[-4]} is answered" for line in lines)
    assert not any("[METRICS]" in line["message"] for line in lines)
    asked = [json.loads(line) for line in (logs / "access_log.log").read_text().splitlines()]
    assert {"time", "client", "method", "path", "status", "milliseconds"} == set(asked[-1])
    assert any(line["path"] == "/predictions/bert" and line["method"] == "GET" for line in asked)
    assert all(isinstance(line["status"], int) and re.fullmatch(r"[\d.]+:\d+", line["client"]) for line in asked)


@pytest.mark.parametrize("path", [b'/a"b', b"/a\\b", b"/%22%0a%00", b"/\xfc\xe2\x98\x83\x01", b'/x" 200 1', b"/?a=1 2"])
def test_a_strange_request_leaves_the_log_json(server: TorchServe, path: bytes) -> None:
    access = server.work_dir / "logs" / "access_log.log"
    before = len(access.read_text(encoding="utf-8").splitlines())
    host, port = server.urls.inference.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection, suppress(ConnectionError):
        connection.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        while connection.recv(4096):
            pass
    deadline = time.monotonic() + 10
    while len(lines := access.read_text(encoding="utf-8").splitlines()) == before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(lines) > before
    for line in lines[before:]:
        json.loads(line)
