"""The OpenAI API as a load's target: embeddings, and chat completions whose stream tells when the first token came."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import orjson

from scripts.lib.errors import UserError
from scripts.lib.load import Received

PATHS = {"embeddings": "/embeddings", "chat": "/chat/completions"}
# Tokens that a generated chat request asks for at most: enough to see a rate, little enough to see many requests.
MAX_TOKENS = 64
# Answers must come as they are: a compressed stream shows no tokens.
HEADERS = {"Accept-Encoding": "identity"}


def endpoint(base: str, kind: str) -> str:
    """The URL of a kind of request below a base URL such as `http://host/v1`, which may name it already.

    Raises:
        UserError: an unknown kind.
    """
    if kind not in PATHS:
        raise UserError(f"--openai {kind}: not known", hint=f"one of {', '.join(PATHS)}")
    base = base.rstrip("/")
    return base if base.endswith(PATHS[kind]) else base + PATHS[kind]


def body(texts: Sequence[str], kind: str) -> dict[str, Any]:
    """A request about a text, or about several together; `completed` adds the rest."""
    if kind == "embeddings":
        return {"input": texts[0] if len(texts) == 1 else list(texts)}
    return {"messages": [{"role": "user", "content": text} for text in texts], "max_tokens": MAX_TOKENS}


def completed(data: bytes, kind: str, model: str | None) -> bytes:
    """A body with what it leaves out: the model, and for chat a stream that ends with the usage.

    What it says itself stays, so that a body with `stream: false` is answered at once. What is no JSON object is left
    as it is.
    """
    try:
        given = orjson.loads(data)
    except orjson.JSONDecodeError:
        return data
    if not isinstance(given, dict):
        return data
    added: dict[str, Any] = {} if model is None else {"model": model}
    if kind == "chat":
        added["stream"] = True
        if given.get("stream", True) is True:
            added["stream_options"] = {"include_usage": True}
    return orjson.dumps(added | given)


async def read_chat(response: aiohttp.ClientResponse) -> Received:
    """Read a completion, of a chat or not, streamed (server-sent events) or whole; find its first token and its usage.

    Raises:
        aiohttp.ClientError: the connection broke.
    """
    if not response.content_type.startswith("text/event-stream"):
        data = await response.read()
        return Received(len(data), generated=_usage(_parsed(data)))
    stream, rest = _Stream(), b""
    async for chunk in response.content.iter_any():
        stream.size += len(chunk)
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            stream.line(line)
    stream.line(rest)
    error = stream.error or ("" if stream.ended else "the stream ended before it was done")
    return Received(stream.size, stream.first_at, stream.generated, error)


class _Stream:
    """What the events of one stream have told so far."""

    def __init__(self) -> None:
        self.size = 0
        self.first_at: float | None = None
        self.generated: int | None = None
        self.ended = False
        self.error = ""

    def line(self, line: bytes) -> None:
        """Take in one line; those that are no data say nothing."""
        if not line.startswith(b"data:"):
            return
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            self.ended = True
            return
        event = _parsed(data)
        if not isinstance(event, Mapping):
            self.error = "an event of the stream is no JSON object"
            return
        if event.get("error"):
            self.error = "the stream ended with an error"
        for choice in event.get("choices") or ():
            if not isinstance(choice, Mapping):
                continue
            delta = choice.get("delta")
            # A completion's pieces name no role: each is of a token, even where its text is still held back.
            tells = "text" in choice or (isinstance(delta, Mapping) and _tells(delta))
            if self.first_at is None and tells:
                self.first_at = time.perf_counter()
            self.ended = self.ended or bool(choice.get("finish_reason"))
        usage = _usage(event)
        self.generated = self.generated if usage is None else usage


def _tells(delta: Mapping[str, Any]) -> bool:
    """Whether a piece of an answer holds a token: the first one often names the role alone."""
    return any(delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls"))


def _usage(answer: Any) -> int | None:
    usage = answer.get("usage") if isinstance(answer, Mapping) else None
    count = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
    return count if isinstance(count, int) else None


def _parsed(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
