"""ClassificationHandler through TorchServe's own loader and Service. Oracle: transformers' pipeline, text by text."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import pipeline
from typer.testing import CliRunner

from handlers.base import ENVELOPE_BYTES
from scripts.build import build
from scripts.lib import archive
from scripts.lib.service import Body
from tests.contract.conftest import Serve, Served
from tests.families import family

HANDLER = "handlers.classification"
SETTINGS = {"max_tokens": 32}
LABELS = ["bad", "so so", "good"]
LONG = "a dog runs in the old house and eats " * 6
ITEMS: list[Any] = [
    "the cat", "", LONG, "ünïcödé ☃", {"text": "The Cat", "text_pair": "sleeps here"}, {"text": "x", "text_pair": ""},
    {"text": LONG, "text_pair": "a dog"}, {"text": "the house"},
]  # fmt: skip
APP = typer.Typer(pretty_exceptions_enable=False)
APP.command()(build)


def classifier(directory: Path, name: str = "bert", **options: Any) -> Path:
    return family(directory, name, head="sequence-classification", **{"labels": LABELS, **options})


def classify(model: Path) -> Any:
    return pipeline("text-classification", str(model), device="cpu", truncation=True, max_length=32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return classifier(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="module")
def served(serve: Serve, model: Path) -> Served:
    return serve(model, handler=HANDLER, **SETTINGS)


@pytest.fixture(scope="module")
def oracle(model: Path) -> Any:
    return classify(model)


def assert_equal(found: Any, expected: Any) -> None:
    """Labels and their order are equal, scores to 1e-5."""
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found["label"] == expected["label"]
        assert found["score"] == pytest.approx(expected["score"], abs=1e-5)


def predictions(served: Served, items: list[Any], **options: Any) -> Any:
    answer = served.ask({"texts": items, **options})[0]
    assert answer.status == 200, answer.body
    return answer.json()["predictions"]


@pytest.mark.parametrize(
    ("name", "packed"),
    [("roberta", True), ("electra", True), ("modernbert", False), ("bart", False)],
)
def test_families_equal_the_pipeline(serve: Serve, tmp_path: Path, name: str, packed: bool) -> None:
    model = classifier(tmp_path / "model", name)
    served, oracle = serve(model, handler=HANDLER, **SETTINGS), classify(model)
    assert served.handler.model.packed == packed, served.handler.model.why_padded
    assert_equal(predictions(served, ITEMS, top_k=None), [oracle(item, top_k=None) for item in ITEMS])


def test_a_decoder_finds_the_end_of_each_text_whatever_the_tokenizer_pads_with(serve: Serve, tmp_path: Path) -> None:
    model = classifier(tmp_path / "model", "qwen3")
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": "<|im_end|>"}))
    served, oracle = serve(model, handler=HANDLER, **SETTINGS), classify(model)
    assert oracle.tokenizer.pad_token_id != oracle.model.config.pad_token_id
    items = [item for item in ITEMS if item]  # no token at all is an error, there and here
    assert_equal(predictions(served, items, top_k=None), [oracle(item, top_k=None) for item in items])


def test_packed_and_padded_values_are_those_of_the_pipeline(
    serve: Serve, served: Served, model: Path, oracle: Any
) -> None:
    padded = serve(model, handler=HANDLER, **SETTINGS, attention="padded")
    assert (served.handler.model.packed, padded.handler.model.packed) == (True, False)
    for options in ({}, {"top_k": 1}, {"top_k": 2}, {"top_k": None}, {"top_k": 9}):
        expected = [oracle([item], **options)[0] for item in ITEMS]
        assert_equal(predictions(served, ITEMS, **options), expected)
        assert_equal(predictions(padded, ITEMS, **options), expected)


@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        (LABELS, "multi_label_classification"),
        (LABELS, "regression"),
        (["LABEL_0"], "regression"),
        (["LABEL_0"], None),
    ],
)
def test_every_kind_of_problem(serve: Serve, tmp_path: Path, labels: list[str], problem: str | None) -> None:
    model = classifier(tmp_path / "model", labels=labels, problem_type=problem)
    served, oracle = serve(model, handler=HANDLER, **SETTINGS), classify(model)
    for options in ({}, *({"function_to_apply": name, "top_k": None} for name in ("sigmoid", "softmax", "none"))):
        expected = [oracle([item], **options)[0] for item in ITEMS]
        assert_equal(predictions(served, ITEMS, **options), expected)
    assert_equal(predictions(served, ITEMS, raw_scores=True), [oracle([i], function_to_apply="none")[0] for i in ITEMS])


def test_shapes(served: Served, oracle: Any) -> None:
    text, pair = "the cat", {"text": "The Cat", "text_pair": "sleeps here"}
    one, two = oracle(text)[0], oracle(pair)
    answers = [
        *served.ask(text, {"text": text}, Body(b"the cat", "text/plain")),
        *served.ask(pair, {"texts": [text, pair]}, [text, ["The Cat", "sleeps here"]]),
        *served.ask({"inputs": text}, {"inputs": [text, pair], "parameters": {"top_k": 1}}, {"inputs": pair}),
        *served.ask({"instances": [text, pair]}),
    ]
    found = [answer.json() for answer in answers]
    for single in found[:3]:
        assert_equal(single["prediction"], one)
    assert_equal(found[3]["prediction"], two)
    assert_equal(found[4]["predictions"], [one, two])
    assert_equal(found[5]["predictions"], [one, two])
    assert_equal(found[6], oracle(text))
    assert_equal(found[7], oracle([text, pair], top_k=1))
    assert_equal(found[8], [two])
    assert_equal(found[9]["predictions"], [one, two])


def test_open_inference_protocol_and_csv(served: Served, oracle: Any) -> None:
    tensors = [
        {"name": "text", "datatype": "BYTES", "shape": [2], "data": ["the cat", "The Cat"]},
        {"name": "text_pair", "datatype": "BYTES", "shape": [2], "data": ["", "sleeps here"]},
    ]
    expected = oracle([{"text": "the cat"}, {"text": "The Cat", "text_pair": "sleeps here"}])
    joint, rows = served.ask({"id": "1", "inputs": tensors}, Body(b"the cat\nThe Cat,sleeps here\n", "text/csv"))
    output = joint.json()["outputs"][0]
    assert (joint.json()["id"], output["datatype"], output["shape"]) == ("1", "BYTES", [2])
    assert_equal([json.loads(value) for value in output["data"]], expected)
    assert [line.partition(",")[0] for line in rows.body.decode().splitlines()] == [
        entry["label"] for entry in expected
    ]


def test_text_embeddings_inference_route(served: Served, oracle: Any) -> None:
    single, pair, batch, raw, bad = served.ask(
        {"inputs": "the cat"},
        {"inputs": ["The Cat", "sleeps here"]},
        {"inputs": [["the cat"], ["The Cat", "sleeps here"]]},
        {"inputs": "the cat", "raw_scores": True, "truncate": True},
        {"inputs": ["a", "b", "c"]},
        route="predict",
    )
    whole = oracle("the cat", top_k=None)
    paired = oracle({"text": "The Cat", "text_pair": "sleeps here"}, top_k=None)
    assert_equal(single.json(), whole)
    assert_equal(pair.json(), paired)
    assert_equal(batch.json(), [whole, paired])
    assert_equal(raw.json(), oracle("the cat", top_k=None, function_to_apply="none"))
    assert (bad.status, bad.json()["error_type"]) == (422, "Validation")


BAD = [
    ({"text": 3}, "invalid_type", "text"),
    ({"text_pair": "a"}, "missing_field", "text"),
    ({"text": "a", "text_pair": 3}, "invalid_type", "text_pair"),
    ({"texts": ["a", {"text": "b", "text_pair": ["c"]}]}, "invalid_type", "texts[1].text_pair"),
    ({"texts": ["a", {"text": "b", "pair": "c"}]}, "unknown_field", "texts[1]"),
    ({"texts": ["a", None]}, "invalid_type", "texts[1]"),
    ({"texts": [["a", "b", "c"]]}, "invalid_type", "texts[0]"),
    ({"texts": []}, "empty_list", "texts"),
    ({"text": "\ud800"}, "invalid_text", "text"),
    ({"text": "a", "top_k": 0}, "invalid_value", "top_k"),
    ({"text": "a", "top_k": True}, "invalid_type", "top_k"),
    ({"text": "a", "function_to_apply": "tanh"}, "invalid_value", "function_to_apply"),
    ({"text": "a", "function_to_apply": "softmax", "raw_scores": True}, "ambiguous_input", "raw_scores"),
    ({"texts": ["a", LONG], "truncate": False}, "too_long", "texts[1]"),
    ({"text": "a", "topk": 1}, "unknown_option", "topk"),
]


@pytest.mark.parametrize(("bad", "code", "param"), BAD)
def test_bad_requests_beside_good_ones(served: Served, bad: Any, code: str, param: str) -> None:
    good = {"text": "the cat"}
    before, answer, after = served.ask(good, bad, good)
    assert (answer.status, answer.json()["code"], answer.json()["param"]) == (400, code, param), answer.body
    expected = served.ask(good)[0].json()["prediction"]
    for beside in (before, after):
        assert_equal(beside.json()["prediction"], expected)


@settings(deadline=None, max_examples=12)
@given(st.lists(st.sampled_from(range(len(ITEMS))), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_neither_company_nor_order_changes_a_score(served: Served, many: list[int], shuffle: random.Random) -> None:
    alone = {i: predictions(served, [ITEMS[i]], top_k=None)[0] for i in set(many)}
    shuffled = list(many)
    shuffle.shuffle(shuffled)
    whole = predictions(served, [ITEMS[i] for i in shuffled], top_k=None)
    assert_equal(whole, [alone[i] for i in shuffled])
    for i, answer in zip(many, served.ask(*({"texts": [ITEMS[i]], "top_k": None} for i in many)), strict=True):
        assert_equal(answer.json()["predictions"], [alone[i]])


def test_an_answer_that_is_too_large_is_refused_before_compute(serve: Serve, model: Path) -> None:
    served = serve(model, handler=HANDLER, **SETTINGS, max_response_bytes=ENVELOPE_BYTES + 650)
    fits, large, many = served.ask(
        {"texts": ["a"] * 10}, {"texts": ["a"] * 10, "top_k": None}, {"texts": ["a"] * 3, "top_k": None}
    )
    assert (fits.status, many.status) == (200, 200)
    assert (large.status, large.json()["code"]) == (413, "answer_too_large")


def test_the_card_tells_labels_and_function(served: Served) -> None:
    card = served.handler.card()
    assert (card["labels"], card["function_to_apply"]) == (LABELS, "softmax")


def test_a_build_finds_the_task_and_the_archive_answers(model: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(APP, [str(model), "--name", "judge", "--store", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert archive.read(tmp_path / "judge.mar").handler == HANDLER
