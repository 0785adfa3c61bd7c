"""One model, every shape that clients speak: equal vectors, the same limits, and errors in the client's own form."""

import base64
import csv
import io
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from scripts.lib.service import Answer, Body
from tests.contract.conftest import SETTINGS, Serve, Served, assert_close

TEXTS = ["the cat", 'a dog, "quoted"', "ünïcödé ☃"]


class Shape(NamedTuple):
    """How a client asks for the vectors of texts, finds them in the answer, and an error in an answer."""

    ask: Callable[[list[str]], Body]
    vectors: Callable[[Answer], Any]
    error: Callable[[Any], Any]
    field: str


def sent(body: Any, route: str = "", kind: str = "application/json", **headers: str) -> Body:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Body(data, kind, headers={**({"url_path": route} if route else {}), **headers})


def rows(texts: list[str]) -> bytes:
    out = io.StringIO()
    csv.writer(out).writerows([text] for text in texts)
    return out.getvalue().encode()


def lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps(text).encode() + b"\n" for text in texts)


def tensor(texts: list[str]) -> dict[str, Any]:
    return {
        "id": "42",
        "inputs": [{"name": "text", "datatype": "BYTES", "shape": [len(texts)], "data": texts}],
        "outputs": [{"name": "embedding"}],
    }


def of_tensor(answer: Answer) -> Any:
    content = answer.json()
    assert (content["id"], content["model_name"]) == ("42", "tiny")
    (output,) = content["outputs"]
    assert (output["name"], output["datatype"]) == ("embedding", "FP32")
    return np.reshape(output["data"], output["shape"])


def of_lines(answer: Answer) -> Any:
    assert answer.content_type == "application/jsonlines"
    return [json.loads(line) for line in answer.body.splitlines()]


def of_rows(answer: Answer) -> Any:
    assert answer.content_type == "text/csv"
    return [[float(cell) for cell in row] for row in csv.reader(io.StringIO(answer.body.decode()))]


def of_base64(answer: Answer) -> Any:
    return [np.frombuffer(base64.b64decode(item["embedding"]), dtype="<f4") for item in answer.json()["data"]]


def message(content: Any) -> Any:
    return content["message"]


def error(content: Any) -> Any:
    return content["error"]


SHAPES = {
    "plain": Shape(lambda t: sent({"texts": t}), lambda a: a.json()["embeddings"], message, "texts"),
    "list": Shape(lambda t: sent(t), lambda a: a.json()["embeddings"], message, "texts"),
    "huggingface": Shape(lambda t: sent({"inputs": t}), lambda a: a.json(), error, "inputs"),
    "embed": Shape(lambda t: sent({"inputs": t}, "embed"), lambda a: a.json(), error, "inputs"),
    "openai": Shape(
        lambda t: sent({"input": t}, "v1/embeddings"),
        lambda a: [item["embedding"] for item in a.json()["data"]],
        lambda content: content["error"]["message"],
        "input",
    ),
    "openai base64": Shape(
        lambda t: sent({"input": t, "encoding_format": "base64"}),
        of_base64,
        lambda content: content["error"]["message"],
        "input",
    ),
    "kserve v1": Shape(
        lambda t: sent({"instances": t}, "v1/models/tiny:predict"),
        lambda a: a.json()["predictions"],
        error,
        "instances",
    ),
    "vertex": Shape(
        lambda t: sent({"instances": [{"text": text} for text in t], "parameters": {"normalize": True}}),
        lambda a: a.json()["predictions"],
        error,
        "instances",
    ),
    "kserve v2": Shape(lambda t: sent(tensor(t), "v2/models/tiny/infer"), of_tensor, error, "data"),
    "kserve v2 by its body": Shape(lambda t: sent(tensor(t)), of_tensor, error, "data"),
    "json lines": Shape(lambda t: sent(lines(t), kind="application/jsonlines"), of_lines, message, "lines"),
    "csv": Shape(lambda t: sent(rows(t), kind="text/csv; charset=utf-8"), of_rows, message, "lines"),
    "csv, answered in json": Shape(
        lambda t: sent(rows(t), kind="text/csv", accept="application/json"), lambda a: a.json(), message, "lines"
    ),
    "json, answered in lines": Shape(
        lambda t: sent({"inputs": t}, accept="application/jsonlines"), of_lines, error, "inputs"
    ),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


@every_shape
def test_vectors_are_equal_in_all(served: Served, oracle: SentenceTransformer, shape: Shape) -> None:
    for texts in (TEXTS, TEXTS[:1]):
        (answer,) = served.ask(shape.ask(texts))
        assert answer.status == 200, answer.body
        assert_close(shape.vectors(answer), oracle.encode(texts))


def test_all_shapes_in_one_batch(served: Served, oracle: SentenceTransformer) -> None:
    """With an error beside each."""
    expected = oracle.encode(TEXTS)
    asked = [body for shape in SHAPES.values() for body in (shape.ask(TEXTS), sent({"texts": ["a", 3]}))]
    answers = served.ask(*asked)
    for shape, answer, refused in zip(SHAPES.values(), answers[::2], answers[1::2], strict=True):
        assert_close(shape.vectors(answer), expected)
        assert (refused.status, refused.json()["param"]) == (400, "texts[1]")


@pytest.fixture(scope="module")
def small(serve: Serve, tiny_model: Path) -> Served:
    return serve(tiny_model, **SETTINGS, max_items=8)


@every_shape
def test_a_list_over_the_item_limit(small: Served, shape: Shape) -> None:
    (answer,) = small.ask(shape.ask(["a"] * 9))
    content = answer.json()
    assert answer.status == 413
    assert "9 items; at most 8" in shape.error(content)
    assert content.get("param", shape.field) == shape.field
    assert answer.content_type == "application/json"
    assert content.get("id", "42") == "42"


@every_shape
def test_an_answer_over_the_limit_is_refused_before_compute(
    small: Served, shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 1024 + (3 * 240 if shape is SHAPES["openai base64"] else 5 * (32 * 17 + 64))
    monkeypatch.setattr(small.handler, "settings", replace(small.handler.settings, max_response_bytes=limit))
    ran: list[int] = []
    whole = small.handler.forward
    monkeypatch.setattr(small.handler, "forward", lambda e, precise: (ran.append(len(e)), whole(e, precise))[1])
    (answer,) = small.ask(shape.ask(["a"] * 7))
    assert (answer.status, ran) == (413, [])
    fits = int(shape.error(answer.json()).split("at most ")[1].split()[0])
    (answer,) = small.ask(shape.ask(["a"] * fits))
    assert (answer.status, sum(ran)) == (200, fits)
    assert len(answer.body) <= limit


def test_an_id_is_echoed_in_errors_and_bounded(served: Served) -> None:
    fine, long, early = served.ask(
        sent({**tensor(["a"]), "outputs": [{"name": "x"}]}, "v2/models/m/infer"),
        sent({**tensor(["a"]), "id": "é" * 3_000_000}, "v2/models/m/infer"),
        sent({**tensor(["a"]), "inputs": []}, "v2/models/m/infer"),
    )
    assert (fine.status, fine.json()["id"], early.json()["id"]) == (400, "42", "42")
    assert (long.status, long.json()["param"], len(long.body) < 1000) == (400, "id", True)


def test_its_route_decides_whatever_the_body(served: Served) -> None:
    broken, other = served.ask(
        Body(b"{", "application/json", headers={"url_path": "v2/models/m/infer"}),
        Body(b'{"inputs": ["a", 3]}', "application/json", headers={"url_path": "embed"}),
    )
    assert (broken.status, broken.json()["code"]) == (400, "malformed_json")
    assert (other.status, other.json()["error_type"]) == (422, "Validation")


def test_the_card_tells_what_a_client_wants_to_know(served: Served) -> None:
    card = served.handler.card()
    expected = {
        "task": "embedding", "handler": "handlers.embedding.EmbeddingHandler", "model_type": "bert",
        "architecture": "BertModel", "dimensions": 32, "max_tokens": 48, "max_items": 1024, "dtype": "float32",
        "device": "cpu", "attention": "packed", "pooling": ["mean"], "normalize": True, "prompts": {},
        "max_response_bytes": 6_553_500, "response_timeout": 120, "fields": ["text"],
        "routes": ["v1/embeddings", "embed", "v1/models/NAME:predict", "v2/models/NAME/infer"],
    }  # fmt: skip
    assert {key: card[key] for key in expected} == expected
    assert {"normalize", "truncate", "dimensions"} <= set(card["options"])
    assert card["microseconds_per_token"] > 0
    assert card["launch_cost_tokens"] >= 0
    assert "labels" not in card
    assert str(served.directory) not in json.dumps(card), "nothing of the machine's paths"


def test_nothing_a_client_sent_is_logged_in_any_shape(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        served.ask(*(shape.ask(["sesame", "sesame\ud800"]) for name, shape in SHAPES.items() if "csv" not in name))
    assert "sesame" not in caplog.text
