"""What the inference client sends and how it takes an answer; the real server is in tests/e2e."""

import socket

import pytest

from scripts.lib.errors import UserError
from scripts.lib.inference import InferenceClient
from tests.fake_server import Reply, refusal, serve


def test_statuses_are_results() -> None:
    with serve(lambda *_: (503, b"full")) as url:
        client = InferenceClient(url)
        answer = client.predict("m", b"{}")
        client.close()
    assert (answer.status, answer.body) == (503, b"full")
    assert answer.headers["Content-Length"] == "4"


def test_urls() -> None:
    seen: list[str] = []

    def answer(_: str, path: str) -> Reply:
        seen.append(path)
        return 200, b""

    with serve(answer) as url:
        client = InferenceClient(url + "/")
        client.predict("a b", b"")
        client.predict("m", b"", version="1.0", path="v1/embeddings")
        with pytest.raises(UserError, match="needs a version"):
            client.predict("m", b"", path="v1/embeddings")
        assert client.ping()
        client.close()
    assert seen == ["/predictions/a%20b", "/predictions/m/1.0/v1/embeddings", "/ping"]


@pytest.mark.parametrize(("status", "ready"), [(200, True), (400, True), (422, True), (404, False), (503, False)])
def test_a_probe_asks_whether_a_worker_answers(status: int, ready: bool) -> None:
    with serve(lambda *_: (status, b"{}")) as url:
        client = InferenceClient(url)
        assert client.probe("m") is ready
        client.close()


def test_a_probe_with_a_wrong_token_is_an_error() -> None:
    with serve(lambda *_: refusal(400, "InvalidKeyException", "Token Authorization failed.")) as url:
        client = InferenceClient(url, "wrong")
        with pytest.raises(UserError, match="missing or wrong token"):
            client.probe("m")
        client.close()


def test_nothing_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(UserError, match="no answer from"):
            InferenceClient(f"http://127.0.0.1:{unused.getsockname()[1]}").ping()
