"""A chat with a generation model, streamed: what an OpenAI client does, in the few lines that this needs."""

import json
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

import requests

from scripts.lib.errors import UserError

PATH = "v1/chat/completions"


def stream_chat(
    url: str,
    name: str,
    version: str,
    messages: Sequence[dict[str, str]],
    *,
    headers: dict[str, str],
    timeout: float = 120.0,
    **parameters: Any,
) -> Iterator[dict[str, Any]]:
    """Send messages and give the events of the answer as they come.

    Args:
        url: the inference API, without a path.
        name, version: the model.
        messages: OpenAI's.
        headers: of the request, a token's among them.
        timeout: seconds between two events.
        parameters: of the request.

    Raises:
        UserError: no answer, or an error in its place.
    """
    where = f"{url}/predictions/{quote(name, safe='')}/{quote(version, safe='')}/{PATH}"
    body = {"model": name, "messages": list(messages), "stream": True, **parameters}
    try:
        with requests.post(where, json=body, headers=headers, timeout=(10, timeout), stream=True) as response:
            if response.status_code != 200:
                raise UserError(f"{name} answers with {response.status_code}: {response.text[:300]}")
            for line in response.iter_lines():
                if not line.startswith(b"data: ") or line == b"data: [DONE]":
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise UserError(f"{name} broke off: {event['error'].get('message')}")
                yield event
    except requests.RequestException as error:
        raise UserError(f"no answer from {url}: {error}") from None
