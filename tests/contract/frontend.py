"""TorchServe's frontend in its continuousBatching mode, as a worker sees it: all open requests in every call."""

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from scripts.lib import service
from scripts.lib.service import Answer, Body

CHAT, COMPLETIONS = "v1/chat/completions", "v1/completions"
GREEDY = {"temperature": 0}


class Frontend:
    """Open requests of one worker. One call at a time; new requests join between two.

    Args:
        loaded: a service, from `service.load`.
    """

    def __init__(self, loaded: Any) -> None:
        self.service = loaded
        self.handler: Any = loaded._entry_point.__self__
        self.answers: dict[str, Answer] = {}
        self.pieces: dict[str, list[Answer]] = {}
        self._open: dict[str, dict[str, Any]] = {}

    def send(self, body: Any, route: str = "", *, headers: Mapping[str, str] | None = None) -> str:
        """Let a request join; returns its id. A body that is no Body is JSON."""
        all_headers = {**(headers or {}), **({"url_path": route} if route else {})}
        if not isinstance(body, Body):
            body = Body(json.dumps(body).encode(), headers=all_headers)
        request = service._request([body])
        id: str = request["requestId"].decode()
        self._open[id], self.pieces[id] = request, []
        return id

    def describe(self) -> str:
        """Let a describe request join; returns its id."""
        request = service._request([])
        request["headers"] = [{"name": b"describe", "value": b"True"}]
        id: str = request["requestId"].decode()
        self._open[id], self.pieces[id] = request, []
        return id

    def leave(self, id: str) -> None:
        """A client goes away."""
        self._open.pop(id, None)

    def call(self) -> None:
        """One call of the worker with everything that is open."""
        for id, answer in service.answers(bytes(self.service.predict(list(self._open.values())))):
            self.pieces[id].append(answer)
            if answer.headers.get("ts_stream_next") == "true":
                continue
            # the real frontend sends no head with a first piece that is the last
            assert len(self.pieces[id]) > 1 or "ts_stream_next" not in answer.headers
            head, body = self.pieces[id][0], b"".join(piece.body for piece in self.pieces[id])
            self.answers[id] = replace(head, body=body, headers={**head.headers, **answer.headers})
            del self._open[id]
        for id in self._open:
            self._open[id] = {"requestId": id.encode(), "headers": [], "parameters": []}

    def run(self, seconds: float = 60.0) -> None:
        """Call until nothing is open."""
        deadline = time.monotonic() + seconds
        while self._open:
            assert time.monotonic() < deadline, f"{len(self._open)} requests are unanswered"
            self.call()

    def ask(self, *bodies: Any, route: str = "") -> list[Answer]:
        """Send JSON values at once and wait for their answers."""
        ids = [self.send(body, route) for body in bodies]
        self.run()
        return [self.answers[id] for id in ids]

    def at_rest(self, seconds: float = 2.0) -> bool:
        """Whether the engine holds nothing any more, within some seconds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            stats = self.handler.engine.stats()
            if stats.running == stats.waiting == stats.used_blocks == 0:
                return True
            time.sleep(0.02)
        return False


def events(answer: Answer) -> list[Any]:
    """The events of a stream, without the one that says it is done, which must be there."""
    assert answer.body.endswith(b"data: [DONE]\n\n"), answer.body[-200:]
    parts = answer.body.decode().split("\n\n")
    assert all(part.startswith("data: ") for part in parts[:-1])
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def text_of(answer: Answer) -> str:
    """The text of an OpenAI answer with one choice, whole or streamed."""
    assert answer.status == 200, answer.body
    if answer.content_type != "application/json":
        choices = [event["choices"][0] for event in events(answer)]
        return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)
    choice = answer.json()["choices"][0]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text
