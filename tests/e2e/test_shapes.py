"""Every shape over HTTP, through a real TorchServe: what its frontend makes of paths, content types and headers."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from sentence_transformers import SentenceTransformer

from scripts.lib.server import TorchServe
from tests.e2e.conftest import serving_mapping, start_server

TEXTS = ["the cat", 'a dog, "quoted"', "ünïcödé ☃"]
JSON, LINES, TABLE = "application/json", "application/jsonlines", "text/csv"


@pytest.fixture(scope="module")
def server(tiny_archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchServe]:
    model = {"archive": "tiny.mar", "version": "1.0", "workers": 1, "batch_size": 8, "max_batch_delay": 1}
    with start_server(tmp_path_factory.mktemp("tiny"), serving_mapping(tiny_archive.parent, {"tiny": model})) as server:
        yield server


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Any:
    return SentenceTransformer(str(tiny_model), device="cpu").encode(TEXTS)


def post(server: TorchServe, path: str, body: Any, kind: str = JSON, **headers: str) -> requests.Response:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return requests.post(
        f"{server.urls.inference}/{path}",
        data=data,
        headers={**server.headers(), "Content-Type": kind, **headers},
        timeout=60,
    )


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.array(found, dtype=np.float32), expected, rtol=0, atol=1e-5)


def table(texts: list[str]) -> bytes:
    out = io.StringIO()
    csv.writer(out).writerows([text] for text in texts)
    return out.getvalue().encode()


def lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"inputs": text}).encode() + b"\r\n" for text in texts)


def cells(answer: requests.Response) -> list[list[float]]:
    return [[float(cell) for cell in row] for row in csv.reader(io.StringIO(answer.text))]


TENSORS = {"id": "42", "inputs": [{"name": "text", "datatype": "BYTES", "shape": [3], "data": TEXTS}]}
MODEL = "predictions/tiny/1.0"


def test_routes(server: TorchServe, expected: Any) -> None:
    close(post(server, f"{MODEL}/embed", {"inputs": TEXTS}).json(), expected)
    for path in ("v1/models/tiny:predict", "v1/models/tiny%3Apredict", "/v1/models/tiny:predict/"):
        answer = post(server, f"{MODEL}/{path}", {"instances": TEXTS, "parameters": {"normalize": True}})
        assert answer.status_code == 200, (path, answer.text)
        close(answer.json()["predictions"], expected)
    for path in ("v2/models/tiny/infer", "v2/models/tiny/versions/1.0/infer"):
        answer = post(server, f"{MODEL}/{path}", TENSORS)
        assert answer.status_code == 200, (path, answer.text)
        (output,) = answer.json()["outputs"]
        assert (answer.json()["id"], output["datatype"], output["shape"]) == ("42", "FP32", [3, 32])
        close(np.reshape(output["data"], output["shape"]), expected)


def test_lines_and_tables(server: TorchServe, expected: Any) -> None:
    for kind in (LINES, "application/x-jsonlines; charset=utf-8"):
        answer = post(server, "predictions/tiny", lines(TEXTS), kind)
        assert (answer.status_code, answer.headers["Content-Type"]) == (200, LINES), answer.text
        close([json.loads(line) for line in answer.text.splitlines()], expected)
    for kind in (TABLE, "text/csv; charset=utf-8"):
        answer = post(server, "predictions/tiny", table(TEXTS), kind)
        assert (answer.status_code, answer.headers["Content-Type"]) == (200, TABLE), answer.text
        close(cells(answer), expected)
    close(post(server, "predictions/tiny", table(TEXTS), TABLE, Accept=JSON).json(), expected)
    close(cells(post(server, "predictions/tiny", {"inputs": TEXTS}, Accept="text/csv, */*;q=0.1")), expected)


def test_invocations_as_sagemaker_sends_them(server: TorchServe, expected: Any) -> None:
    """TorchServe's own path for it names no model: the one that is loaded answers."""
    close(post(server, "invocations", {"inputs": TEXTS}).json(), expected)
    close(cells(post(server, "invocations", table(TEXTS), TABLE)), expected)
    answer = post(server, "invocations", lines(TEXTS), LINES, Accept=LINES)
    close([json.loads(line) for line in answer.text.splitlines()], expected)
    refused = post(server, "invocations", {"inputs": ["a", 3]})
    assert (refused.status_code, refused.json()["param"]) == (400, "inputs[1]")


@pytest.mark.parametrize(
    ("path", "body", "kind", "status", "answer"),
    [
        (f"{MODEL}/embed", {"inputs": ["a", 3]}, JSON, 422, {"error_type": "Validation", "param": "inputs[1]"}),
        (f"{MODEL}/embed", {"inputs": []}, JSON, 400, {"error_type": "Empty"}),
        (f"{MODEL}/v1/models/tiny:predict", {"instances": []}, JSON, 400, {"param": "instances"}),
        (f"{MODEL}/v2/models/tiny/infer", {**TENSORS, "parameters": {"x": 1}}, JSON, 400, {"id": "42", "param": "x"}),
        (f"{MODEL}/v1/models/tiny:explain", {"instances": ["a"]}, JSON, 404, {"code": "unknown_route"}),
        (f"{MODEL}/rerank", {"query": "a", "texts": ["b"]}, JSON, 404, {"code": "unknown_route"}),
        ("predictions/tiny", b'"a"\n{"text', LINES, 400, {"code": "malformed_json", "param": "lines[1]"}),
        ("predictions/tiny", b'"a', TABLE, 400, {"code": "malformed_csv"}),
        ("predictions/tiny", b"", TABLE, 400, {"code": "empty_body"}),
        ("predictions/tiny", b'"a"\n' * 1025, LINES, 413, {"code": "too_many_items"}),
    ],
)
def test_errors(server: TorchServe, path: str, body: Any, kind: str, status: int, answer: dict[str, Any]) -> None:
    found = post(server, path, body, kind)
    assert found.status_code == status, found.text
    assert found.headers["Content-Type"] == JSON
    assert answer.items() <= found.json().items()


def test_the_card(server: TorchServe, tiny_model: Path) -> None:
    url = f"{server.urls.management}/models/tiny?customized=true"
    (described,) = requests.get(url, headers=server.headers("management"), timeout=30).json()
    card = described["customizedMetadata"]
    card = json.loads(card) if isinstance(card, str) else card
    assert (card["task"], card["model_type"], card["dimensions"]) == ("embedding", "bert", 32)
    assert card["source"] == tiny_model.name
    assert str(tiny_model.parent) not in json.dumps(card)
