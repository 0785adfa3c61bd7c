import json
from typing import Any

import pytest

from handlers.request import Pair
from tests.handlers.codecs.tasks import CLASSIFICATION, fault, read, write


@pytest.mark.parametrize(
    ("body", "items", "param"),
    [
        ("a", ("a",), "text"),
        ({"text": "a", "top_k": None}, ("a",), "text"),
        ({"text": "a", "text_pair": "b"}, (Pair("a", "b"),), ""),
        (
            {"texts": ["a", ["b", "c"], {"text": "d", "text_pair": "e"}]},
            ("a", Pair("b", "c"), Pair("d", "e")),
            "texts[0]",
        ),
        (["a"], ("a",), "texts[0]"),
    ],
)
def test_instances(body: Any, items: tuple[Any, ...], param: str) -> None:
    request = read(body, CLASSIFICATION)
    assert (request.items, request.param(0)) == (items, param)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"text": "a", "text_pair": 3}, "invalid_type", "text_pair"),
        ({"text_pair": "b"}, "missing_field", "text"),
        ({"texts": ["a", ["b", 3]]}, "invalid_type", "texts[1][1]"),
        ({"texts": ["a"], "text_pair": "b"}, "ambiguous_input", "texts"),
        ({"text": "a", "parameters": {"top_k": 0}}, "invalid_value", "top_k"),
        ({"text": "a", "parameters": 3}, "invalid_type", "parameters"),
    ],
)
def test_faults(body: Any, code: str, param: str) -> None:
    found, answer = fault(body, CLASSIFICATION)
    assert found == (400, code, param)
    assert (answer["code"], answer["param"]) == (code, param)
    assert answer["message"]


def test_one_or_many() -> None:
    assert json.loads(write({"text": "a"}, [{"x": 1}], CLASSIFICATION)) == {"label": {"x": 1}}
    assert json.loads(write({"texts": ["a"]}, [{"x": 1}], CLASSIFICATION)) == {"labels": [{"x": 1}]}
