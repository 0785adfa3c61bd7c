"""SparseEmbeddingHandler through TorchServe's loader and Service. Oracle: SparseEncoder on the same directory."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder, SpladePooling

from handlers import pooling
from handlers.request import Request
from handlers.serialise import dumps
from scripts.lib import checkpoint, tree
from scripts.lib.errors import UserError
from scripts.lib.service import Answer, Body
from tests.contract.conftest import Build, Serve, Served
from tests.families import family
from tests.models import write_json
from tests.strategies import texts

HANDLER = "handlers.sparse_embedding"
SETTINGS = {"max_tokens": 48}
MIXED = ["the cat", "", "a dog runs in the old house and eats " * 6, "hello world", "THE Cat", "ünïcödé ☃", "x"]
# Every family's masked-language-model head is in test_fill_mask.py
PACKED = {"xlm-roberta": True, "deberta-v2": False}


def splade(directory: Path, name: str = "bert", *, strategy: str = "max", activation: str = "relu") -> SparseEncoder:
    """A tiny SPLADE model, saved to `directory` by the library itself."""
    plain = SparseEncoder(str(family(directory.parent / f"{directory.name}-network", name, head="masked-lm")))
    pooled = SpladePooling(strategy, activation)
    prompts = {"query": "which text tells: ", "document": ""}
    model = SparseEncoder(modules=[plain[0], pooled], device="cpu", prompts=prompts)
    model.max_seq_length = 48
    model.save(str(directory))
    return model


def dense(values: list[dict[str, Any]], width: int) -> np.ndarray[Any, Any]:
    """Sparse values as rows of all words."""
    rows = np.zeros((len(values), width), dtype=np.float32)
    for row, value in zip(rows, values, strict=True):
        assert value["indices"] == sorted(set(value["indices"]))
        assert all(weight > 0 for weight in value["values"])
        row[value["indices"]] = value["values"]
    return rows


def found(answer: Answer) -> list[dict[str, Any]]:
    assert answer.status == 200, answer.body
    content = answer.json()
    return content.get("sparse_embeddings") or content.get("predictions") or [content["sparse_embedding"]]


def assert_equal(values: list[dict[str, Any]], expected: Any) -> None:
    """Equal to 1e-5, where the library's tensor may leave out what rounding brings to 0."""
    wanted = expected.to_dense().numpy()
    wanted = wanted[None] if wanted.ndim == 1 else wanted
    np.testing.assert_allclose(dense(values, wanted.shape[1]), wanted, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "splade"
    splade(directory)
    return directory


@pytest.fixture(scope="module")
def oracle(model: Path) -> SparseEncoder:
    return SparseEncoder(str(model), device="cpu")


@pytest.fixture(scope="module")
def served(serve: Serve, model: Path) -> Served:
    return serve(model, handler=HANDLER, **SETTINGS, prompts={"query": "which text tells: "})


@pytest.mark.parametrize("name", PACKED)
def test_families(serve: Serve, tmp_path: Path, name: str) -> None:
    oracle = splade(tmp_path / "model", name)
    served = serve(tmp_path / "model", handler=HANDLER, **SETTINGS)
    assert served.handler.model.packed == PACKED[name], served.handler.model.why_padded
    assert_equal(found(served.ask({"texts": MIXED})[0]), oracle.encode(MIXED))


@pytest.mark.parametrize(
    ("strategy", "activation", "attention"),
    [
        ("max", "relu", "padded"),
        ("max", "log1p_relu", "packed"),
        ("sum", "relu", "packed"),
        ("sum", "log1p_relu", "padded"),
    ],
)
def test_every_setting_equals_the_library(
    serve: Serve, tmp_path: Path, strategy: str, activation: str, attention: str
) -> None:
    oracle = splade(tmp_path / "model", strategy=strategy, activation=activation)
    own = checkpoint.read(tree.walk(tmp_path / "model"))
    assert own.task == "sparse_embedding"
    keys = {key: value for key, value in own.settings().items() if key not in ("task", "model")}
    assert keys["max_tokens"] == 48
    served = serve(tmp_path / "model", handler=HANDLER, **keys, attention=attention)
    assert_equal(found(served.ask({"texts": MIXED})[0]), oracle.encode(MIXED))


def test_scores_are_made_a_slice_at_a_time(
    served: Served, oracle: SparseEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooling, "SPLADE_SLICE", 5 * served.handler.vocabulary)
    sizes = []
    head = served.handler.model.head
    monkeypatch.setattr(served.handler.model, "head", lambda states: sizes.append(len(states)) or head(states))
    assert_equal(found(served.ask({"texts": MIXED})[0]), oracle.encode(MIXED))
    assert max(sizes) == 5
    assert len(sizes) > len(MIXED)


@settings(deadline=None, max_examples=10)
@given(st.lists(texts, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_neither_company_nor_order_changes_a_weight(served: Served, many: list[str], mixer: random.Random) -> None:
    width = served.handler.vocabulary
    alone = {text: dense(found(served.ask({"text": text})[0]), width)[0] for text in set(many)}
    shuffled = list(many)
    mixer.shuffle(shuffled)
    *single, together = served.ask(*({"text": text} for text in shuffled), {"texts": many})
    for text, answer in zip(shuffled, single, strict=True):
        np.testing.assert_allclose(dense(found(answer), width)[0], alone[text], rtol=0, atol=1e-5)
    np.testing.assert_allclose(dense(found(together), width), [alone[text] for text in many], rtol=0, atol=1e-5)


def test_options(served: Served, oracle: SparseEncoder) -> None:
    few, all_of_them, query, own, cut, words = served.ask(
        {"texts": MIXED, "top_k": 5},
        {"texts": MIXED, "top_k": 10_000},
        {"texts": MIXED, "prompt_name": "query"},
        {"text": "the cat", "prompt": "is it: "},
        {"text": MIXED[2]},
        {"text": "the cat", "top_k": 7, "return_tokens": True},
    )
    assert_equal(found(few), oracle.encode(MIXED, max_active_dims=5))
    assert {len(value["values"]) for value in found(few)} == {5}
    assert_equal(found(all_of_them), oracle.encode(MIXED))
    assert_equal(found(query), oracle.encode_query(MIXED))
    assert_equal(found(own), oracle.encode("the cat", prompt="is it: "))
    assert int(cut.headers["X-Truncated-Tokens"]) > 0
    (value,) = found(words)
    by_weight = sorted(zip(value["tokens"], value["values"], strict=True), key=lambda entry: -entry[1])
    decoded = oracle.decode(oracle.encode("the cat", max_active_dims=7))
    assert [token for token, _ in by_weight] == [token for token, _ in decoded]


def test_the_models_own_limit_of_words(serve: Serve, model: Path, oracle: SparseEncoder) -> None:
    served = serve(model, handler=HANDLER, **SETTINGS, max_active_dims=4)
    plain, more, none = served.ask({"text": "the cat"}, {"text": "the cat", "top_k": 6}, {"text": "a", "top_k": None})
    assert_equal(found(plain), oracle.encode("the cat", max_active_dims=4))
    assert len(found(more)[0]["values"]) == 6
    assert len(found(none)[0]["values"]) == 4


def test_shapes(served: Served, oracle: SparseEncoder) -> None:
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["the cat"]}
    hugging, listed, v1, v2 = served.ask(
        {"inputs": "the cat", "parameters": {"top_k": 5}},
        {"inputs": ["the cat", "a dog"]},
        {"instances": ["the cat", {"text": "a dog"}]},
        {"id": "7", "inputs": [tensor]},
    )
    assert_equal(hugging.json(), oracle.encode(["the cat"], max_active_dims=5))
    assert_equal(listed.json(), oracle.encode(["the cat", "a dog"]))
    assert_equal(found(v1), oracle.encode(["the cat", "a dog"]))
    output = v2.json()["outputs"][0]
    assert (output["name"], output["datatype"], output["shape"]) == ("sparse_embedding", "BYTES", [1])
    assert_equal([json.loads(output["data"][0])], oracle.encode(["the cat"]))
    ids = oracle.tokenizer("the cat")["input_ids"]
    one, many, by_id = served.ask(
        {"inputs": "the cat"}, {"inputs": ["the cat", "a dog"]}, {"inputs": ids}, route="embed_sparse"
    )
    for answer, wanted in ((one, ["the cat"]), (many, ["the cat", "a dog"]), (by_id, ["the cat"])):
        values = [
            {"indices": [entry["index"] for entry in row], "values": [entry["value"] for entry in row]}
            for row in answer.json()
        ]
        assert_equal(values, oracle.encode(wanted))
    (words,) = served.ask({"inputs": "the cat", "return_tokens": True}, route="embed_sparse")
    assert (words.status, words.json()["code"], words.json()["param"]) == (422, "unknown_option", "return_tokens")
    (table,) = served.ask(Body(b"the cat\n", "text/csv"))
    assert json.loads(table.body.decode().strip().strip('"').replace('""', '"'))["indices"]


def test_bad_requests_stay_alone(served: Served, oracle: SparseEncoder) -> None:
    bad = [
        ({"text": "a", "top_k": 0}, "invalid_value", "top_k"),
        ({"text": "a", "top_k": "5"}, "invalid_type", "top_k"),
        ({"text": "a", "return_tokens": 1}, "invalid_type", "return_tokens"),
        ({"texts": ["a", 3]}, "invalid_type", "texts[1]"),
        ({"text": "a", "prompt_name": "querry"}, "invalid_value", "prompt_name"),
        ({"text": "a", "prompt_name": "query", "prompt": "x"}, "ambiguous_input", "prompt"),
        ({"text": "a", "normalize": True}, "unknown_option", "normalize"),
        ({"texts": ["a", MIXED[2]], "truncate": False}, "too_long", "texts[1]"),
        ({"texts": []}, "empty_list", "texts"),
    ]
    good, *refused, last = served.ask({"text": "the cat"}, *(body for body, _, _ in bad), {"texts": ["a dog"]})
    assert_equal(found(good), oracle.encode(["the cat"]))
    assert_equal(found(last), oracle.encode(["a dog"]))
    for answer, (_, code, param) in zip(refused, bad, strict=True):
        assert (answer.status, answer.json()["code"], answer.json()["param"]) == (400, code, param)


def test_an_answer_stays_within_its_bound(serve: Serve, served: Served, model: Path) -> None:
    handler = served.handler
    for options in ({"top_k": 40}, {"top_k": 10_000, "return_tokens": True}):
        request = Request(("a",), options)
        row = handler.forward([handler.model.tokens.encode(handler.texts(request))[0][0]], False)[0].clone()
        row[1] = 1.17549435e-38
        (value,) = handler.render(request, [row], [])
        assert len(dumps(value)) <= handler.item_bytes(request)
    assert handler.item_bytes(Request(("a",), {})) == 0
    tight = serve(model, handler=HANDLER, **SETTINGS, max_response_bytes=4000)
    early, late, fine = tight.ask({"texts": ["a"] * 9, "top_k": 50}, {"texts": ["a"] * 9}, {"text": "a", "top_k": 9})
    assert (early.status, early.json()["code"]) == (413, "answer_too_large")
    assert "fit in one request" in early.json()["message"]
    assert (late.status, late.json()["code"]) == (413, "answer_too_large")
    assert fine.status == 200


def test_a_masked_language_model_is_served_on_request(tmp_path: Path) -> None:
    own = checkpoint.read(tree.walk(family(tmp_path, "roberta", head="masked-lm")), task="sparse_embedding")
    assert (own.task, own.own["prompts"]) == ("sparse_embedding", {"query": "", "document": ""})
    assert "max pooling" in own.notes[0]


def test_other_sparse_encoders_are_refused(tmp_path: Path, model: Path) -> None:
    mean = SparseEncoder(str(family(tmp_path / "plain", "bert")), device="cpu")
    assert isinstance(mean[-1], SparseAutoEncoder)
    mean.save(str(tmp_path / "csr"))
    with pytest.raises(UserError, match="not served"):
        checkpoint.read(tree.walk(tmp_path / "csr"))
    files = dict(tree.walk(model))
    del files["config.json"]
    write_json(tmp_path / "router_config.json", {})
    with pytest.raises(UserError, match="Router"):
        checkpoint.read(files | {"router_config.json": tmp_path / "router_config.json"})


def test_a_build_finds_the_task_and_the_archive_answers(model: Path, build_archive: Build) -> None:
    whole = build_archive(model)
    assert (whole.settings["task"], whole.handler) == ("sparse_embedding", HANDLER)
    assert whole.settings["prompts"]["query"] == "which text tells: "
