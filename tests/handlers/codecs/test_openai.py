from typing import Any

import pytest

from tests.handlers.codecs.tasks import fault, read


@pytest.mark.parametrize(
    ("body", "items"),
    [
        ({"input": "a", "model": "m", "user": "u"}, ("a",)),
        ({"input": ["a", "b"]}, ("a", "b")),
        ({"input": [1, 2]}, ((1, 2),)),
        ({"input": [[1], [2, 3]]}, ((1,), (2, 3))),
    ],
)
def test_inputs(body: Any, items: tuple[Any, ...]) -> None:
    assert read(body, route="v1/embeddings").items == items


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ([], "invalid_type", None),
        ({}, "missing_field", "input"),
        ({"input": ""}, "empty_string", "input"),
        ({"input": ["a", ""]}, "empty_string", "input[1]"),
        ({"input": {"text": "a"}}, "invalid_type", "input"),
        ({"input": "a", "model": 3}, "invalid_type", "model"),
        ({"input": "a", "encoding": "float"}, "unknown_option", "encoding"),
    ],
)
def test_faults(body: Any, code: str, param: str | None) -> None:
    found, answer = fault(body, route="v1/embeddings")
    assert found == (400, code, param)
    assert answer["error"].keys() == {"code", "message", "param", "type"}
    assert answer["error"]["type"] == "invalid_request_error"
