"""FillMaskHandler through TorchServe's own loader and Service. Oracle: transformers' own pipeline."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from handlers.model import Model
from handlers.request import Request
from tests.contract.conftest import Build, Serve, Served
from tests.corpus import SENTENCES
from tests.families import family

MOST = 32  # tokens that the models take
PACKED = ["bert", "roberta", "xlm-roberta", "distilbert", "electra", "albert"]
SHORT = [text for text in SENTENCES if len(text) < 60][:3]
# Written with BERT's mask: `masked` puts in another model's
MASKED = [f"{text[: text.rindex(' ')]} [MASK]." for text in SHORT]
TEXTS = [*MASKED, "[MASK]", "the [MASK] sees the [MASK] in ☃ [MASK]", "a [PAD] dog[MASK]house"]


def masked(text: str, pipeline: Any) -> str:
    return text.replace("[MASK]", pipeline.tokenizer.mask_token)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family(tmp_path_factory.mktemp("mlm") / "bert", "bert", head="masked-lm", max_length=MOST)


@pytest.fixture(scope="module")
def served(serve: Serve, directory: Path) -> Served:
    return serve(directory, handler="handlers.fill_mask", max_tokens=MOST)


@pytest.fixture(scope="module")
def pipeline(directory: Path) -> Any:
    return oracle(directory)


def oracle(directory: Path) -> Any:
    return transformers.pipeline("fill-mask", model=str(directory), device="cpu")


def assert_same(found: Any, expected: Any) -> None:
    """Equal candidates, the order of those whose scores are equal but for rounding left open."""
    if isinstance(expected[0], list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
        return
    scores = [candidate["score"] for candidate in expected]
    assert [candidate["score"] for candidate in found] == pytest.approx(scores, rel=0, abs=1e-5)
    clear = [c for c in expected if sum(abs(c["score"] - score) < 1e-6 for score in scores) == 1]
    assert clear
    by_token = {candidate["token"]: candidate for candidate in found}
    for candidate in clear[:-1]:
        assert by_token[candidate["token"]] == candidate | {"score": pytest.approx(candidate["score"], abs=1e-5)}


@pytest.mark.parametrize(
    ("name", "attention"),
    [*((name, "auto") for name in [*PACKED, "mpnet", "deberta-v2", "modernbert"]), ("bert", "padded")],
)
def test_families_equal_the_pipeline(serve: Serve, tmp_path: Path, name: str, attention: str) -> None:
    model = family(tmp_path / "model", name, head="masked-lm", max_length=MOST)
    served = serve(model, handler="handlers.fill_mask", max_tokens=MOST, attention=attention)
    assert served.handler.model.packed == (name in PACKED and attention == "auto"), served.handler.model.why_padded
    assert served.handler.alone
    pipeline = oracle(model)
    texts = [masked(text, pipeline) for text in TEXTS]
    words = ["dog", "house", "☃", "the"]
    every, few = served.ask({"texts": texts, "top_k": 7}, {"texts": texts, "targets": words})
    for text, found in zip(texts, every.json()["predictions"], strict=True):
        assert_same(found, pipeline(text, top_k=7))
    for text, found in zip(texts, few.json()["predictions"], strict=True):
        assert_same(found, pipeline(text, targets=words))


def test_a_head_that_needs_whole_texts_gets_them(
    serve: Serve, directory: Path, pipeline: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    head = Model.head
    monkeypatch.setattr(Model, "head", lambda model, states: head(model, states) + 1)
    served = serve(directory, handler="handlers.fill_mask", max_tokens=MOST)
    assert not served.handler.alone
    assert "does not run on single tokens" in caplog.text
    for text, found in zip(TEXTS, served.ask({"texts": TEXTS})[0].json()["predictions"], strict=True):
        assert_same(found, pipeline(text))


def test_many_masks_are_scored_a_few_at_a_time(served: Served, pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handlers.fill_mask.MASKS_AT_ONCE", 4)
    texts = ["[MASK] " * 11, "a [MASK]"]
    for text, found in zip(texts, served.ask({"texts": texts})[0].json()["predictions"], strict=True):
        assert_same(found, pipeline(text))


@settings(deadline=None, max_examples=12)
@given(st.lists(st.tuples(st.sampled_from(TEXTS), st.integers(1, 9)), min_size=1, max_size=8), st.booleans())
def test_neither_company_nor_order_changes_an_answer(
    served: Served, many: list[tuple[str, int]], targeted: bool
) -> None:
    more = {"targets": ["dog", "cat", "a", "the"]} if targeted else {}
    alone = {key: served.ask({"text": key[0], "top_k": key[1], **more})[0].json()["predictions"] for key in set(many)}
    together = served.ask(
        {"text": "no mask"}, *({"inputs": text, "top_k": count, **more} for text, count in reversed(many))
    )
    assert together[0].status == 400
    for key, answer in zip(reversed(many), together[1:], strict=True):
        assert_same(answer.json(), alone[key])


def test_shapes(served: Served, pipeline: Any) -> None:
    first, second = MASKED[:2]
    expected = pipeline([first, second], top_k=3)
    options = {"top_k": 3}
    plain, bare, one, listed, predicted, tensors = served.ask(
        {"text": first, **options},
        first,
        {"inputs": first, "parameters": options},
        {"inputs": [first, second], "parameters": options},
        {"instances": [first, {"text": second}], "parameters": options},
        {
            "inputs": [{"name": "text", "datatype": "BYTES", "shape": [2], "data": [first, second]}],
            "parameters": options,
        },
    )
    assert_same(plain.json()["predictions"], expected[0])
    assert_same(bare.json()["predictions"], pipeline(first))
    assert_same(one.json(), expected[0])
    assert_same(listed.json(), expected)
    assert_same(predicted.json()["predictions"], expected)
    output = tensors.json()["outputs"][0]
    assert (output["name"], output["shape"]) == ("predictions", [2])
    assert_same([json.loads(found) for found in output["data"]], expected)


def test_a_long_text_is_cut_behind_its_last_mask(served: Served, pipeline: Any) -> None:
    tail = " the cat" * 40
    cut, lost, refused = served.ask(
        {"text": "a [MASK]" + tail}, {"text": f"a [MASK]{tail} [MASK]"}, {"text": "a [MASK]" + tail, "truncate": False}
    )
    assert_same(cut.json()["predictions"], pipeline("a [MASK]" + tail, tokenizer_kwargs={"truncation": True}))
    assert cut.headers["X-Truncated-Tokens"] == str(len(pipeline.tokenizer("a [MASK]" + tail)["input_ids"]) - MOST)
    assert (lost.status, lost.json()["code"], lost.json()["param"]) == (400, "too_long", "text")
    assert (refused.status, refused.json()["code"]) == (400, "too_long")


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"text": 3}, 400, "invalid_type", "text"),
        ({"texts": ["[MASK]", "a"]}, 400, "no_mask", "texts[1]"),
        ({"text": "the <mask> runs"}, 400, "no_mask", "text"),
        ({"instances": ["[MASK]", {"text": ""}]}, 400, "no_mask", "instances[1]"),
        ({"text": "[MASK]", "top_k": 0}, 400, "invalid_value", "top_k"),
        ({"text": "[MASK]", "top_k": 10**6}, 400, "invalid_value", "top_k"),
        ({"text": "[MASK]", "targets": []}, 400, "empty_list", "targets"),
        ({"text": "[MASK]", "targets": ["", " "]}, 400, "invalid_value", "targets"),
        ({"text": "[MASK]", "targets": "x" * 300}, 400, "invalid_value", "targets"),
        ({"text": "[MASK]", "targets": ["x"] * 1025}, 413, "too_many_items", "targets"),
        ({"texts": ["[MASK] " * 20] * 200, "top_k": 600}, 413, "answer_too_large", "texts"),
        ({"text": "[MASK]", "targets": ["x"], "tokens": 1}, 400, "unknown_option", "tokens"),
    ],
)
def test_bad_requests_beside_a_good_one(
    served: Served, pipeline: Any, body: Any, status: int, code: str, param: str
) -> None:
    bad, good = served.ask(body, {"text": MASKED[0]})
    assert (bad.status, bad.json()["code"], bad.json()["param"]) == (status, code, param)
    assert_same(good.json()["predictions"], pipeline(MASKED[0]))


def test_an_answer_that_turns_out_too_large(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(served.handler.settings, max_response_bytes=10_000)
    monkeypatch.setattr(served.handler, "settings", small)
    body = {"text": "[MASK]" + " the house" * 12, "top_k": 100}
    assert served.handler.item_bytes(served.handler.parse(Request((body["text"],), {"top_k": 100}))) == 5300
    bad, good = served.ask(body, {"text": MASKED[0]})
    assert (bad.status, bad.json()["code"]) == (413, "answer_too_large")
    assert good.status == 200


def test_decoding_counts_as_work(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.handler, "time_budget", 2.0)
    bad, good = served.ask({"texts": ["[MASK] " * 20] * 10, "top_k": 600}, {"text": MASKED[0]})
    assert (bad.status, bad.json()["code"]) == (413, "too_much_work")
    assert good.status == 200


def test_the_mask_of_another_family_is_named_with_the_right_one(served: Served) -> None:
    message = served.ask({"text": "the <mask> runs"})[0].json()["message"]
    assert message == "text has <mask>, the mask of other models; this model's is '[MASK]'."


def test_the_card_names_the_mask(served: Served, pipeline: Any) -> None:
    card = served.handler.card()
    assert (card["mask_token"], card["vocabulary"]) == ("[MASK]", pipeline.model.config.vocab_size)


def test_a_build_finds_the_task_and_the_archive_answers(directory: Path, build_archive: Build) -> None:
    found = build_archive(directory)
    assert found.handler == "handlers.fill_mask"
    assert (found.settings["task"], found.settings["max_tokens"]) == ("fill_mask", MOST)
