"""The worker's end of TorchServe's socket, read in large pieces.

TorchServe's worker asks the system for each field of a message alone: four times a header, six hundred times for
sixteen requests, and each is a moment in which another thread takes the interpreter. Under continuous batching every
call brings all open requests again, so that most of what is read is known already.
"""

import logging
import struct
import time
from collections.abc import Container
from typing import Any

logger = logging.getLogger(__name__)

PIECE = 2**16  # bytes that are asked for at once
SMALL = 2**18  # bytes of a request that is kept to be known again; a larger one is parsed each time
_INT = struct.Struct("!i")
_END = -1  # of a list
_TOLD = 1.0  # seconds between two lines that each call would write


class Reader:
    """Fields from one connection; what came beyond a field is kept for the next.

    Args:
        connection: the worker's; nobody else may read from it.
    """

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._data = bytearray()
        self._at = 0

    def take(self, length: int) -> bytearray:
        """The next `length` bytes.

        Raises:
            SystemExit: the frontend is gone, at which a worker ends.
        """
        self._need(length)
        start = self._at
        self._at += length
        return self._data[start : self._at]

    def number(self) -> int:
        """The next integer."""
        self._need(_INT.size)
        (found,) = _INT.unpack_from(self._data, self._at)
        self._at += _INT.size
        return int(found)

    def known(self, data: bytearray) -> bool:
        """Go past `data` if that is what comes next.

        Args:
            data: which no other thing that may come begins with, or is the beginning of.
        """
        while (here := len(self._data) - self._at) < len(data):
            if not data.startswith(memoryview(self._data)[self._at :]):
                return False
            self._need(here + 1)  # it is not over yet, whatever it is
        if not self._data.startswith(data, self._at):
            return False
        self._at += len(data)
        return True

    @property
    def place(self) -> int:
        """Where the next field begins; it holds until `forget`."""
        return self._at

    def since(self, place: int) -> bytearray:
        """What was read from a place on."""
        return self._data[place : self._at]

    def back(self, place: int) -> None:
        """Let what was read from a place on be read again."""
        self._at = place

    def forget(self) -> None:
        """Let go of what has been read."""
        del self._data[: self._at]
        self._at = 0

    def _need(self, length: int) -> None:
        missing = self._at + length - len(self._data)
        while missing > 0:
            piece = self.connection.recv(max(missing, PIECE))
            if not piece:
                logger.info("The frontend has gone.")
                raise SystemExit(0)
            self._data += piece
            missing -= len(piece)


class Messages:
    """Reads a worker's messages, each request of them once.

    Args:
        codec: the module `ts.protocol.otf_message_handler`.
        open: ids of the requests whose handler needs no more of them than that they are still there.
    """

    def __init__(self, codec: Any, open: Container[str]) -> None:
        self._codec = codec
        self.open = open
        self._reader: Reader | None = None
        self._known: dict[bytes, tuple[bytearray, Any]] = {}

    def buffer(self, connection: Any, length: int) -> bytearray:
        """Takes the place of `_retrieve_buffer`."""
        return self._of(connection).take(length)

    def requests(self, connection: Any) -> list[Any]:
        """Takes the place of `_retrieve_inference_msg`.

        A request that the last message brought too, to the byte, is not parsed again, and an open one comes without
        headers and inputs. Its id alone is not relied on.
        """
        reader = self._of(connection)
        known: dict[bytes, tuple[bytearray, Any]] = {}
        requests = []
        while True:
            place = reader.place
            length = reader.number()
            if length == _END:
                break
            id = bytes(reader.take(length))
            reader.back(place)
            raw, request = self._known.get(id, (None, None))
            if raw is None or not reader.known(raw):
                request = self._codec._retrieve_request(connection)
                raw = reader.since(place) if reader.place - place <= SMALL else None
                requests.append(request)
            elif id.decode() in self.open:
                requests.append({"requestId": id, "headers": [], "parameters": []})
            else:
                requests.append(request)
            if raw is not None:
                known[id] = raw, request
        reader.forget()
        self._known = known
        return requests

    def _of(self, connection: Any) -> Reader:
        if self._reader is None or self._reader.connection is not connection:
            self._reader, self._known = Reader(connection), {}
        return self._reader


def read_in_pieces(codec: Any, open: Container[str] = ()) -> None:
    """Let TorchServe's codec read by `Messages` from now on, which must be between two messages.

    Args:
        codec, open: as `Messages` takes them.
    """
    messages = getattr(codec._retrieve_buffer, "__self__", None)
    if isinstance(messages, Messages):
        messages.open = open
        return
    messages = Messages(codec, open)
    codec._retrieve_buffer, codec._retrieve_inference_msg = messages.buffer, messages.requests


class _Rarely:
    """True once in `_TOLD` seconds."""

    def __init__(self) -> None:
        self._due = 0.0

    def __call__(self) -> bool:
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + _TOLD
        return True


class _Calm:
    """The module `logging` as TorchServe's codec uses it: of the lines for each call, few are even made.

    Args:
        logging: what it used before.
    """

    def __init__(self, logging: Any) -> None:
        self._logging = logging
        self._now = _Rarely()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logging, name)

    def info(self, message: Any, *args: Any, **options: Any) -> None:
        """Log it, unless it is that line and was logged a moment ago."""
        ours = isinstance(message, str) and message.startswith("Backend received inference")
        if not ours or self._now():
            self._logging.info(message, *args, **options)


def calm(codec: Any, metrics: Any) -> None:
    """Let a worker that is called many times a second write what it writes for each call only once a second: a line of
    log, and `PredictionTime`, a gauge of which only the last value counts.

    Args:
        codec: the module `ts.protocol.otf_message_handler`.
        metrics: the model's, `context.metrics`.
    """
    if not isinstance(codec.logging, _Calm):
        codec.logging = _Calm(codec.logging)
    add_time, now = metrics.add_time, _Rarely()

    def add_rarely(name: str, *args: Any, **options: Any) -> None:
        if name != "PredictionTime" or now():
            add_time(name, *args, **options)

    metrics.add_time = add_rarely
