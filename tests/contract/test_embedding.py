"""EmbeddingHandler through TorchServe's own loader and Service. Oracle: sentence-transformers on the same directory."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from sentence_transformers import SentenceTransformer
from sentence_transformers.util.quantization import quantize_embeddings

from handlers import protocol
from handlers.base import ENVELOPE_BYTES
from handlers.decoding import Call
from handlers.quantization import VECTORS
from handlers.request import Request, Usage
from handlers.serialise import dumps
from scripts.lib.service import Body
from tests.contract.conftest import MIXED, SETTINGS, Serve, Served, assert_close, vectors
from tests.corpus import SENTENCES
from tests.models import tiny_bert
from tests.strategies import bad_bodies, good_bodies, texts

CALIBRATION = list(SENTENCES[:120])


def test_the_tiny_model_is_packed(served: Served) -> None:
    assert served.handler.model.packed


def test_equals_sentence_transformers(served: Served, oracle: SentenceTransformer) -> None:
    answer = served.ask({"texts": MIXED})[0]
    assert_close(vectors(answer), oracle.encode(MIXED))


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"pooling": "cls", "normalize": False}, {"pooling": "cls", "normalize": False}),
        ({"pooling": ["mean", "max"]}, {"pooling": ["max", "mean"]}),
        ({"pooling": "lasttoken"}, {"pooling": "lasttoken"}),
        ({"pooling": "weightedmean"}, {"pooling": "weightedmean"}),
        ({"pooling": "mean_sqrt_len_tokens"}, {"pooling": "mean_sqrt_len_tokens"}),
        ({"dense": 7}, {"dense": ["2_Dense"]}),
        ({"lower_case": True}, {"lower_case": True}),
        (
            {"prompts": {"query": "query: ", "none": ""}, "default_prompt_name": "query"},
            {"prompts": {"query": "query: ", "none": ""}, "default_prompt_name": "query"},
        ),
        (
            {"prompts": {"query": "query text: "}, "default_prompt_name": "query", "include_prompt": False},
            {"prompts": {"query": "query text: "}, "default_prompt_name": "query", "include_prompt": False},
        ),
    ],
)
@pytest.mark.parametrize("attention", ["auto", "padded"])
def test_every_setting_equals_sentence_transformers(
    serve: Serve, tmp_path: Path, options: dict[str, Any], settings: dict[str, Any], attention: str
) -> None:
    model = tiny_bert(tmp_path / "model", **options)
    served = serve(model, **{**SETTINGS, **settings, "attention": attention})
    assert_close(vectors(served.ask({"texts": MIXED})[0]), SentenceTransformer(str(model), device="cpu").encode(MIXED))


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "mpnet", "distilbert"])
def test_families_packed_or_padded(serve: Serve, tmp_path: Path, family: str) -> None:
    model = tiny_bert(tmp_path / "model", family=family)
    served = serve(model, **SETTINGS)
    assert_close(vectors(served.ask({"texts": MIXED})[0]), SentenceTransformer(str(model), device="cpu").encode(MIXED))
    assert served.handler.model.packed == (family != "mpnet"), served.handler.model.why_padded


@settings(deadline=None, max_examples=25)
@given(st.lists(texts, min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_neither_company_nor_order_changes_a_vector(served: Served, many: list[str], random: Any) -> None:
    alone = {text: vectors(served.ask({"text": text})[0])[0] for text in set(many)}
    shuffled = list(many)
    random.shuffle(shuffled)
    together = served.ask(*({"text": text} for text in shuffled), {"texts": many})
    for text, answer in zip(shuffled, together[:-1], strict=True):
        assert_close(vectors(answer)[0], alone[text])
    assert_close(vectors(together[-1]), [alone[text] for text in many])


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.booleans(), good_bodies, bad_bodies), min_size=1, max_size=10))
def test_rows_in_are_answers_out_whatever_the_mix(served: Served, rows: list[tuple[bool, Any, Any]]) -> None:
    bodies = [good if fine else bad for fine, good, bad in rows]
    answers = served.ask(*bodies)
    assert len(answers) == len(rows)
    for (fine, _, _), body, answer in zip(rows, bodies, answers, strict=True):
        assert answer.content_type == "application/json"
        if fine:
            assert_close(vectors(answer), vectors(served.ask(body)[0]))
        else:
            assert 400 <= answer.status < 500
            assert answer.phrase.isascii()
            told = answer.json().get("error", {})
            assert {"code", "param"} <= set(told if isinstance(told, dict) and told else answer.json())
            assert answer.body == served.ask(body)[0].body


def test_shapes(served: Served, oracle: SentenceTransformer) -> None:
    expected = oracle.encode(["the cat", "a dog"])
    raw = [
        Body(b"the cat", "text/plain"),
        Body("the cat".encode("utf-16"), "text/plain"),
        Body(b"the cat", "application/octet-stream"),
        Body(b"the cat", None),
        Body(b'\xef\xbb\xbf{"text": "the cat"}', "application/json"),
        Body(json.dumps({"text": "the cat"}).encode("utf-16"), "application/json"),
        Body(b"the cat", "text/plain", "text"),
        Body(b"the cat", None, "data"),
        Body(b'{"text": "the cat"}', "application/json", "data"),
    ]
    for answer in served.ask(*raw, "the cat", {"text": "the cat"}):
        assert list(answer.json()) == ["embedding"]
        assert_close(vectors(answer)[0], expected[0])
    one, many, listed, predicted = served.ask(
        {"inputs": "the cat"},
        {"inputs": ["the cat", "a dog"]},
        {"texts": ["the cat", "a dog"]},
        {"instances": ["the cat", {"text": "a dog"}]},
    )
    assert_close(one.json(), expected[:1])
    assert_close(many.json(), expected)
    assert_close(listed.json()["embeddings"], expected)
    assert_close(predicted.json()["predictions"], expected)


def test_openai(served: Served, oracle: SentenceTransformer) -> None:
    body = {"input": ["the cat", "a dog " * 40], "model": "tiny", "user": "me"}
    floats, coded, cut = served.ask(
        body,
        {**body, "encoding_format": "base64"},
        {**body, "dimensions": 8, "truncate": True},
        route="v1/embeddings",
    )
    expected = oracle.encode(body["input"])
    assert_close(vectors(floats), expected)
    content = coded.json()
    decoded = [np.frombuffer(base64.b64decode(item["embedding"]), dtype="<f4") for item in content["data"]]
    assert_close(decoded, expected)
    assert [item["index"] for item in content["data"]] == [0, 1]
    assert content["model"] == "tiny"
    assert content["usage"] == {"prompt_tokens": 4 + 48, "total_tokens": 52, "truncated_tokens": 82 - 48}
    shorter = expected[:, :8]
    assert_close(vectors(cut), shorter / np.linalg.norm(shorter, axis=1, keepdims=True))


def test_openai_errors(served: Served) -> None:
    empty, unknown = served.ask({"input": ["a", ""]}, {"text": "a"}, route="v1/embeddings")
    assert empty.status == 400
    assert empty.json()["error"]["param"] == "input[1]"
    assert unknown.json()["error"]["param"] == "input"
    lost = served.ask({"input": "a"}, route="v1/completions")[0]
    assert (lost.status, lost.phrase, lost.json()["code"]) == (404, "Not Found", "unknown_route")
    broken = served.ask(Body(b"{", "application/json", headers={"url_path": "v1/embeddings"}))[0]
    assert broken.json()["error"]["code"] == "malformed_json"


def test_token_ids_are_the_texts_they_stand_for(served: Served, oracle: SentenceTransformer) -> None:
    tokenizer = oracle.tokenizer
    ids = tokenizer("the cat", add_special_tokens=False)["input_ids"]
    one, many = served.ask({"input": ids}, {"input": [ids, tokenizer("a dog")["input_ids"]]})
    assert_close(vectors(one)[0], oracle.encode("the cat"))
    assert_close(vectors(many), oracle.encode(["the cat", "a dog"]))


def test_options(served: Served, oracle: SentenceTransformer) -> None:
    raw, prompted, long, refused = served.ask(
        {"text": "the cat", "normalize": False},
        {"text": "the cat", "prompt": "query: "},
        {"text": "a dog " * 40},
        {"texts": ["the cat", "a dog " * 40], "truncate": False},
    )
    assert np.linalg.norm(vectors(raw)) != pytest.approx(1, abs=1e-3)
    assert_close(vectors(prompted)[0], oracle.encode("the cat", prompt="query: "))
    assert long.headers["X-Truncated-Tokens"] == "34"
    assert (refused.status, refused.json()["param"]) == (400, "texts[1]")
    assert "82 tokens" in refused.json()["message"]
    assert "48" in refused.json()["message"]


def test_prompt_names(serve: Serve, tiny_model: Path, oracle: SentenceTransformer) -> None:
    served = serve(tiny_model, **SETTINGS, prompts={"query": "query: "})
    named, plain, unknown, both = served.ask(
        {"text": "the cat", "prompt_name": "query"},
        {"text": "the cat"},
        {"text": "the cat", "prompt_name": "querry"},
        {"text": "the cat", "prompt_name": "query", "prompt": "x"},
    )
    assert_close(vectors(named)[0], oracle.encode("the cat", prompt="query: "))
    assert_close(vectors(plain)[0], oracle.encode("the cat"))
    assert "did you mean 'query'" in unknown.json()["message"]
    assert both.status == 400


def test_limits(serve: Serve, tiny_model: Path) -> None:
    served = serve(tiny_model, **SETTINGS, max_items=30, max_response_bytes=1024 + 10 * (32 * 17 + 2))
    fits, larger, many, coded = served.ask(
        {"texts": ["the cat"] * 10},
        {"texts": ["the cat"] * 11},
        {"texts": ["the cat"] * 31},
        {"input": ["the cat"] * 20, "encoding_format": "base64"},
    )
    assert fits.status == 200
    assert (larger.status, larger.json()["code"]) == (413, "answer_too_large")
    assert "at most 10 items" in larger.json()["message"]
    assert (many.status, many.json()["code"]) == (413, "too_many_items")
    assert coded.status == 200, "base64 takes less"


@pytest.mark.parametrize("library", ["orjson", "json"])
@settings(deadline=None, max_examples=300)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False) | st.floats(-(2**-13), 2**-13, width=32))
def test_no_float_is_longer_than_the_bound_on_an_answer(served: Served, library: str, number: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if library == "json":
            patch.setattr("handlers.serialise.orjson", None)
        for sign in (1, -1):
            vector = np.full(32, sign * number, dtype=np.float32)
            assert len(dumps(vector)) <= served.handler.item_bytes(Request(("a",), {"normalize": False})) + 2
            if abs(number) <= 1:
                assert len(dumps(vector)) <= served.handler.item_bytes(Request(("a",), {"normalize": True})) + 2


def test_an_answer_stays_within_its_bound(served: Served) -> None:
    rows = list(torch.full((1000, 32), -6.3184107e-06))
    handler = served.handler
    for body in ({"texts": ["a"]}, {"input": ["a"]}, {"input": ["a"], "encoding_format": "base64"}):
        call = Call({**body, "normalize": False})
        codec = protocol.by_body(protocol.PLAIN, call, handler.task)
        request = replace(protocol.read(call, codec, handler.task), items=("a",) * 1000)
        content = codec.write(request, handler.render(request, rows, []), handler.task, "tiny", Usage(1, 1))
        assert len(content) <= 1000 * codec.bound(handler.item_bytes(request), handler.task) + ENVELOPE_BYTES


@pytest.fixture(scope="module")
def calibrated(serve: Serve, tiny_model: Path, oracle: SentenceTransformer) -> Served:
    """An archive with the vectors of CALIBRATION, neither cut nor normalised, as a build leaves them."""
    vectors = torch.from_numpy(SentenceTransformer(modules=list(oracle)[:2], device="cpu").encode(CALIBRATION))
    members = {"calibration.safetensors": save({VECTORS: vectors})}
    return serve(tiny_model, **SETTINGS, calibration="calibration.safetensors", members=members)


@pytest.mark.parametrize("options", [{}, {"dimensions": 12}, {"normalize": False}, {"dimensions": 9}])
@pytest.mark.parametrize("dtype", ["float32", "int8", "uint8", "binary", "ubinary"])
def test_quantised_as_sentence_transformers_quantises(
    calibrated: Served, oracle: SentenceTransformer, options: dict[str, Any], dtype: str
) -> None:
    normalize = options.get("normalize", True)
    model = oracle if normalize else SentenceTransformer(modules=list(oracle)[:2], device="cpu")
    form = {"truncate_dim": options.get("dimensions"), "normalize_embeddings": normalize}
    calibration = model.encode(CALIBRATION, **form)
    quantised, plain = calibrated.ask({"texts": MIXED, "output_dtype": dtype, **options}, {"texts": MIXED, **options})
    found = quantised.json()["embeddings"]
    exact = quantize_embeddings(vectors(plain), dtype, calibration_embeddings=calibration)
    expected = quantize_embeddings(model.encode(MIXED, **form), dtype, calibration_embeddings=calibration)
    assert np.shape(found) == expected.shape
    if dtype == "float32":
        assert_close(found, expected)
    elif dtype in ("int8", "uint8"):  # a number at the edge of two steps may fall into either
        assert np.abs(np.array(found) - expected).max() <= 1
        assert np.mean(np.array(found) == expected) > 0.98
        assert np.abs(np.array(found) - exact).max() <= 1
    else:
        assert found == expected.tolist() == exact.tolist()


def test_quantised_in_every_shape(calibrated: Served) -> None:
    body = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [2], "data": ["the cat", "a dog"]}]}
    listed, *tensors = calibrated.ask(
        {"texts": ["the cat", "a dog"], "output_dtype": "int8"},
        *({**body, "parameters": {"output_dtype": dtype}} for dtype in ("int8", "uint8", "ubinary")),
    )
    wanted = listed.json()["embeddings"]
    assert all(isinstance(number, int) for row in wanted for number in row)
    outputs = [answer.json()["outputs"][0] for answer in tensors]
    assert [(output["datatype"], output["shape"]) for output in outputs] == [
        ("INT8", [2, 32]), ("UINT8", [2, 32]), ("UINT8", [2, 4]),
    ]  # fmt: skip
    assert np.ravel(outputs[0]["data"]).tolist() == np.ravel(wanted).tolist()
    (coded,) = calibrated.ask(
        {"input": ["the cat", "a dog"], "output_dtype": "int8", "encoding_format": "base64"}, route="v1/embeddings"
    )
    decoded = [np.frombuffer(base64.b64decode(item["embedding"]), dtype=np.int8) for item in coded.json()["data"]]
    assert np.array(decoded).tolist() == wanted


def test_bytes_need_a_calibration(served: Served, calibrated: Served) -> None:
    refused, unknown, fine = served.ask(
        {"text": "the cat", "output_dtype": "int8"},
        {"text": "the cat", "output_dtype": "int4"},
        {"text": "the cat", "output_dtype": "binary"},
    )
    assert (refused.status, refused.json()["code"], refused.json()["param"]) == (400, "not_calibrated", "output_dtype")
    assert (unknown.status, unknown.json()["param"]) == (400, "output_dtype")
    assert fine.status == 200
    assert served.handler.card()["output_dtypes"] == ["float32", "binary", "ubinary"]
    assert "int8" in calibrated.handler.card()["output_dtypes"]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "binary", "ubinary"])
def test_a_quantised_answer_stays_within_its_bound(calibrated: Served, dtype: str) -> None:
    handler = calibrated.handler
    for form in ("float", "base64"):
        request = Request(("a",), {"output_dtype": dtype, "encoding_format": form})
        for sign in (1, -1):
            (value,) = handler.render(request, [sign * torch.ones(32)], [])
            assert len(dumps(value)) <= handler.item_bytes(request) + 2


def test_bfloat16_by_name(serve: Serve, tiny_model: Path, oracle: SentenceTransformer) -> None:
    served = serve(tiny_model, **SETTINGS, dtype="bfloat16")
    found = vectors(served.ask({"texts": MIXED})[0])
    assert (np.sum(found * oracle.encode(MIXED), axis=1) > 0.99).all()
