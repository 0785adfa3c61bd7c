"""Bodies of answers from servers that may be anybody's: they end, in time and in memory."""

import time

import requests
import urllib3

MOST_BYTES = 2**26
_PIECE = 2**16


class TooLarge(requests.RequestException):
    """An answer that is no answer to any question of ours."""


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
