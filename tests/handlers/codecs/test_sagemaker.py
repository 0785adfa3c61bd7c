import csv
import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handlers import protocol
from handlers.codecs.sagemaker import Csv, JsonLines
from handlers.request import Pair
from tests.handlers.codecs.tasks import CLASSIFICATION, EMBEDDING, fault, read, write
from tests.strategies import texts

LINES, TABLE = "application/jsonlines", "text/csv"


@pytest.mark.parametrize("kind", [LINES, "application/x-ndjson", "application/jsonl", "application/x-jsonlines"])
def test_json_lines(kind: str) -> None:
    body = '\ufeff"a"\r\n\n  {"text": "b\\u2028"}\r\n{"inputs": "c"}\n[1, 2]'
    assert read(body, kind=kind).items == ("a", "b\u2028", "c", (1, 2))


def test_parameters_of_lines_are_the_requests() -> None:
    line = '{"inputs": "a", "parameters": {"truncate": false}}'
    assert dict(read(f"{line}\n{line}\n", kind=LINES).options) == {"truncate": False}
    found, _ = fault(f'{line}\n{{"inputs": "b"}}', kind=LINES)
    assert found == (400, "invalid_value", "lines[1].parameters")


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ('"a"\n{"text": \n"c"', 400, "malformed_json", "lines[1]"),
        ('"a"\n' + "[" * 100_000, 400, "malformed_json", "lines[1]"),
        ('"a"\n\n3', 400, "invalid_type", "lines[1]"),
        ('{"txt": "a"}', 400, "missing_field", "lines[0].text"),
        ('{"inputs": "a", "parameters": 3}', 400, "invalid_type", "parameters"),
        ("", 400, "empty_body", None),
        ("\n \r\n", 400, "empty_body", None),
        ('"a"\n' * 4, 413, "too_many_items", "lines"),
        ("{" * 1_000 + "\n" + "{\n" * 1_000, 413, "too_many_items", "lines"),
        ([], 400, "invalid_type", None),
    ],
)
def test_faults_of_lines(body: Any, status: int, code: str, param: str | None) -> None:
    found, answer = fault(body, kind=LINES, max_items=3)
    assert found == (status, code, param)
    assert answer["code"] == code


@pytest.mark.parametrize(
    ("body", "items"),
    [
        ("a\nb\n", ("a", "b")),
        ("a\r\n\r\nb", ("a", "b")),
        ('"a, ""quoted""\nline",second\n', (Pair('a, "quoted"\nline', "second"),)),
        ('\ufeffa\n""\n', ("a", "")),
        ("a\0b\n", ("a\0b",)),
        ("x" * 200_000, ("x" * 200_000,)),
        ("{},[]\n", (Pair("{}", "[]"),)),
    ],
)
def test_csv(body: str, items: tuple[Any, ...]) -> None:
    assert read(body, CLASSIFICATION, kind=TABLE).items == items


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ("Hello, world", 400, "invalid_value", "lines[0]"),
        ('a\n"b', 400, "malformed_csv", None),
        ('a\n"b"c', 400, "malformed_csv", None),
        ("a\rb", 400, "malformed_csv", None),
        ("\n\n", 400, "empty_body", None),
        ("a\n" * 4, 413, "too_many_items", "lines"),
        ({"text": "a"}, 400, "invalid_type", None),
    ],
)
def test_faults_of_csv(body: Any, status: int, code: str, param: str | None) -> None:
    if code == "malformed_csv" and body == "a\rb":
        assert read(body, kind=TABLE).items == ("a", "b")  # a carriage return alone ends a line as well
        return
    found, _ = fault(body, kind=TABLE, max_items=3)
    assert found == (status, code, param)


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=9), min_size=1, max_size=4))
def test_what_a_csv_writer_writes_is_read_back(texts: list[str]) -> None:
    out = io.StringIO()
    csv.writer(out).writerows([text] for text in texts)
    assert read("\ufeff" + out.getvalue(), kind=TABLE).items == tuple(texts)


@given(st.recursive(st.none() | st.booleans() | st.integers(-(2**63), 2**63) | texts, st.lists, max_leaves=5))
def test_a_line_of_json_is_what_it_holds(value: Any) -> None:
    answer = write('"a"', [value], kind=LINES)
    assert answer.endswith(b"\n")
    assert json.loads(answer) == value
    assert answer.count(b"\n") == 1


def test_answers_are_lines_and_rows() -> None:
    vectors = [np.array([0.1, -1e-8], dtype=np.float32), np.array([3, 4], dtype=np.int8)]
    assert write('"a"\n"b"', vectors, kind=LINES) == b"[0.1,-1e-8]\n[3,4]\n"
    assert write("a\nb", vectors, kind=TABLE) == b"0.1,-1e-08\n3,4\n"
    flat, deep = {"label": "a,b", "score": 0.5}, [{"label": "x"}]
    rows = list(csv.reader(io.StringIO(write("a\nb\nc", [flat, deep, "text"], kind=TABLE).decode())))
    assert rows == [["a,b", "0.5"], ['[{"label":"x"}]'], ["text"]]


@pytest.mark.parametrize(
    ("kind", "accepted", "codec"),
    [
        ("application/json", ["text/csv"], Csv),
        ("application/json", ["application/jsonlines"], JsonLines),
        ("application/json", ["*/*", "text/csv"], type(protocol.PLAIN)),
        ("application/json", ["application/json"], type(protocol.PLAIN)),
        ("application/json", [""], type(protocol.PLAIN)),
        (
            TABLE,
            ["application/json"],
            type(protocol.by_body(protocol.PLAIN, protocol.Call({"inputs": "a"}), EMBEDDING)),
        ),
        (TABLE, ["text/html", "application/jsonlines"], JsonLines),
        (TABLE, ["text/html"], Csv),
    ],
)
def test_the_accept_header_chooses_the_answer(kind: str, accepted: list[str], codec: type) -> None:
    assert type(protocol.by_accept(protocol.by_route("", kind, EMBEDDING), accepted)) is codec


def test_a_route_has_its_own_answer_whatever_is_accepted() -> None:
    for route in ("v1/embeddings", "embed", "v2/models/m/infer"):
        codec = protocol.by_route(route, "application/json", EMBEDDING)
        assert protocol.by_accept(codec, ["text/csv"]) is codec
