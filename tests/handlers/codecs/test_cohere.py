import json
from typing import Any

import pytest

from tests.handlers.codecs.tasks import RERANKING, fault, read, write

BODY = {"model": "m", "query": "q", "documents": ["a", "b"]}
RANKING = [{"index": 1, "score": 0.5, "document": {"text": "b"}}, {"index": 0, "score": 0.25}]


@pytest.mark.parametrize("route", ["v1/rerank", "v2/rerank", "rerank"])
def test_a_request_and_its_answer(route: str) -> None:
    request = read({**BODY, "top_n": 2, "return_documents": True}, RERANKING, route)
    assert (request.items, dict(request.options)) == ((("q", ("a", "b")),), {"top_n": 2, "return_documents": True})
    answer = json.loads(write(BODY, [RANKING], RERANKING, route))
    assert answer["results"] == [
        {"index": 1, "relevance_score": 0.5, "document": {"text": "b"}},
        {"index": 0, "relevance_score": 0.25},
    ]
    assert answer["meta"]["api_version"] == {"version": "2" if route == "v2/rerank" else "1"}
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert (answer["model"], answer["object"]) == ("tiny", "list")


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ("q", "invalid_type", None),
        ({"documents": ["a"]}, "missing_field", "query"),
        ({**BODY, "query": 3}, "invalid_type", "query"),
        ({**BODY, "top_n": 0}, "invalid_value", "top_n"),
        ({**BODY, "max_chunks_per_doc": 3}, "unknown_option", "max_chunks_per_doc"),
    ],
)
def test_faults_carry_both_names_of_the_text(body: Any, code: str, param: str | None) -> None:
    found, answer = fault(body, RERANKING, "v1/rerank")
    assert found == (400, code, param)
    assert answer["message"] == answer["detail"]
