"""What TorchServe's own parser makes of a `models` property; every case was run through the Gson in its jar."""

import json
from typing import Any

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from scripts.lib.diagnosis import gson
from tests.strategies import json_values

EIGHT = {"a": {"1.0": {"batchSize": 8}}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a":{"1.0":{"batchSize":8}}}', EIGHT),
        ("{'a':{'1.0':{'batchSize':8}}}", EIGHT),
        ("{a:{1.0:{batchSize:8}}}", EIGHT),
        ('{# c\n"a":{"1.0":{"batchSize":8}}}', EIGHT),
        ('{"a"={"1.0"=>{"batchSize"=8}}}', EIGHT),
        ('{"a":{"1.0":{/* c */"batchSize":8 // c\n}}}', EIGHT),
        ('{"a":{"1.0":{"batchSize":8;"x":1}}}', {"a": {"1.0": {"batchSize": 8, "x": 1}}}),
        ('{"a":{"1.0":{"b":1,"b":2}}}', {"a": {"1.0": {"b": 2}}}),
        ('{"a":{"1.0":{"b":True}}}', {"a": {"1.0": {"b": True}}}),
        ('{"a":{"1.0":{"b":[1,]}}}', {"a": {"1.0": {"b": [1, None]}}}),
        ('{"a":{"1.0":{"b":nan}}}', {"a": {"1.0": {"b": "nan"}}}),
        ('{"a":{"1.0":{"b":08}}}', {"a": {"1.0": {"b": "08"}}}),
        ('{"a":{"1.0":{"b":\'it\\\'s\'}}}', {"a": {"1.0": {"b": "it's"}}}),
        ('{"a":[]}', {"a": {}}),
        ("{}", {}),
        ("[]", {}),
        ('  {"":{}}', {"": {}}),
        ("\ufeff)]}'\n{}", {}),
    ],
)
def test_taken(text: str, expected: Any) -> None:
    assert gson.models(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "{,}", "{:1}", '{"a":{"1.0":{"batchSize":8,}}}', '{"a":{"1.0":{"batchSize":8}},}',
        '{"a":{"1.0":{"batchSize":8}}} # c', '{"a":{"1.0":{"batchSize":8}}', '{"a":{"1.0":{"batchSize":8}}}}',
        '{"a":{"1.0":{}},"a":{"1.0":{}}}', '{"a":{"1.0":{},"1.0":{}}}', '{"a":{"1.0":8}}', '{"a":8}',
        '{"a":{"1.0":null}}', '{"a":{"1.0":{"b":1 "c":2}}}', '{"a":{"1.0":{"b":}}}', '{"a":{"1.0":{b c:1}}}',
        '{"a":{"1.0":{"b":x y}}}', '{"a":{"1.0":{"b":"\\x"}}}', '{"a":{"1.0":{"b":"', "{/*", '{"a":' * 5000,
    ],
)  # fmt: skip
def test_refused(text: str) -> None:
    with pytest.raises(gson.GsonError):
        gson.models(text)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(8, 8), ("8", 8), ("08", 8), (8.5, 8), ([8], 8), ([], None), (99999999999, 1215752191), (1e2, 100)],
)
def test_numbers(value: object, expected: int | None) -> None:
    assert gson.as_int(value) == expected


@pytest.mark.parametrize("value", ["x", " 8", True, None, {}, [1, 2], float("inf"), "9" * 10])
def test_no_numbers(value: object) -> None:
    with pytest.raises(gson.GsonError):
        gson.as_int(value)


@given(st.text(max_size=5), st.text(max_size=5), st.text(max_size=5), json_values, st.booleans())
def test_strict_json_is_read_as_it_is(name: str, version: str, key: str, value: Any, ascii_only: bool) -> None:
    try:
        text = json.dumps({name: {version: {key: value}}}, ensure_ascii=ascii_only, allow_nan=False)
    except ValueError:  # Python writes infinity, which JSON has not
        reject()
    assert gson.models(text) == json.loads(text)


@given(st.text(st.sampled_from("{}[]:=,;#/*'\"\\u0a \n"), max_size=40) | st.text())
def test_no_text_breaks_the_reader(text: str) -> None:
    try:
        gson.models(text)
    except gson.GsonError as error:
        assert str(error)
