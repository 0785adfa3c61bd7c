import base64
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handlers import protocol
from handlers.decoding import Call
from handlers.errors import ModelFailure, RequestError, TooLarge, UnknownRoute
from handlers.protocol import Nouns, Request, Usage, answer, dumps, error_answer, parse
from tests.strategies import bad_bodies, good_bodies, json_values

OPTIONS = ("normalize", "truncate")
NOUNS = Nouns("embedding", "embeddings")


def read(body: Any, route: str = "", max_items: int = 100) -> Request:
    return parse(Call(body, route), OPTIONS, max_items)


@pytest.mark.parametrize(
    ("body", "items", "shape", "param"),
    [
        ("a", ("a",), "text", "text"),
        ({"text": "a"}, ("a",), "text", "text"),
        (["a", "b"], ("a", "b"), "texts", "texts[0]"),
        ({"texts": ["a", ""]}, ("a", ""), "texts", "texts[0]"),
        ({"inputs": "a"}, ("a",), "inputs", "inputs"),
        ({"inputs": ["a"]}, ("a",), "inputs", "inputs[0]"),
        ({"instances": ["a", {"text": "b"}, {"data": "c"}]}, ("a", "b", "c"), "instances", "instances[0]"),
        ({"input": "a", "model": "m", "user": "u", "encoding_format": "float"}, ("a",), "openai", "input"),
        ({"input": ["a", "b"]}, ("a", "b"), "openai", "input[0]"),
        ({"input": [1, 2]}, ((1, 2),), "openai", "input"),
        ({"input": [[1, 2], [3]]}, ((1, 2), (3,)), "openai", "input[0]"),
    ],
)
def test_shapes(body: Any, items: tuple[Any, ...], shape: str, param: str) -> None:
    request = read(body)
    assert (request.items, request.shape, request.param(0)) == (items, shape, param)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (None, "invalid_type", None),
        (3, "invalid_type", None),
        ({}, "missing_field", "text"),
        ({"text": ["a"]}, "invalid_type", "text"),
        ({"text": None}, "invalid_type", "text"),
        ({"texts": "a"}, "invalid_type", "texts"),
        ({"texts": []}, "empty_list", "texts"),
        ([], "empty_list", "texts"),
        ({"texts": ["a", None]}, "invalid_type", "texts[1]"),
        ({"texts": ["a", ["b"]]}, "invalid_type", "texts[1]"),
        ({"inputs": {}}, "invalid_type", "inputs"),
        ({"inputs": "a", "parameters": []}, "invalid_type", "parameters"),
        ({"instances": [{"text": "a", "b": 1}]}, "invalid_type", "instances[0]"),
        ({"instances": [{"text": 1}]}, "invalid_type", "instances[0].text"),
        ({"input": []}, "empty_list", "input"),
        ({"input": [1, True]}, "invalid_type", "input[1]"),
        ({"input": [[1], [2.5]]}, "invalid_type", "input[1][0]"),
        ({"input": [[1], []]}, "empty_list", "input[1]"),
        ({"input": ["a", ""]}, "empty_string", "input[1]"),
        ({"input": ""}, "empty_string", "input"),
        ({"input": "a", "encoding_format": "hex"}, "invalid_value", "encoding_format"),
        ({"input": "a", "user": 7}, "invalid_type", "user"),
        ({"text": "a", "encoding_format": "float"}, "unknown_option", "encoding_format"),
        ({"text": "a", "truncat": True}, "unknown_option", "truncat"),
        ({"text": "a", "texts": ["b"]}, "ambiguous_input", "texts"),
        ({"texts": ["a", "x\udc00"]}, "invalid_text", "texts[1]"),
    ],
)
def test_faults_are_named(body: Any, code: str, param: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        read(body)
    assert (caught.value.code, caught.value.param, caught.value.status) == (code, param, 400)


def test_routes() -> None:
    assert read({"input": "a"}, "v1/embeddings").shape == "openai"
    with pytest.raises(UnknownRoute) as caught:
        read({"text": "a"}, "v1/embedings")
    assert caught.value.status == 404
    with pytest.raises(RequestError) as wrong:
        read({"text": "a"}, "v1/embeddings")
    assert wrong.value.param == "input"


def test_too_many_items() -> None:
    with pytest.raises(TooLarge, match="5 items; at most 4"):
        read({"texts": ["a"] * 5}, max_items=4)


def test_null_options_are_absent_and_parameters_are_options() -> None:
    assert read({"input": "a", "normalize": None, "user": None}).options == {}
    assert read({"inputs": "a", "parameters": {"normalize": False}, "truncate": None}).options == {"normalize": False}


@given(good_bodies)
def test_good_bodies_are_read(body: Any) -> None:
    request = parse(Call(body), OPTIONS, 100)
    assert request.items


@given(bad_bodies | json_values)
def test_no_body_raises_anything_but_a_request_error(body: Any) -> None:
    for route in ("", "v1/embeddings"):
        try:
            parse(Call(body, route), OPTIONS, 3)
        except RequestError as error:
            for openai in (False, True):
                content = json.loads(error_answer(error, openai=openai).decode("ascii"))
                assert (content["error"] if openai else content)["code"] == error.code


def test_a_huge_name_is_not_compared_with_the_known_ones() -> None:
    """Matching is quadratic: 6 MB of it would hold the whole batch for seconds."""
    with pytest.raises(RequestError) as caught:
        read({"text": "a", "normalise" * 700_000: True})
    assert len(caught.value.message) < 200
    assert "did you mean" not in caught.value.message
    with pytest.raises(RequestError, match="did you mean 'normalize'"):
        read({"text": "a", "normalise": True})


def test_items_may_change_but_not_their_number() -> None:
    request = read({"texts": ["a", "b"]})
    assert request.with_items(["c", "d"]).items == ("c", "d")
    with pytest.raises(ValueError, match="2 items became 1"):
        request.with_items(["c"])


VECTOR = np.array([0.1, -1e-8, 3.0], dtype=np.float32)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"text": "a"}, {"embedding": [0.1, -1e-8, 3.0]}),
        ({"texts": ["a"]}, {"embeddings": [[0.1, -1e-8, 3.0]]}),
        ({"inputs": "a"}, [[0.1, -1e-8, 3.0]]),
        ({"instances": ["a"]}, {"predictions": [[0.1, -1e-8, 3.0]]}),
        (
            {"input": "a"},
            {
                "object": "list",
                "data": [{"object": "embedding", "index": 0, "embedding": [0.1, -1e-8, 3.0]}],
                "model": "minilm",
                "usage": {"prompt_tokens": 7, "total_tokens": 7, "truncated_tokens": 2},
            },
        ),
    ],
)
def test_a_client_gets_the_shape_it_spoke(body: Any, expected: Any) -> None:
    assert json.loads(answer(read(body), [VECTOR], NOUNS, "minilm", Usage(7, 2))) == expected


def test_usage_names_no_cut_where_there_was_none() -> None:
    usage = json.loads(answer(read({"input": "a"}), [VECTOR], NOUNS, "m", Usage(7, 0)))["usage"]
    assert usage == {"prompt_tokens": 7, "total_tokens": 7}


@pytest.mark.parametrize("library", ["orjson", "json"])
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20))
def test_numbers_round_trip_float32(library: str, numbers: list[float]) -> None:
    vector = np.array(numbers, dtype=np.float32)
    with pytest.MonkeyPatch.context() as patch:
        if library == "json":
            patch.setattr(protocol, "orjson", None)
        raw = dumps({"é": [vector]})
    assert b" " not in raw
    assert np.array_equal(np.array(json.loads(raw)["é"][0], dtype=np.float32), vector)


@given(st.lists(st.floats(width=32), max_size=20))
def test_base64_is_little_endian_float32(numbers: list[float]) -> None:
    vector = np.array(numbers, dtype=np.float32)
    read_back = np.frombuffer(base64.b64decode(protocol.base64_floats(vector)), dtype="<f4")
    assert np.array_equal(read_back, vector, equal_nan=True)


def test_errors_in_openai_form() -> None:
    error = ModelFailure("It broke.", code="non_finite", param="input[2]")
    assert json.loads(error_answer(error, openai=True)) == {
        "error": {"code": "non_finite", "message": "It broke.", "param": "input[2]", "type": "server_error"}
    }


def test_every_status_has_an_ascii_phrase() -> None:
    for status in (400, 404, 413, 500, 503, 507):
        assert protocol.phrase(status).isascii()
