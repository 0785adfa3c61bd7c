"""Scaling, registering and unregistering on a real TorchServe, under load: what fails a request and what does not."""

import inspect
import json
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from handlers import parking
from scripts import workers
from scripts.lib.arrivals import arrivals
from scripts.lib.errors import UserError
from scripts.lib.inference import InferenceClient
from scripts.lib.management import ApiError, ManagementClient
from scripts.lib.scaling import Scaler
from scripts.lib.server import TorchServe
from tests.e2e.archives import write_archive
from tests.e2e.conftest import CLI, REPOSITORY, serving_mapping, start_server

# A handler that needs a while, without and with the knowledge of how to step aside.
SLOW = """
import json, os, time

class Slow:
    def __init__(self):
        self.initialized = False

    def initialize(self, context):
        self.initialized = True

    def handle(self, rows, context):
        time.sleep(0.3)
        return [json.dumps({"pid": os.getpid(), "batch": len(rows)}).encode() for _ in rows]
"""
PARKABLE = (
    inspect.getsource(parking)
    + "\nfrom ts.protocol.otf_message_handler import send_intermediate_predict_response\n"
    + SLOW.replace(
        "        time.sleep(0.3)",
        """        headers = context.get_all_request_header(0)
        if headers.get("describe") == "True" and not rows[0]:
            duration = seconds(headers)
            body = json.dumps({"worker": worker(parked=duration > 0)}).encode()
            if duration:
                send_intermediate_predict_response([body], context.request_ids, "parked", 200, context)
                hold(duration)
            return [body]
        time.sleep(0.3)""",
    )
)
WORKERS = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchServe]:
    """Three workers of a parkable handler, one of a stubborn one, and archives to register."""
    directory = tmp_path_factory.mktemp("workers")
    store = directory / "store"
    store.mkdir()
    write_archive(store / "slow.mar", name="slow", source=PARKABLE)
    write_archive(store / "slow2.mar", name="slow", version="2.0", source=PARKABLE)
    write_archive(store / "stubborn.mar", name="stubborn", source=SLOW)
    write_archive(store / "spare.mar", name="spare", version="3.0", source=SLOW)
    write_archive(store / "dies.mar", name="dies", source=SLOW.replace("self.initialized = True", "os._exit(3)"))
    models = {
        "slow": {"archive": "slow.mar", "version": "1.0", "workers": WORKERS, "batch_size": 2, "queue": 100},
        "stubborn": {"archive": "stubborn.mar", "version": "1.0", "workers": 2, "batch_size": 2, "queue": 100},
    }
    mapping = serving_mapping(store, models)
    (directory / "serving.yaml").write_text(json.dumps(mapping))  # JSON is YAML
    with start_server(directory, mapping) as running:
        yield running


@pytest.fixture
def client(server: TorchServe) -> ManagementClient:
    return ManagementClient(server.urls.management, server.management_key)


@pytest.fixture
def where(server: TorchServe) -> dict[str, Any]:
    """Options that lead a verb to the server."""
    return {"management": server.urls.management, "token": server.management_key}


def cli(server: TorchServe, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a command against the server, as a person does."""
    assert server.management_key
    return subprocess.run(
        [*CLI, *arguments, "--management", server.urls.management, "--token", server.management_key],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


class Load:
    """Clients that never pause; a context that counts what they were answered."""

    def __init__(self, server: TorchServe, name: str = "slow", clients: int = 8, version: str | None = None) -> None:
        self.server, self.name, self.version = server, name, version
        self.answers: Counter[int | str] = Counter()
        self._going = True
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]

    def _run(self) -> None:
        client = InferenceClient(self.server.urls.inference, self.server.inference_key, timeout=20)
        while self._going:
            try:
                key: int | str = client.predict(self.name, b'{"text": "x"}', version=self.version).status
            except UserError as error:
                key = str(error)
            self.answers[key] += 1
        client.close()

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        time.sleep(1)
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(1)
        self._going = False
        for thread in self._threads:
            thread.join()


def test_scaling_down_and_up_under_load_fails_no_request(server: TorchServe, client: ManagementClient) -> None:
    with Load(server) as load:
        for count in (2, WORKERS, 1, WORKERS):
            model = Scaler(client, "slow", "1.0", timeout=60).to(count)
            assert model.ready == len(model.workers) == count
            time.sleep(0.5)
    assert set(load.answers) == {200}
    assert load.answers[200] > 50


def test_the_workers_that_are_left_are_the_first(client: ManagementClient) -> None:
    before = client.describe("slow").workers
    after = Scaler(client, "slow", "1.0").to(2).workers
    assert [worker.pid for worker in after] == [worker.pid for worker in before[:2]]


def test_a_worker_that_is_not_killed_goes_back_to_work(
    server: TorchServe, client: ManagementClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.lib.scaling.HOLD", 2.0)
    scaler = Scaler(client, "slow", "1.0")
    pids = [worker.pid for worker in scaler.to(WORKERS).workers]
    while not scaler._parked:
        scaler._park(pids[2:], ready=WORKERS, timeout=10)
    with Load(server) as load:
        time.sleep(2)
    assert set(load.answers) == {200}
    assert [worker.pid for worker in client.describe("slow").workers] == pids


def stubborn(server: TorchServe, client: ManagementClient, timeout: float = 60.0) -> tuple[Scaler, list[str]]:
    said: list[str] = []
    count = arrivals(server.urls.metrics, "stubborn", "1.0", default=True)
    return Scaler(client, "stubborn", "1.0", timeout, said.append, count), said


def test_a_handler_that_cannot_be_parked_is_scaled_when_no_request_comes(
    server: TorchServe, client: ManagementClient
) -> None:
    scaler, said = stubborn(server, client)
    assert scaler.to(1).ready == 1
    assert any("runs for more than 2 s may fail" in line for line in said)
    scaler.to(2)


def test_requests_that_keep_coming_are_an_error_and_nothing_is_killed(
    server: TorchServe, client: ManagementClient
) -> None:
    pids = [worker.pid for worker in client.describe("stubborn").workers]
    # Two clients, two workers: the queue is always empty.
    with Load(server, "stubborn", clients=2) as load, pytest.raises(UserError, match="keep coming"):
        stubborn(server, client, timeout=4)[0].to(1)
    assert set(load.answers) == {200}
    assert [worker.pid for worker in client.describe("stubborn").workers] == pids


def test_now_kills_at_once(server: TorchServe, client: ManagementClient) -> None:
    with Load(server):
        begun = time.monotonic()
        assert Scaler(client, "slow", "1.0").to(2, now=True).ready == 2
        assert time.monotonic() - begun < 2
    Scaler(client, "slow", "1.0").to(WORKERS)


def test_scale_on_the_command_line(server: TorchServe) -> None:
    done = cli(server, "scale", "slow", "2")
    assert (done.returncode, done.stdout) == (0, "slow 1.0: 2 workers are ready\n"), done.stderr
    assert "1 of 3 workers finish what they run" in done.stderr
    missing = cli(server, "scale", "nothing", "2")
    assert missing.returncode == 1
    assert "no model nothing" in missing.stderr


def test_status_names_sources_and_differences(
    server: TorchServe, where: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    serving = Path(server.work_dir).parent / "serving.yaml"
    workers.scale("slow", WORKERS, serving=serving, **where)
    capsys.readouterr()
    workers.status(**where, serving=serving, as_json=True)
    report = json.loads(capsys.readouterr().out)
    slow = next(model for model in report["models"] if model["name"] == "slow")
    assert report["warnings"] == []
    assert slow["batch_size"] == {"value": 2, "source": "config.properties"}
    assert slow["queue"] == {"value": 100, "source": "config.properties"}
    assert slow["workers"] == {"value": WORKERS, "source": "config.properties"}
    workers.scale("slow", 2, serving=serving, **where)
    workers.status(**where, serving=serving)
    said = capsys.readouterr()
    assert "2/2 ready (REST)" in said.out
    assert "warning: slow: workers is 2 (REST), declared is 3" in said.err


def test_without_a_worker_requests_are_refused_at_once(
    server: TorchServe, where: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    workers.scale("stubborn", 0, **where)
    assert "every request gets 503" in capsys.readouterr().err
    answer = InferenceClient(server.urls.inference, server.inference_key, timeout=5).predict("stubborn", b"{}")
    assert answer.status == 503
    workers.status(**where)
    assert "stubborn 1.0 has no worker" in capsys.readouterr().err
    workers.scale("stubborn", 1, **where)


def test_register_and_unregister(
    client: ManagementClient, where: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    workers.register(Path("spare.mar"), workers=1, batch_size=7, max_batch_delay=9, **where)
    assert "spare 3.0: 1 worker is ready, batches of at most 7 after 9 ms" in capsys.readouterr().out
    model = client.describe("spare")
    assert (model.batch_size, model.max_batch_delay, model.ready) == (7, 9, 1)
    with pytest.raises(ApiError) as caught:
        workers.register(Path("spare.mar"), **where)
    assert "unregister it first" in caught.value.hint
    workers.unregister("spare", **where)
    assert "spare" not in {model.model_name for model in client.list_models()}


def test_registering_what_is_not_there_or_does_not_start(where: dict[str, Any], client: ManagementClient) -> None:
    with pytest.raises(UserError, match=r"nothing\.mar"):
        workers.register(Path("nothing.mar"), **where)
    with pytest.raises(UserError, match="dies"):
        workers.register(Path("dies.mar"), timeout=60, **where)
    assert "dies" not in {model.model_name for model in client.list_models()}


def test_a_second_version_takes_over_under_load(
    server: TorchServe, client: ManagementClient, where: dict[str, Any]
) -> None:
    with Load(server) as load:
        workers.register(Path("slow2.mar"), name="slow", default=True, **where)
        assert client.describe("slow").model_version == "2.0"
        assert {model.model_version for model in client.versions("slow")} == {"1.0", "2.0"}
        with pytest.raises(UserError, match=r"versions 1\.0, 2\.0"):
            workers.unregister("slow", **where)
        with pytest.raises(UserError, match="the default version"):
            workers.unregister("slow", version="2.0", **where)
        time.sleep(1)
        workers.unregister("slow", version="1.0", **where)
    assert set(load.answers) == {200}


def test_the_list_is_read_page_by_page(client: ManagementClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.lib.management._PAGE", 1)
    assert [model.model_name for model in client.list_models()] == ["slow", "stubborn"]


def test_refusals_say_what_is_wrong(server: TorchServe, client: ManagementClient) -> None:
    for token in (None, "wrong", server.inference_key):
        with pytest.raises(ApiError, match="missing or wrong token"):
            ManagementClient(server.urls.management, token).list_models()
    with pytest.raises(ApiError, match="no model nothing"):
        client.describe("nothing")
    with pytest.raises(ApiError, match=r"model slow has no version 9\.9"):
        client.describe("slow", "9.9")
    with pytest.raises(UserError, match="not its management API"):
        ManagementClient(server.urls.metrics, server.management_key).list_models()


def test_the_inference_client(server: TorchServe, where: dict[str, Any]) -> None:
    client = InferenceClient(server.urls.inference, server.inference_key)
    version = ManagementClient(where["management"], where["token"]).describe("slow").model_version
    assert client.ping()
    assert client.probe("slow")
    assert not client.probe("nothing")
    answer = client.predict("slow", b"{}", version=version, path="v1/embeddings")
    assert answer.status == 200
    assert json.loads(answer.body)["batch"] == 1
    with pytest.raises(UserError, match="token"):
        InferenceClient(server.urls.inference, "wrong").probe("slow")


def test_unregistering_at_once_leaves_the_queue_unanswered(server: TorchServe, client: ManagementClient) -> None:
    """Why `unregister` waits: a fact about TorchServe, to be noticed when it changes."""
    client.register("spare.mar", name="spare", workers=1, batch_size=1, max_batch_delay=1)
    results: list[int | None] = []

    def ask() -> None:
        try:
            url = f"{server.urls.inference}/predictions/spare"
            results.append(requests.post(url, data=b"x", headers=server.headers(), timeout=5).status_code)
        except requests.Timeout:
            results.append(None)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(0.4)
    client.unregister("spare")
    for thread in threads:
        thread.join()
    assert results.count(None) >= 3
