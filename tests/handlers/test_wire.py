"""What is read from TorchServe's socket in pieces is what its own codec reads field by field."""

import importlib.util
import logging
import struct
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handlers import wire


def fresh_codec() -> ModuleType:
    """A copy of TorchServe's codec, so that what is changed in it stays here."""
    spec = importlib.util.find_spec("ts.protocol.otf_message_handler")
    assert spec is not None
    assert spec.loader is not None
    codec = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(codec)
    return codec


class Connection:
    """Gives bytes in pieces of given sizes, whatever is asked for; then it is closed."""

    def __init__(self, data: bytes, pieces: list[int] | None = None) -> None:
        self._data = data
        self._pieces = iter(pieces or [])
        self.calls = 0

    def recv(self, most: int) -> bytes:
        self.calls += 1
        size = min(most, next(self._pieces, most))
        piece, self._data = self._data[:size], self._data[size:]
        return piece


def field(data: bytes) -> bytes:
    return struct.pack("!i", len(data)) + data


END = struct.pack("!i", -1)


def message(*requests: tuple[bytes, list[tuple[bytes, bytes]], list[tuple[bytes, bytes, bytes]]]) -> bytes:
    lists = (
        field(id)
        + b"".join(field(name) + field(value) for name, value in headers)
        + END
        + b"".join(field(name) + field(kind) + field(value) for name, kind, value in inputs)
        + END
        for id, headers, inputs in requests
    )
    return b"I" + b"".join(lists) + END


names = st.text("abc-", min_size=1, max_size=5).map(str.encode)
inputs = st.tuples(
    names,
    st.sampled_from([b"application/json", b"text/plain", b"application/octet-stream", b""]),
    st.binary(max_size=30) | st.just(b'{"text": "a", "n": [1, 2.5]}'),
)
requests = st.tuples(names, st.lists(st.tuples(names, names), max_size=4), st.lists(inputs, max_size=3))


@settings(deadline=None)
@given(
    st.lists(st.lists(requests, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(1, 40), max_size=30),
)
def test_messages_are_read_as_torchserve_reads_them(messages: list[list[Any]], pieces: list[int]) -> None:
    logging.disable(logging.CRITICAL)  # TorchServe tells of bodies that are no JSON
    try:
        data = b"".join(message(*requests) for requests in messages)
        stock, ours = fresh_codec(), fresh_codec()
        wire.read_in_pieces(ours)
        connection, same = Connection(data), Connection(data, pieces)
        for _ in messages:
            assert ours.retrieve_msg(same) == stock.retrieve_msg(connection)
        with pytest.raises(SystemExit) as ended:
            ours.retrieve_msg(same)
        assert ended.value.code == 0
    finally:
        logging.disable(logging.NOTSET)


known_requests = st.lists(requests, min_size=1, max_size=5, unique_by=lambda each: each[0])


@settings(deadline=None)
@given(
    known_requests,
    st.lists(st.sets(st.integers(0, 4)), min_size=1, max_size=4),
    st.sets(names, max_size=2),
    st.lists(st.integers(1, 200), max_size=30),
)
def test_of_open_requests_ids_alone_are_handed_over_whatever_the_pieces(
    all_requests: list[Any], messages: list[set[int]], open: set[bytes], pieces: list[int]
) -> None:
    logging.disable(logging.CRITICAL)
    try:
        brought = [[all_requests[i] for i in sorted(chosen) if i < len(all_requests)] for chosen in messages]
        data = b"".join(message(*each) for each in brought)
        stock, ours = fresh_codec(), fresh_codec()
        wire.read_in_pieces(ours, {id.decode() for id in open})
        connection, same = Connection(data), Connection(data, pieces)
        before: set[bytes] = set()
        for each in brought:
            expected = stock.retrieve_msg(connection)[1]
            for request in expected:
                if bytes(request["requestId"]) in before & open:
                    request.update(headers=[], parameters=[])
            assert ours.retrieve_msg(same)[1] == expected
            before = {id for id, _, _ in each}
    finally:
        logging.disable(logging.NOTSET)


A = (b"one", [(b"h", b"v")], [(b"body", b"application/json", b'{"a": 1}')])
B = (b"two", [], [(b"body", b"text/plain", b"b")])


@pytest.fixture
def codec() -> ModuleType:
    codec = fresh_codec()
    wire.read_in_pieces(codec)
    return codec


def test_a_request_that_comes_again_is_not_parsed_again(codec: ModuleType) -> None:
    connection = Connection(message(A, B) + message(B, A) + message(A))
    (_, first), (_, second), (_, third) = (codec.retrieve_msg(connection) for _ in range(3))
    assert second[0] is first[1]
    assert second[1] is third[0] is first[0]
    assert connection.calls == 1


def test_of_an_open_request_that_comes_again_only_its_id_is_handed_over() -> None:
    codec, open = fresh_codec(), {"one"}
    wire.read_in_pieces(codec, open)
    changed = (A[0], [], [(b"body", b"text/plain", b"another")])
    connection = Connection(message(A, B) + message(A, B) + message(changed, B) + message(changed, B))
    (_, first), (_, second), (_, third) = (codec.retrieve_msg(connection) for _ in range(3))
    assert first[0]["parameters"][0]["value"] == {"a": 1}
    assert second == [{"requestId": b"one", "headers": [], "parameters": []}, first[1]]
    assert third[0]["parameters"][0]["value"] == "another"  # its id alone is not relied on
    open.clear()
    _, fourth = codec.retrieve_msg(connection)
    assert fourth == third


def test_another_request_of_the_same_id_is_parsed(codec: ModuleType) -> None:
    other = (A[0], A[1], [(b"body", b"application/json", b'{"a": 2}')])
    connection = Connection(message(A) + message(other) + message(A, other))
    (_, first), (_, second), (_, third) = (codec.retrieve_msg(connection) for _ in range(3))
    values = [[request["parameters"][0]["value"]["a"] for request in each] for each in (first, second, third)]
    assert values == [[1], [2], [1, 2]]


def test_a_request_that_comes_again_in_pieces_is_known(codec: ModuleType) -> None:
    long = (b"long", [], [(b"body", b"text/plain", b"x" * (wire.SMALL - 100))])
    connection = Connection(message(long, A) + message(long, A))
    (_, first), (_, second) = (codec.retrieve_msg(connection) for _ in range(2))
    assert second[0] is first[0]
    assert second[1] is first[1]


@pytest.mark.parametrize("cut", [b"", b"x" * 99_999])
def test_another_of_the_same_id_that_begins_alike_is_not_waited_for(codec: ModuleType, cut: bytes) -> None:
    """The frontend leaves the body out once a piece of the answer is sent: what was there before never comes."""
    long = (b"long", [], [(b"body", b"text/plain", b"x" * 100_000)])
    shorter = (b"long", [], [(b"body", b"text/plain", cut)] if cut else [])
    connection = Connection(message(long) + message(shorter))
    (_, first), (_, second) = (codec.retrieve_msg(connection) for _ in range(2))
    assert len(first[0]["parameters"][0]["value"]) == 100_000
    assert [parameter["value"] for parameter in second[0]["parameters"]] == ([cut.decode()] if cut else [])


def test_a_large_request_is_not_kept(codec: ModuleType) -> None:
    large = (b"large", [], [(b"body", b"text/plain", b"x" * wire.SMALL)])
    connection = Connection(message(large, A) + message(large, A))
    (_, first), (_, second) = (codec.retrieve_msg(connection) for _ in range(2))
    assert second == first
    assert second[0] is not first[0]
    assert second[1] is first[1]


def test_what_no_message_brings_any_more_is_forgotten(codec: ModuleType) -> None:
    connection = Connection(message(A) + message(B) + message(A))
    (_, first), _, (_, third) = (codec.retrieve_msg(connection) for _ in range(3))
    assert third == first
    assert third[0] is not first[0]


def test_a_new_connection_starts_anew(codec: ModuleType) -> None:
    _, first = codec.retrieve_msg(Connection(message(A) + b"rest"))
    _, second = codec.retrieve_msg(Connection(message(A)))
    assert second == first
    assert second[0] is not first[0]


def test_a_message_that_breaks_off_ends_the_worker(codec: ModuleType) -> None:
    with pytest.raises(SystemExit):
        codec.retrieve_msg(Connection(message(A)[:-6]))


def test_the_codec_is_changed_once(codec: ModuleType) -> None:
    changed = codec._retrieve_buffer
    wire.read_in_pieces(codec)
    assert codec._retrieve_buffer is changed


class Metrics:
    def __init__(self) -> None:
        self.added: list[tuple[str, float]] = []

    def add_time(self, name: str, value: float, **options: Any) -> None:
        self.added.append((name, value))


def test_what_each_call_writes_is_written_once_a_second(
    codec: ModuleType, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(wire.time, "monotonic", lambda: now[0])
    metrics = Metrics()
    wire.calm(codec, metrics)
    wire.calm(codec, Metrics())  # another model in this process: the log is no calmer, and no wilder
    caplog.set_level(logging.INFO)
    connection = Connection(message(A) * 25)
    kept = []
    for step in range(25):
        now[0] = 1000 + step / 10
        metrics.add_time("PredictionTime", step)
        metrics.add_time("Other", step)
        caplog.clear()
        codec.retrieve_msg(connection)
        kept.append(any(line.startswith("Backend received inference at: ") for line in caplog.messages))
    assert [value for name, value in metrics.added if name == "PredictionTime"] == [0, 10, 20]
    assert len([value for name, value in metrics.added if name == "Other"]) == 25
    assert [step for step, passed in enumerate(kept) if passed] == [0, 10, 20]
    codec.logging.info("another %s", "line")
    codec.logging.info("another %s", "line")
    codec.logging.warning("a warning")
    assert caplog.messages.count("another line") == 2
    assert caplog.messages.count("a warning") == 1
