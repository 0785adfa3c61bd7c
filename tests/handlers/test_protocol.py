import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from handlers import options, protocol
from handlers.codecs.codec import Codec
from handlers.codecs.huggingface import HuggingFace
from handlers.codecs.kserve import V1
from handlers.codecs.openai import Embeddings
from handlers.codecs.plain import Plain
from handlers.decoding import Call
from handlers.errors import RequestError, TooLarge, UnknownRoute
from handlers.request import Nouns, Request, Task, inside
from tests.strategies import bad_bodies, good_bodies, json_values

OPTIONS: Mapping[str, Callable[[Any], Any]] = {
    "normalize": options.boolean,
    "truncate": options.boolean,
    "encoding_format": options.one_of("float", "base64"),
}


def item(value: Any, param: str) -> Any:
    """As TransformerHandler.item of a task that takes token ids."""
    if isinstance(value, list):
        return options.token_ids(value, param)
    if isinstance(value, dict):
        name = "data" if "data" in value else "text"
        value, param = options.members(value, param, [name])[name], inside(param, name)
    return options.text(value, param)


TASK = Task(Nouns("embedding", "embeddings"), ("text",), OPTIONS, ("v1/embeddings", "embed"), item)


def codec_of(body: Any, route: str = "", kind: str = "application/json") -> Codec:
    return protocol.by_body(protocol.by_route(route, kind, TASK), Call(body, route), TASK)


def read(body: Any, route: str = "", max_items: int = 100) -> Request:
    return protocol.read(Call(body, route), codec_of(body, route), replace(TASK, max_items=max_items))


@pytest.mark.parametrize(
    ("body", "items", "codec", "param"),
    [
        ("a", ("a",), Plain, "text"),
        ({"text": "a"}, ("a",), Plain, "text"),
        (["a", "b"], ("a", "b"), Plain, "texts[0]"),
        ({"texts": ["a", ""]}, ("a", ""), Plain, "texts[0]"),
        ({"inputs": "a"}, ("a",), HuggingFace, "inputs"),
        ({"inputs": ["a"]}, ("a",), HuggingFace, "inputs[0]"),
        ({"instances": ["a", {"text": "b"}, {"data": "c"}]}, ("a", "b", "c"), V1, "instances[0]"),
        ({"input": "a", "model": "m", "user": "u", "encoding_format": "float"}, ("a",), Embeddings, "input"),
        ({"input": ["a", "b"]}, ("a", "b"), Embeddings, "input[0]"),
        ({"input": [1, 2]}, ((1, 2),), Embeddings, "input"),
        ({"input": [[1, 2], [3]]}, ((1, 2), (3,)), Embeddings, "input[0]"),
    ],
)
def test_shapes(body: Any, items: tuple[Any, ...], codec: type[Codec], param: str) -> None:
    assert type(codec_of(body)) is codec
    request = read(body)
    assert (request.items, request.param(0)) == (items, param)


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
        ({"texts": ["a", ["b"]]}, "invalid_type", "texts[1][0]"),
        ({"texts": ["a", {}]}, "missing_field", "texts[1].text"),
        ({"inputs": {}}, "invalid_type", "inputs"),
        ({"inputs": "a", "parameters": []}, "invalid_type", "parameters"),
        ({"instances": [{"text": "a", "b": 1}]}, "unknown_field", "instances[0]"),
        ({"instances": [{"text": 1}]}, "invalid_type", "instances[0].text"),
        ({"input": []}, "empty_list", "input"),
        ({"input": [1, True]}, "invalid_type", "input[1]"),
        ({"input": [[1], [2.5]]}, "invalid_type", "input[1][0]"),
        ({"input": [[1], []]}, "empty_list", "input[1]"),
        ({"input": ["a", ""]}, "empty_string", "input[1]"),
        ({"input": ""}, "empty_string", "input"),
        ({"input": "a", "encoding_format": "hex"}, "invalid_value", "encoding_format"),
        ({"input": "a", "user": 7}, "invalid_type", "user"),
        ({"text": "a", "user": "me"}, "unknown_option", "user"),
        ({"inputs": "a", "input": "b"}, "ambiguous_input", "input"),
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
    assert type(codec_of({"input": "a"}, "v1/embeddings")) is Embeddings
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
    assert read(body).items


@given(bad_bodies | json_values)
def test_no_body_raises_anything_but_a_request_error(body: Any) -> None:
    for route in ("", "v1/embeddings"):
        try:
            read(body, route, 3)
        except RequestError as error:
            for codec in {id(codec): codec for codec in (*protocol.ROUTES.values(), protocol.PLAIN)}.values():
                content = json.loads(codec.refuse(error, {}).decode("ascii"))
                inner = content["error"] if isinstance(content.get("error"), dict) else content
                assert inner["code"] == error.code
                assert codec.status(error) >= 400


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


def test_every_status_has_an_ascii_phrase() -> None:
    for status in (400, 404, 413, 422, 424, 429, 500, 503, 507):
        assert protocol.phrase(status).isascii()
