"""What the inference client sends and how it takes an answer; the real server is in tests/e2e."""

import socket
from pathlib import Path

import pytest

from scripts.lib.errors import UserError
from scripts.lib.inference import InferenceClient
from scripts.lib.refusals import token_rejected
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


def test_neither_proxies_nor_netrc_of_the_environment_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead proxy would break every call; a .netrc would replace the token."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with serve(lambda *_: (200, b"[1]")) as url, InferenceClient(url, "key") as client:
        assert client.probe("m")
        assert client.ask("m", {"text": "x"}) == [1]
        assert client._session.headers["Authorization"] == "Bearer key"
        assert not client._session.trust_env


@pytest.mark.parametrize("reply", [(503, b"full"), (200, b"no JSON")])
def test_asking_wants_a_200_with_json(reply: Reply) -> None:
    with (
        serve(lambda *_: reply) as url,
        InferenceClient(url) as client,
        pytest.raises(UserError, match="answers a request with"),
    ):
        client.ask("m", {})


@pytest.mark.parametrize(
    ("reply", "rejected"),
    [
        (refusal(400, "InvalidKeyException", "Token Authentication failed. Token either incorrect, expired, …"), True),
        (refusal(400, "InvalidKeyException", "Token Authorization failed. Token either incorrect, expired, …"), True),
        (refusal(400, "BadRequestException", "InvalidKeyException"), False),
        ((400, b'"InvalidKeyException"'), False),
        ((400, b"InvalidKeyException"), False),
        (refusal(500, "InvalidKeyException", ""), False),
    ],
)
def test_a_rejected_token_is_known_by_the_exceptions_name(reply: Reply, rejected: bool) -> None:
    assert token_rejected(*reply) is rejected


def test_nothing_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(UserError, match="no answer from"):
            InferenceClient(f"http://127.0.0.1:{unused.getsockname()[1]}").ping()
