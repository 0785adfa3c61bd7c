"""What the management client makes of servers that refuse, hang or are something else; the real one is in tests/e2e."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from scripts.lib.errors import UserError
from scripts.lib.management import ApiError, ManagementClient
from tests.fake_server import Reply, refusal, serve


def failure(reply: Reply, call: Callable[[ManagementClient], Any]) -> UserError:
    with serve(lambda *_: reply) as url, pytest.raises(UserError) as caught:
        call(ManagementClient(url))
    return caught.value


def register(client: ManagementClient) -> str:
    return client.register("a.mar", batch_size=1, max_batch_delay=1, workers=1)


MODEL = {"modelName": "m", "modelVersion": "1.0", "batchSize": 4, "aFieldOfTheFuture": {"x": 1}}


@pytest.mark.parametrize(
    ("reply", "call", "message", "hint"),
    [
        (refusal(400, "InvalidKeyException", "Token Authorization failed."), ManagementClient.list_models,
         "missing or wrong token (TorchServe answers 400, not 401)", "batchserve token management"),
        (refusal(405, "MethodNotAllowedException", "Requested method is not allowed"), register,
         "switched off", "model_api: true"),
        (refusal(405, "MethodNotAllowedException", "Requested method is not allowed"),
         lambda client: client.unregister("m"), "switched off", "enable_model_api"),
        (refusal(404, "ModelNotFoundException", "Model not found: m"), lambda client: client.describe("m"),
         "no model m", "batchserve status"),
        (refusal(404, "ModelVersionNotFoundException", "…"), lambda client: client.describe("m", "2.0"),
         "model m has no version 2.0", "batchserve status"),
        (refusal(404, "ResourceNotFoundException", "…"), ManagementClient.list_models,
         "not its management API", "--management"),
        (refusal(409, "ConflictStatusException", "Model version 1.0 is already registered for model m"), register,
         "already registered", "unregister it first"),
        (refusal(500, "InternalServerException", "Failed to start workers"), register, "Failed to start workers", ""),
        ((200, b"<html><title>nginx</title>"), ManagementClient.list_models, "is not TorchServe", "8081"),
        ((200, b""), ManagementClient.list_models, "is not TorchServe", "8081"),
        ((200, b'{"models": 3}'), ManagementClient.list_models, "unknown shape: models", ""),
        ((200, b"{}"), ManagementClient.list_models, "unknown shape: models: Field required", "8081"),
        ((200, b'{"object": "list", "data": []}'), ManagementClient.list_models, "unknown shape: models", "8081"),
        ((200, b"[]"), ManagementClient.list_models, "unknown shape: Input should be an object", "8081"),
        ((200, b"[" * 100_000), ManagementClient.list_models, "is not TorchServe", "8081"),
        ((401, b'{"code": "Unauthorized"}'), ManagementClient.list_models, "is not TorchServe", "8081"),
        ((200, b"[]"), lambda client: client.describe("m"), "empty list", ""),
        ((502, b"Bad gateway"), ManagementClient.list_models, "is not TorchServe", "8081"),
        ((302, b""), ManagementClient.list_models, "is not TorchServe", "8081"),
    ],
)  # fmt: skip
def test_a_refusal_names_its_cause(
    reply: Reply, call: Callable[[ManagementClient], Any], message: str, hint: str
) -> None:
    error = failure(reply, call)
    assert message in str(error)
    assert hint in error.hint


def test_a_refusal_keeps_what_torchserve_said() -> None:
    error = failure(refusal(503, "ServiceUnavailableException", "Queue full"), lambda client: client.describe("m"))
    assert isinstance(error, ApiError)
    assert (error.status, error.kind, error.reply) == (503, "ServiceUnavailableException", "Queue full")


def test_nothing_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(UserError, match=f"no TorchServe at {url}: nothing listens there"):
            ManagementClient(url).list_models()


def test_a_server_that_does_not_answer_in_time() -> None:
    release = threading.Event()

    def wait(*_: str) -> Reply:
        release.wait(5)
        return 200, b"{}"

    with serve(wait) as url:
        begun = time.monotonic()
        with pytest.raises(UserError, match=r"did not answer GET /models within 0\.2 s"):
            ManagementClient(url, timeout=0.2).list_models()
        assert time.monotonic() - begun < 2
        release.set()


def speaking(begin: bytes, again: bytes, pause: float, times: int = 10_000) -> tuple[str, threading.Thread]:
    """A server that begins an answer and goes on with it until its client leaves, or so often; its URL."""
    listener = socket.create_server(("127.0.0.1", 0))

    def speak() -> None:
        peer, _ = listener.accept()
        with listener, peer, contextlib.suppress(OSError):
            peer.recv(1000)
            peer.sendall(begin)
            for _ in range(times):
                peer.sendall(again)
                time.sleep(pause)

    thread = threading.Thread(target=speak)
    thread.start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}", thread


@pytest.mark.parametrize("length", [b"content-length: 100000000", b"transfer-encoding: chunked", b"connection: close"])
def test_an_answer_that_does_not_end_in_time(length: bytes) -> None:
    url, thread = speaking(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n\r\n", b"1\r\n \r\n", 0.05)
    begun = time.monotonic()
    with pytest.raises(UserError, match=r"did not answer GET /models within 0\.3 s"):
        ManagementClient(url, timeout=0.3).list_models()
    assert time.monotonic() - begun < 3
    thread.join()


def test_an_answer_that_does_not_end_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.lib.bounded.MOST_BYTES", 2**20)
    url, thread = speaking(b"HTTP/1.1 200 OK\r\n\r\n", b"[" * 2**16, 0.0)
    with pytest.raises(UserError, match="answered with more than 1 MiB"):
        ManagementClient(url).list_models()
    thread.join()


def test_an_answer_that_breaks_off() -> None:
    url, thread = speaking(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", b"[", 0.0, times=3)
    with pytest.raises(UserError, match="the connection was closed within an answer"):
        ManagementClient(url).list_models()
    thread.join()


def test_a_server_that_speaks_no_http() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def babble() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(1000)
                peer.sendall(b"SSH-2.0-OpenSSH\r\n\r\n")

        thread = threading.Thread(target=babble)
        thread.start()
        with pytest.raises(UserError, match="no TorchServe at"):
            ManagementClient(f"http://127.0.0.1:{listener.getsockname()[1]}").list_models()
        thread.join()


@pytest.mark.parametrize(
    "url", ["ftp://x", "file:///etc/passwd", "", "http://", "http://[::1", "localhost:abc", "http://x:99999", "x:0"]
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(UserError, match="not an http URL"):
        ManagementClient.at(url)


def test_a_url_is_taken_as_people_type_it() -> None:
    assert ManagementClient.at("localhost:8081/").url == "http://localhost:8081"


@pytest.mark.parametrize("token", ["key\n", "k\u20acy", "key\x1b[31m"])
def test_a_token_that_no_header_can_hold_is_refused_and_not_told(token: str) -> None:
    with pytest.raises(UserError, match="a character that no key has") as caught:
        ManagementClient("http://127.0.0.1:1", token).list_models()
    assert token not in f"{caught.value} {caught.value.hint}"


def test_fields_of_other_versions_are_ignored_and_missing_ones_have_defaults() -> None:
    with serve(lambda *_: (200, json.dumps([MODEL]).encode())) as url:
        model = ManagementClient(url).describe("m")
    assert (model.batch_size, model.max_batch_delay, model.workers, model.ready) == (4, 100, [], 0)


def test_the_list_goes_on_until_there_is_no_next_page() -> None:
    def page(_: str, path: str) -> Reply:
        start = int(parse_qs(urlsplit(path).query).get("next_page_token", ["0"])[0])
        models = [{"modelName": f"m{i}", "modelUrl": "a.mar"} for i in range(start, min(start + 100, 250))]
        token = {"nextPageToken": str(start + 100)} if start + 100 < 250 else {}
        return 200, json.dumps({**token, "models": models}).encode()

    with serve(page) as url:
        names = [model.model_name for model in ManagementClient(url).list_models()]
    assert names == [f"m{i}" for i in range(250)]


def test_a_server_that_repeats_a_page_does_not_hold_the_command() -> None:
    reply = json.dumps({"nextPageToken": "1", "models": [{"modelName": "m"}]}).encode()
    with serve(lambda *_: (200, reply)) as url:
        assert len(ManagementClient(url).list_models()) == 2


def test_what_is_sent() -> None:
    seen: list[tuple[str, str]] = []

    def answer(method: str, path: str) -> Reply:
        seen.append((method, path))
        return 200, json.dumps({"status": 'Model "a b" done\n'}).encode()

    with serve(answer) as url:
        client = ManagementClient(url)
        assert client.scale("a b", "1/0", 2) == 'Model "a b" done'
        client.set_default("m", "2.0")
        client.unregister("m", "2.0")
    assert seen == [
        ("PUT", "/models/a%20b/1%2F0?min_worker=2&max_worker=2&synchronous=false"),
        ("PUT", "/models/m/2.0/set-default"),
        ("DELETE", "/models/m/2.0"),
    ]
