"""The worker's end of TorchServe's socket, read in large pieces.

TorchServe's worker asks the system for each field of a message alone: four times a header, six hundred times for
sixteen requests, and each is a moment in which another thread takes the interpreter. Under continuous batching every
call brings all open requests again, so that most of what is read is known already.
"""

import logging
import struct
import time
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

    def skip(self) -> None:
        """Go past the rest of a request: its headers, pairs of fields, and its inputs, of three fields each."""
        for fields in (2, 3):
            while (length := self.number()) != _END:
                self._pass(length)
                for _ in range(fields - 1):
                    self._pass(self.number())

    def forget(self) -> None:
        """Let go of what has been read."""
        del self._data[: self._at]
        self._at = 0

    def _pass(self, length: int) -> None:
        self._need(length)
        self._at += length

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
    """

    def __init__(self, codec: Any) -> None:
        self._codec = codec
        self._reader: Reader | None = None
        self._known: dict[bytes, tuple[bytearray, Any]] = {}

    def buffer(self, connection: Any, length: int) -> bytearray:
        """Takes the place of `_retrieve_buffer`."""
        return self._of(connection).take(length)

    def requests(self, connection: Any) -> list[Any]:
        """Takes the place of `_retrieve_inference_msg`.

        A request that the last message brought too, to the byte, is not parsed again. Its id alone is not relied on.
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
            reader.skip()
            raw = reader.since(place) if reader.place - place <= SMALL else None
            before, request = self._known.get(id, (None, None))
            if raw is None or raw != before:
                reader.back(place)
                request = self._codec._retrieve_request(connection)
            if raw is not None:
                known[id] = raw, request
            requests.append(request)
        reader.forget()
        self._known = known
        return requests

    def _of(self, connection: Any) -> Reader:
        if self._reader is None or self._reader.connection is not connection:
            self._reader, self._known = Reader(connection), {}
        return self._reader


def read_in_pieces(codec: Any) -> None:
    """Let TorchServe's codec read by `Messages` from now on, which must be between two messages."""
    if isinstance(getattr(codec._retrieve_buffer, "__self__", None), Messages):
        return
    messages = Messages(codec)
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


class _CallsRarely(logging.Filter):
    """Lets the line that TorchServe's worker logs for each call pass rarely."""

    def __init__(self) -> None:
        super().__init__()
        self._now = _Rarely()

    def filter(self, record: logging.LogRecord) -> bool:
        ours = isinstance(record.msg, str) and record.msg.startswith("Backend received inference")
        return not ours or self._now()


def calm(metrics: Any) -> None:
    """Let a worker that is called many times a second write what it writes for each call only once a second: a line of
    log, and `PredictionTime`, a gauge of which only the last value counts.

    Args:
        metrics: the model's, `context.metrics`.
    """
    root = logging.getLogger()
    if not any(isinstance(known, _CallsRarely) for known in root.filters):
        root.addFilter(_CallsRarely())
    add_time, now = metrics.add_time, _Rarely()

    def add_rarely(name: str, *args: Any, **options: Any) -> None:
        if name != "PredictionTime" or now():
            add_time(name, *args, **options)

    metrics.add_time = add_rarely
