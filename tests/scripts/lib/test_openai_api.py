"""OpenAI's API as a target: where requests go, what they are completed with, and what a stream tells."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web

from scripts.lib.errors import UserError
from scripts.lib.load import NO_ANSWER, Sample, Target, closed_loop, run
from scripts.lib.openai_api import HEADERS, body, completed, endpoint, read_chat
from scripts.lib.workloads import Body


def test_endpoints() -> None:
    assert endpoint("http://h/v1/", "chat") == "http://h/v1/chat/completions"
    assert endpoint("http://h/v1/embeddings", "embeddings") == "http://h/v1/embeddings"
    with pytest.raises(UserError, match="--openai images"):
        endpoint("http://h/v1", "images")


def test_a_body_is_completed_with_what_it_leaves_out() -> None:
    chat = json.loads(completed(json.dumps(body(["hi"], "chat")).encode(), "chat", "m"))
    assert chat["messages"] == [{"role": "user", "content": "hi"}]
    assert (chat["model"], chat["stream"], chat["stream_options"]) == ("m", True, {"include_usage": True})
    assert json.loads(completed(b'{"model": "own", "stream": false}', "chat", "m")) == {"model": "own", "stream": False}
    assert json.loads(completed(b'{"input": "a"}', "embeddings", "m")) == {"input": "a", "model": "m"}
    assert json.loads(completed(b'{"input": "a"}', "embeddings", None)) == {"input": "a"}
    assert [completed(data, "chat", "m") for data in (b"[1]", b"{")] == [b"[1]", b"{"]
    assert body(["a"], "embeddings") == {"input": "a"}
    assert body(["a", "b"], "embeddings") == {"input": ["a", "b"]}


def asked(chunks: Sequence[bytes], content_type: str = "text/event-stream", gap_s: float = 0.0) -> Sample:
    """One request to a server that answers in these chunks."""

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.headers["Accept-Encoding"] == "identity"
        response = web.StreamResponse(headers={"Content-Type": content_type})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
            await asyncio.sleep(gap_s)
        return response

    async def scenario() -> Sample:
        app = web.Application()
        app.router.add_post("/", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/"  # type: ignore[attr-defined]
        try:
            target = Target(url, HEADERS, timeout_s=10, reader=read_chat)
            return (await closed_loop(target, [Body(b"{}", 1, 0)], clients=1, requests=1)).samples[0]
        finally:
            await runner.cleanup()

    return run(scenario())


def event(**content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def piece(finish: str | None = None, **delta: Any) -> bytes:
    return event(choices=[{"delta": delta, "finish_reason": finish}])


ROLE, TOKEN, LAST = piece(role="assistant", content=""), piece(content="a"), piece("stop", content="b")
USAGE, DONE = event(choices=[], usage={"completion_tokens": 7}), b"data: [DONE]\n\n"


def test_the_first_token_is_no_role_and_usage_is_read() -> None:
    sample = asked([ROLE, ROLE, TOKEN, LAST, USAGE, DONE], gap_s=0.05)
    assert sample.ok
    assert sample.generated == 7
    assert sample.first_s is not None
    assert 0.09 <= sample.first_s <= sample.latency_s - 0.04
    assert sample.received == len(ROLE * 2 + TOKEN + LAST + USAGE + DONE)


def test_chunks_may_break_anywhere() -> None:
    whole = b": a comment\n\n" + ROLE + TOKEN.replace(b"\n", b"\r\n") + LAST + USAGE + DONE.strip()
    sample = asked([whole[start : start + 7] for start in range(0, len(whole), 7)])
    assert (sample.ok, sample.generated) == (True, 7)
    assert sample.first_s is not None


def test_a_server_that_says_no_usage_has_no_tokens() -> None:
    sample = asked([TOKEN, LAST])
    assert (sample.ok, sample.generated) == (True, None)


@pytest.mark.parametrize(
    ("chunks", "error"),
    [
        ([ROLE, TOKEN], "ended before it was done"),
        ([], "ended before it was done"),
        ([TOKEN, event(error={"message": "secret"}), DONE], "ended with an error"),
        ([TOKEN, b"data: {\n\n", DONE], "no JSON object"),
        ([TOKEN, event(choices=[7, {"delta": 3}])], "ended before it was done"),
    ],
)
def test_a_stream_that_breaks_off_is_no_answer(chunks: list[bytes], error: str) -> None:
    sample = asked(chunks)
    assert sample.status == NO_ANSWER
    assert error in sample.error
    assert "secret" not in sample.error


@pytest.mark.parametrize(
    ("data", "generated"), [(b'{"usage": {"completion_tokens": 3}}', 3), (b"{", None), (b"[]", None)]
)
def test_an_answer_at_once_has_its_usage_too(data: bytes, generated: int | None) -> None:
    sample = asked([data], content_type="application/json")
    assert (sample.ok, sample.generated, sample.first_s) == (True, generated, None)
