"""ZeroShotHandler through TorchServe's own loader and Service. Oracle: transformers' pipeline, text by text."""

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import pipeline

from handlers.hypotheses import Premise
from handlers.request import Request
from handlers.serialise import dumps
from scripts.lib.service import Body
from tests.contract.conftest import Build, Serve, Served
from tests.families import family
from tests.strategies import texts

HANDLER = "handlers.zero_shot"
SETTINGS = {"max_tokens": 40}
NLI = ["contradiction", "neutral", "entailment"]
LONG = "a dog runs in the old house and eats " * 6
TEXTS = ["The cat sat on the mat.", LONG, "ünïcödé ☃", "Oil prices rose to 90 dollars a barrel.", "x"]
LABELS = ["sport", "the weather", "food", "politics"]
TEMPLATE = "It is about {}."


def model_of(directory: Path, name: str = "bert", labels: list[str] = NLI) -> Path:
    return family(directory, name, head="sequence-classification", labels=labels, seed=1)


def classifier(model: Path) -> Any:
    made = pipeline("zero-shot-classification", str(model), device="cpu")
    made.tokenizer.model_max_length = SETTINGS["max_tokens"]
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="module")
def served(serve: Serve, model: Path) -> Served:
    return serve(model, handler=HANDLER, **SETTINGS)


@pytest.fixture(scope="module")
def oracle(model: Path) -> Any:
    return classifier(model)


def assert_equal(found: Any, expected: Any) -> None:
    assert (found["sequence"], found["labels"]) == (expected["sequence"], expected["labels"])
    assert found["scores"] == pytest.approx(expected["scores"], abs=1e-5)


def classifications(served: Served, items: list[Any], **options: Any) -> Any:
    answer = served.ask({"texts": items, **options})[0]
    assert answer.status == 200, answer.body
    return answer.json()["classifications"]


@pytest.mark.parametrize(
    ("name", "packed"),
    [("distilbert", True), ("bart", False)],  # more families' classifiers: test_classification, test_reranking
)
def test_families_equal_the_pipeline(serve: Serve, tmp_path: Path, name: str, packed: bool) -> None:
    model = model_of(tmp_path / "model", name)
    served, oracle = serve(model, handler=HANDLER, **SETTINGS), classifier(model)
    assert served.handler.model.packed == packed, served.handler.model.why_padded
    for text, found in zip(TEXTS, classifications(served, TEXTS, candidate_labels=LABELS), strict=True):
        assert_equal(found, oracle(text, LABELS))


@pytest.mark.parametrize("attention", ["packed", "padded"])
def test_answers_are_those_of_the_pipeline(
    serve: Serve, served: Served, model: Path, oracle: Any, attention: str
) -> None:
    if attention == "padded":
        served = serve(model, handler=HANDLER, **SETTINGS, attention="padded")
    assert served.handler.model.packed == (attention == "packed"), served.handler.model.why_padded
    asked: list[dict[str, Any]] = [
        {"candidate_labels": LABELS},
        {"candidate_labels": " sport, the weather,, food"},
        {"candidate_labels": ["a", "sport", "a"], "hypothesis_template": TEMPLATE},
        {"candidate_labels": LABELS, "multi_label": True, "hypothesis_template": "{{}} {}"},
        {"candidate_labels": "food"},
        {"candidate_labels": ["food"], "multi_label": False},
    ]
    for options in asked:
        for text, found in zip(TEXTS, classifications(served, TEXTS, **options), strict=True):
            assert_equal(found, oracle(text, **options))


@pytest.mark.parametrize("labels", [["Entailment", "no", "x"], ["neutral", "entail", "x"], ["no", "maybe", "yes"]])
def test_entailment_is_found_as_the_pipeline_finds_it(
    served: Served, oracle: Any, monkeypatch: pytest.MonkeyPatch, labels: list[str]
) -> None:
    named = {label: index for index, label in enumerate(labels)}
    monkeypatch.setattr(oracle.model.config, "label2id", named)
    monkeypatch.setattr(served.handler.model.net.config, "label2id", named)
    monkeypatch.setattr(served.handler, "entailment", served.handler.entailment)
    served.handler.setup()
    for multi_label in (False, True):
        (found,) = classifications(served, TEXTS[:1], candidate_labels=LABELS, multi_label=multi_label)
        assert_equal(found, oracle(TEXTS[0], LABELS, multi_label=multi_label))


def test_shapes(served: Served, oracle: Any) -> None:
    text, other = TEXTS[0], TEXTS[3]
    one, two = oracle(text, LABELS), oracle(other, LABELS)
    own = oracle(other, ["a", "b"], hypothesis_template=TEMPLATE, multi_label=True)
    instance = {
        "text": other, "candidate_labels": "a,b", "hypothesis_template": TEMPLATE, "multi_label": True,
    }  # fmt: skip
    options = {"candidate_labels": LABELS}
    tensors = [{"name": "text", "datatype": "BYTES", "shape": [2], "data": [text, other]}]
    answers = served.ask(
        {"text": text, **options},
        {"texts": [text, other], **options},
        {"inputs": text, "parameters": options},
        {"inputs": [text, other], "parameters": options},
        {"instances": [text, instance], "parameters": options},
        {"id": "7", "inputs": tensors, "parameters": {"candidate_labels": ",".join(LABELS)}},
        [Body(text.encode(), None, name="text"), Body(",".join(LABELS).encode(), None, name="candidate_labels")],
        [instance],
    )
    assert [answer.status for answer in answers] == [200] * len(answers), [answer.body for answer in answers]
    found = [answer.json() for answer in answers]
    assert_equal(found[0]["classification"], one)
    for many in (found[1]["classifications"], found[3]):
        assert_equal(many[0], one)
        assert_equal(many[1], two)
    assert_equal(found[2], one)
    assert_equal(found[4]["predictions"][0], one)
    assert_equal(found[4]["predictions"][1], own)
    assert (found[5]["id"], found[5]["outputs"][0]["shape"]) == ("7", [2])
    assert_equal(found[6]["classification"], one)
    assert_equal(found[7]["classifications"][0], own)


GOOD = {"text": TEXTS[0], "candidate_labels": LABELS}
BAD = [
    ({"text": "a"}, "missing_field", "candidate_labels"),
    ({"instances": ["a"]}, "missing_field", "instances[0].candidate_labels"),
    ({"candidate_labels": LABELS}, "missing_field", "text"),
    ({"text": "a", "candidate_labels": []}, "empty_list", "candidate_labels"),
    ({"text": "a", "candidate_labels": " , "}, "empty_list", "candidate_labels"),
    ({"text": "a", "candidate_labels": ["b", " "]}, "empty_string", "candidate_labels[1]"),
    ({"text": "a", "candidate_labels": ["b", 3]}, "invalid_type", "candidate_labels[1]"),
    ({"text": "a", "candidate_labels": ["\ud800"]}, "invalid_text", "candidate_labels[0]"),
    ({"text": "a", "candidate_labels": {"a": 1}}, "invalid_type", "candidate_labels"),
    ({"texts": [{"text": "a", "candidate_labels": ["b", ""]}]}, "empty_string", "texts[0].candidate_labels[1]"),
    ({"texts": [{"text": "a", "multi_label": 1}]}, "invalid_type", "texts[0].multi_label"),
    ({"texts": [{"text": "a", "labels": "b"}]}, "unknown_field", "texts[0]"),
    ({"texts": [{"text": 7}]}, "invalid_type", "texts[0].text"),
    ({"texts": [["a", "b"]], "candidate_labels": "b"}, "invalid_type", "texts[0]"),
    *(
        ({**GOOD, "hypothesis_template": template}, "invalid_value", "hypothesis_template")
        for template in ("About.", "{{}}", "{} {}", "{", "}{", "{0.__class__}", "{:>1000000000}", "{!r}", "{name}")
    ),
    ({**GOOD, "hypothesis_template": "a" * 1000 + "{}"}, "invalid_value", "hypothesis_template"),
    ({**GOOD, "hypothesis_template": 3}, "invalid_type", "hypothesis_template"),
    ({**GOOD, "multi_label": "yes"}, "invalid_type", "multi_label"),
    ({**GOOD, "candidate_label": "b"}, "unknown_option", "candidate_label"),
    ({"text": "a", "candidate_labels": ["b " * 60]}, "too_long", "text"),
    ({"texts": ["a", LONG], "candidate_labels": "b", "truncate": False}, "too_long", "texts[1]"),
]


def test_bad_requests_beside_good_ones(served: Served, oracle: Any) -> None:
    bodies = [body for bad, _, _ in BAD for body in (bad, GOOD)]
    answers = served.ask(*bodies)
    expected = oracle(TEXTS[0], LABELS)
    for (body, code, param), bad, good in zip(BAD, answers[::2], answers[1::2], strict=True):
        told = bad.json()
        assert (bad.status, told["code"], told["param"]) == (400, code, param), (body, told)
        assert_equal(good.json()["classification"], expected)


def test_too_much_is_refused_before_compute(serve: Serve, model: Path) -> None:
    served = serve(model, handler=HANDLER, **SETTINGS, max_items=6, max_response_bytes=1024 + 400)
    many, large, fits = served.ask(
        {"texts": ["a", "b"], "candidate_labels": LABELS},
        {"text": "a" * 400, "candidate_labels": "b"},
        {"texts": ["a" * 120, "b"], "candidate_labels": ["c", "d"]},
    )
    assert (many.status, many.json()["code"]) == (413, "too_many_items")
    assert "8 pairs" in many.json()["message"]
    assert (large.status, large.json()["code"]) == (413, "answer_too_large")
    assert fits.status == 200, fits.body


labels = st.lists(st.sampled_from([*LABELS, "a", "ünï", "a label of many words"]), min_size=1, max_size=4, unique=True)
bodies = st.fixed_dictionaries(
    {"text": texts | st.sampled_from(TEXTS), "candidate_labels": labels}, optional={"multi_label": st.booleans()}
)


@settings(deadline=None, max_examples=12)
@given(st.lists(bodies, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_neither_company_nor_order_changes_an_answer(
    served: Served, many: list[dict[str, Any]], chance: random.Random
) -> None:
    def by_label(result: Any) -> dict[str, float]:
        return dict(zip(result["labels"], result["scores"], strict=True))

    alone = [served.ask(body)[0].json()["classification"] for body in many]
    order = chance.sample(range(len(many)), len(many))
    together = served.ask(*(many[i] for i in order), {"instances": many})
    pairs = [(answer.json()["classification"], alone[i]) for answer, i in zip(together, order, strict=False)]
    pairs += zip(together[-1].json()["predictions"], alone, strict=True)
    for found, expected in pairs:
        assert found["sequence"] == expected["sequence"]
        assert by_label(found) == pytest.approx(by_label(expected), abs=1e-5)
        assert found["scores"] == sorted(found["scores"], reverse=True)


def test_a_build_by_name_answers(model: Path, build_archive: Build) -> None:
    found = build_archive(model, "--task", "zero-shot-classification")
    assert (found.handler, found.settings["task"], found.settings["max_tokens"]) == (HANDLER, "zero_shot", 64)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(texts, st.lists(texts.filter(str.strip), min_size=1, max_size=4)), min_size=1, max_size=3))
def test_an_answer_stays_within_its_bound(served: Served, many: list[tuple[str, list[str]]]) -> None:
    items = [Premise(text, tuple(names), "{}", False) for text, names in many]
    request = Request(tuple(items), listed=True)
    longest = 1.1754943508222875e-38
    results = [{"sequence": i.text, "labels": i.labels, "scores": [longest] * len(i.labels)} for i in items]
    assert sum(len(dumps(result)) for result in results) <= len(items) * served.handler.item_bytes(request)
