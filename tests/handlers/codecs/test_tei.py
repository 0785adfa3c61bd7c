import json
from typing import Any

import pytest

from handlers.codecs.tei import Embed
from handlers.errors import ModelFailure, OutOfMemory, Overloaded, RequestError, TooLarge
from handlers.request import Pair, Task
from tests.handlers.codecs.tasks import CLASSIFICATION, EMBEDDING, RERANKING, fault, read, write


@pytest.mark.parametrize(
    ("route", "task", "body", "items", "options"),
    [
        ("embed", EMBEDDING, {"inputs": "a"}, ("a",), {"normalize": True}),
        ("embed", EMBEDDING, {"inputs": ["a", [1, 2]], "normalize": False}, ("a", (1, 2)), {"normalize": False}),
        ("embed", EMBEDDING, {"inputs": [1, 2], "truncation_direction": "Right"}, ((1, 2),), {"normalize": True}),
        ("predict", CLASSIFICATION, {"inputs": "a"}, ("a",), {"top_k": None}),
        ("predict", CLASSIFICATION, {"inputs": ["a", "b"], "raw_scores": False}, (Pair("a", "b"),), {"top_k": None}),
        (
            "predict",
            CLASSIFICATION,
            {"inputs": [["a"], ["b", "c"]], "raw_scores": True},
            ("a", Pair("b", "c")),
            {"top_k": None, "function_to_apply": "none"},
        ),
        (
            "rerank",
            RERANKING,
            {"query": "q", "texts": ["a"], "return_text": True, "raw_scores": True},
            (("q", ("a",)),),
            {"return_documents": True, "raw_scores": True},
        ),
    ],
)
def test_requests(route: str, task: Task, body: Any, items: tuple[Any, ...], options: dict[str, Any]) -> None:
    request = read(body, task, route)
    assert (request.items, dict(request.options)) == (items, options)


def test_answers() -> None:
    labels = [{"label": "x", "score": 0.5}]
    assert json.loads(write({"inputs": "a"}, [[0.5]], EMBEDDING, "embed")) == [[0.5]]
    assert json.loads(write({"inputs": "a"}, [labels], CLASSIFICATION, "predict")) == labels
    assert json.loads(write({"inputs": [["a"]]}, [labels], CLASSIFICATION, "predict")) == [labels]
    ranking = [[{"index": 1, "score": 0.5, "document": {"text": "b"}}, {"index": 0, "score": 0.25}]]
    assert json.loads(write({"query": "q", "texts": ["a", "b"]}, ranking, RERANKING, "rerank")) == [
        {"index": 1, "score": 0.5, "text": "b"},
        {"index": 0, "score": 0.25},
    ]


@pytest.mark.parametrize(
    ("route", "task", "body", "found", "kind"),
    [
        ("embed", EMBEDDING, {"inputs": []}, (400, "empty_list", "inputs"), "Empty"),
        ("embed", EMBEDDING, {"inputs": ["a", 3]}, (422, "invalid_type", "inputs[1]"), "Validation"),
        ("embed", EMBEDDING, {"text": "a"}, (422, "missing_field", "inputs"), "Validation"),
        (
            "embed",
            EMBEDDING,
            {"inputs": "a", "truncation_direction": "left"},
            (422, "invalid_value", "truncation_direction"),
            "Validation",
        ),
        ("predict", CLASSIFICATION, {"inputs": ["a", "b", "c"]}, (422, "invalid_type", "inputs"), "Validation"),
        (
            "predict",
            CLASSIFICATION,
            {"inputs": "a", "raw_scores": 1},
            (422, "invalid_type", "raw_scores"),
            "Validation",
        ),
        ("rerank", RERANKING, {"query": "q"}, (422, "missing_field", "texts"), "Validation"),
    ],
)
def test_faults(route: str, task: Task, body: Any, found: tuple[int, str, str], kind: str) -> None:
    seen, answer = fault(body, task, route)
    assert seen == found
    assert (answer["error_type"], isinstance(answer["error"], str)) == (kind, True)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("x", code="malformed_json"), 400, "Validation"),
        (RequestError("x", code="too_long"), 413, "Validation"),
        (RequestError("x", code="invalid_token"), 422, "Tokenizer"),
        (TooLarge("x"), 413, "Validation"),
        (ModelFailure("x"), 424, "Backend"),
        (OutOfMemory("x"), 424, "Backend"),
        (Overloaded("x"), 429, "Overloaded"),
    ],
)
def test_its_statuses(error: RequestError, status: int, kind: str) -> None:
    codec = Embed()
    assert (codec.status(error), json.loads(codec.refuse(error, {}))["error_type"]) == (status, kind)
