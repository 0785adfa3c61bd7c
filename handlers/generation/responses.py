"""Values → bytes in the shape that the client spoke, whole or as server-sent events.

| shape       | whole                                        | a piece of a stream       |
| chat        | a chat.completion                            | a chat.completion.chunk   |
| completions | a text_completion                            | a text_completion         |
| plain       | {"generated_text", "finish_reason", "usage"} | {"text", "finish_reason"} |

A plain body with `inputs` is answered as Hugging Face's inference API does: [{"generated_text": …}].
"""

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from handlers.codecs.codec import ascii_json
from handlers.codecs.openai import complaint
from handlers.errors import RequestError
from handlers.generation.calls import Call
from handlers.generation.requests import Generation
from handlers.serialise import dumps

DONE = b"data: [DONE]\n\n"
CALL_ID = 9  # characters: Mistral's chat templates accept no other ids


class Usage(NamedTuple):
    """Tokens of the prompts and of the answers."""

    prompt: int
    completion: int

    def as_json(self) -> dict[str, int]:
        """In OpenAI's words."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        }


class Logprob(NamedTuple):
    """A token with its log-probability and the most probable ones beside it.

    Args:
        text: the token alone, as text.
        logprob: the model's own.
        top: (text, log-probability), best first.
        offset: where its text begins in the answer, in characters.
    """

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]
    offset: int


@dataclass
class Piece:
    """A part of one choice's answer, or all of it.

    Args:
        index: of the choice.
        text: what is new.
        logprobs: of the tokens since the last piece; None where none are asked for.
        finish: why the choice ended, in OpenAI's words; None while it goes on.
        calls: what is new of its calls of functions.
    """

    index: int
    text: str = ""
    logprobs: list[Logprob] | None = None
    finish: str | None = None
    calls: Sequence[Call] = ()


@dataclass
class Writer:
    """Writes the answer of one request.

    Args:
        generation: what was asked.
        id: of the answer.
        model: the name under which the model is served.
        created: seconds since 1970.
    """

    generation: Generation
    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        """The answer in one.

        Args:
            pieces: every choice, in order, each in one piece.
        """
        shape = self.generation.shape
        if shape == "plain":
            piece = pieces[0]
            if self.generation.field == "inputs":
                return dumps([{"generated_text": piece.text}])
            return dumps({"generated_text": piece.text, "finish_reason": piece.finish, "usage": usage.as_json()})
        choices = [self._choice(piece, stream=False) for piece in pieces]
        kind = "chat.completion" if shape == "chat" else "text_completion"
        return dumps({**self._head(kind), "choices": choices, "usage": usage.as_json()})

    def first(self, index: int) -> bytes:
        """What a stream says of a choice before its text: who speaks."""
        if self.generation.shape != "chat":
            return b""
        delta = {"role": "assistant", "content": ""}
        return self._event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def piece(self, piece: Piece) -> bytes:
        """A part of a stream."""
        if self.generation.shape == "plain":
            return _sse({"text": piece.text, "finish_reason": piece.finish})
        return self._event([self._choice(piece, stream=True)])

    def last(self, usage: Usage) -> bytes:
        """The end of a stream, with its usage where that is asked for."""
        if not self.generation.include_usage:
            return DONE
        return self._event([], usage) + DONE

    def failure(self, error: RequestError) -> bytes:
        """An error where the head has been sent already, as a whole answer's body or a stream's end."""
        body = error_answer(error, openai=self.generation.shape != "plain")
        return b"data: " + body + b"\n\n" + DONE if self.generation.stream else body

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _event(self, choices: list[Any], usage: Usage | None = None) -> bytes:
        kind = "chat.completion.chunk" if self.generation.shape == "chat" else "text_completion"
        value: dict[str, Any] = {**self._head(kind), "choices": choices}
        if self.generation.include_usage:  # null in every event but the last
            value["usage"] = usage.as_json() if usage else None
        return _sse(value)

    def _choice(self, piece: Piece, *, stream: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": piece.index}
        if self.generation.shape == "completions":
            choice["text"] = piece.text
            choice["logprobs"] = _completion_logprobs(piece.logprobs)
        elif stream:
            choice["delta"] = {"content": piece.text} if piece.text else {}
            if piece.calls:
                choice["delta"]["tool_calls"] = [{"index": index, **call} for index, call in _calls(piece.calls)]
            choice["logprobs"] = _chat_logprobs(piece.logprobs)
        else:
            choice["message"] = {"role": "assistant", "content": piece.text, "refusal": None}
            if piece.calls:
                choice["message"]["content"] = piece.text or None
                choice["message"]["tool_calls"] = [call for _, call in _calls(piece.calls)]
            choice["logprobs"] = _chat_logprobs(piece.logprobs)
        return {**choice, "finish_reason": piece.finish}


def error_answer(error: RequestError, *, openai: bool) -> bytes:
    """The body of a failed answer: code, message and param, in OpenAI's form for its clients."""
    content = complaint(error) if openai else {"code": error.code, "message": error.message, "param": error.param}
    return ascii_json(content)


def models(name: str, created: int) -> dict[str, Any]:
    """The answer to v1/models: the one that there is."""
    return {"object": "list", "data": [model(name, created)]}


def model(name: str, created: int) -> dict[str, Any]:
    """The answer to v1/models/NAME."""
    return {"id": name, "object": "model", "created": created, "owned_by": "batchserve"}


def _sse(value: Any) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"


def _calls(pieces: Sequence[Call]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each call that the pieces are of, with its place in the answer; its name and id where it begins among them."""
    for index in sorted({piece.index for piece in pieces}):
        parts = [piece for piece in pieces if piece.index == index]
        name = parts[0].name
        function = {} if name is None else {"name": name}
        head = {} if name is None else {"id": uuid.uuid4().hex[:CALL_ID], "type": "function"}
        yield index, {**head, "function": {**function, "arguments": "".join(part.arguments for part in parts)}}


def _chat_logprobs(found: Sequence[Logprob] | None) -> dict[str, Any] | None:
    if found is None:
        return None
    content = [
        {**_token(entry.text, entry.logprob), "top_logprobs": [_token(text, value) for text, value in entry.top]}
        for entry in found
    ]
    return {"content": content, "refusal": None}


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _completion_logprobs(found: Sequence[Logprob] | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "tokens": [entry.text for entry in found],
        "token_logprobs": [entry.logprob for entry in found],
        "top_logprobs": [dict(entry.top) for entry in found],
        "text_offset": [entry.offset for entry in found],
    }
