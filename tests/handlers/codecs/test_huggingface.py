import json
from dataclasses import replace
from typing import Any

import pytest

from handlers.request import Pair
from tests.handlers.codecs.tasks import CLASSIFICATION, EMBEDDING, fault, read, write


def test_inputs_and_parameters() -> None:
    request = read({"inputs": "a", "parameters": {"truncate": False}, "options": {"wait_for_model": True}})
    assert (request.items, dict(request.options)) == (("a",), {"truncate": False})
    assert read({"inputs": "a", "parameters": None}).items == ("a",)
    pair = read({"inputs": {"text": "a", "text_pair": "b"}}, CLASSIFICATION)
    assert (pair.items, pair.param(0)) == ((Pair("a", "b"),), "inputs")


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"inputs": None}, "missing_field", "inputs"),
        ({"inputs": 3}, "invalid_type", "inputs"),
        ({"inputs": []}, "empty_list", "inputs"),
        ({"inputs": ["a", 3]}, "invalid_type", "inputs[1]"),
        ({"inputs": "a", "parameters": {"truncat": True}}, "unknown_option", "truncat"),
        ({"inputs": "a", "options": 3}, "unknown_option", "options"),
    ],
)
def test_faults_are_told_as_these_clients_read_them(body: Any, code: str, param: str) -> None:
    found, answer = fault(body)
    assert found == (400, code, param)
    assert isinstance(answer["error"], str)


def test_a_single_result_is_bare_where_the_pipeline_says_so() -> None:
    alone = replace(EMBEDDING, inputs_alone=True)
    assert json.loads(write({"inputs": "a"}, [7])) == [7]
    assert json.loads(write({"inputs": "a"}, [7], alone)) == 7
    assert json.loads(write({"inputs": ["a"]}, [7], alone)) == [7]
    assert json.loads(write({"inputs": ["a"]}, [7], replace(alone, pipeline_value=lambda _, value: -value))) == [-7]
