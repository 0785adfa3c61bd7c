"""Bodies of answers from servers that may be anybody's: they end, in time and in memory."""

import time
from typing import Any, NamedTuple

import requests
import urllib3

CONNECT_S = 10.0
MOST_BYTES = 2**26
_PIECE = 2**16


class TooLarge(requests.RequestException):
    """An answer that is no answer to any question of ours."""


class Answer(NamedTuple):
    """What a server answered; header names are found whatever their case."""

    status: int
    headers: "requests.structures.CaseInsensitiveDict[str]"
    body: bytes


def ask(session: requests.Session, method: str, url: str, seconds: float, **options: Any) -> Answer:
    """Send a request, whose redirections are not followed.

    Args:
        session: what sends it.
        seconds: that its head may take, and then its body.
        options: of `requests`.

    Raises:
        requests.RequestException: there is no answer; see body_of.
    """
    waits = (CONNECT_S, seconds)
    with session.request(method, url, timeout=waits, allow_redirects=False, stream=True, **options) as response:
        return Answer(response.status_code, response.headers, body_of(response, seconds))


def body_of(response: requests.Response, seconds: float) -> bytes:
    """The body of an answer that was asked for with `stream=True`.

    Args:
        response: the answer; its caller closes it.
        seconds: that the body may take.

    Raises:
        requests.Timeout: it has not ended by then; looked at whenever something comes.
        requests.ConnectionError: it breaks off.
        TooLarge: it is larger than MOST_BYTES.
    """
    until = time.monotonic() + seconds
    found = bytearray()
    try:
        # requests' own iter_content waits until a piece is full
        while piece := response.raw.read1(_PIECE, decode_content=True):
            found += piece
            if len(found) > MOST_BYTES:
                raise TooLarge(f"it answered with more than {MOST_BYTES // 2**20} MiB")
            if time.monotonic() > until:
                raise requests.Timeout
    except urllib3.exceptions.TimeoutError as error:
        raise requests.Timeout from error
    except urllib3.exceptions.HTTPError as error:
        raise requests.ConnectionError(error) from error
    return bytes(found)
