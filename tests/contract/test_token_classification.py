"""TokenClassificationHandler through TorchServe's own loader and Service. Oracle: transformers' own pipeline."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.pipelines.token_classification import AggregationStrategy
from typer.testing import CliRunner

from handlers.entities import STRATEGIES
from scripts.build import build
from scripts.lib import archive
from tests.contract.conftest import Serve, Served
from tests.corpus import SENTENCES
from tests.families import family

LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC"]
MOST = 32  # tokens that the models take
SHORT = [text for text in SENTENCES if len(text) < 60][:4]
TEXTS = [*SHORT, "", " ", "a\u0301 ünïcödé ☃\U0001f600 x", "Mary-Jane's  old\nhouse,cat[SEP]dog."]
LONG = " ".join(SENTENCES[:6])
pytestmark = pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
PACKED = ["bert", "roberta", "xlm-roberta", "distilbert", "electra", "albert"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ner")
    return family(path / "bert", "bert", head="token-classification", labels=LABELS, max_length=MOST)


@pytest.fixture(scope="module")
def served(serve: Serve, directory: Path) -> Served:
    return serve(directory, handler="handlers.token_classification", max_tokens=MOST)


@pytest.fixture(scope="module")
def pipeline(directory: Path) -> Any:
    return oracle(directory)


def oracle(directory: Path) -> Any:
    return transformers.pipeline("token-classification", model=str(directory), device="cpu")


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    exact = [{key: value for key, value in entity.items() if key != "score"} for entity in found]
    assert exact == [{key: value for key, value in entity.items() if key != "score"} for entity in expected]
    scores = [entity["score"] for entity in expected]
    assert [entity["score"] for entity in found] == pytest.approx(scores, rel=0, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "attention"),
    [*((name, "auto") for name in [*PACKED, "mpnet", "deberta-v2", "modernbert"]), ("bert", "padded")],
)
def test_families_equal_the_pipeline(serve: Serve, tmp_path: Path, name: str, attention: str) -> None:
    model = family(tmp_path / "model", name, head="token-classification", labels=LABELS, max_length=MOST)
    served = serve(model, handler="handlers.token_classification", max_tokens=MOST, attention=attention)
    assert served.handler.model.packed == (name in PACKED and attention == "auto"), served.handler.model.why_padded
    pipeline = oracle(model)
    outputs = [[pipeline.forward(chunk) for chunk in pipeline.preprocess(t, is_split_into_words=False)] for t in TEXTS]
    answers = served.ask(*({"texts": [*TEXTS, LONG], "aggregation_strategy": s, "stride": 5} for s in STRATEGIES))
    for strategy, answer in zip(STRATEGIES, answers, strict=True):
        assert answer.status == 200, answer.body
        found = answer.json()["entities"]
        assert any(found[:-1])
        for output, entities in zip(outputs, found[:-1], strict=True):
            assert_same(entities, pipeline.postprocess(output, AggregationStrategy(strategy)))
        if strategy != "none":
            assert_same(found[-1], pipeline(LONG, aggregation_strategy=strategy, stride=5))


@settings(deadline=None, max_examples=25)
@given(st.text("ab TheMary.☃é,-", max_size=200), st.sampled_from(STRATEGIES[1:]), st.integers(0, 12))
def test_any_text_and_stride_equal_the_pipeline(
    served: Served, pipeline: Any, text: str, strategy: str, stride: int
) -> None:
    options = {"aggregation_strategy": strategy, "ignore_labels": ["MISC"], "stride": stride}
    answer = served.ask({"text": text, **options})[0]
    assert_same(answer.json()["entities"], pipeline(text, **options))


@pytest.mark.parametrize("stride", [None, 0, 3, 25])
def test_a_long_text_has_every_token_once_from_its_best_window(served: Served, pipeline: Any, stride: int) -> None:
    """By hand: the oracle's scores of each window, the token's from the window in which it is furthest from a cut."""
    own, room = pipeline.tokenizer, MOST - 2
    step = room - (7 if stride is None else stride)
    whole = own(LONG, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = whole["input_ids"], whole["offset_mapping"]
    starts = range(0, len(ids) - room + step, step)
    best: dict[int, tuple[float, Any]] = {}
    for start in starts:
        window = ids[start : start + room]
        inputs = torch.tensor([[own.cls_token_id, *window, own.sep_token_id]])
        scores = pipeline.model(input_ids=inputs).logits.detach().softmax(-1)[0, 1:-1]
        for at, row in enumerate(scores):
            left = at if start else 10**6
            right = len(window) - 1 - at if start != starts[-1] else 10**6
            best[start + at] = max(best.get(start + at, (-1, None)), (min(left, right), row), key=lambda pair: pair[0])
    options = {} if stride is None else {"stride": stride}
    found = served.ask({"text": LONG, "ignore_labels": [], **options})[0].json()["entities"]
    assert [entity["index"] for entity in found] == list(range(1, len(ids) + 1))
    assert [(entity["start"], entity["end"]) for entity in found] == [tuple(span) for span in offsets]
    assert [entity["word"] for entity in found] == own.convert_ids_to_tokens(ids)
    assert [LABELS.index(entity["entity"]) for entity in found] == [int(best[i][1].argmax()) for i in best]
    assert [entity["score"] for entity in found] == pytest.approx([float(best[i][1].max()) for i in best], abs=1e-5)


@settings(deadline=None, max_examples=12)
@given(st.lists(st.sampled_from([*TEXTS, LONG]), min_size=1, max_size=8), st.sampled_from(STRATEGIES), st.randoms())
def test_neither_company_nor_order_changes_an_answer(
    served: Served, many: list[str], strategy: str, random: Any
) -> None:
    option = {"aggregation_strategy": strategy}
    alone = {text: served.ask({"text": text, **option})[0].json()["entities"] for text in set(many)}
    shuffled = random.sample(many, len(many))
    together = served.ask(*({"text": text, **option} for text in shuffled), {"text": 5}, {"texts": many, **option})
    for text, answer in zip(shuffled, together[:-2], strict=True):
        assert_same(answer.json()["entities"], alone[text])
    assert together[-2].status == 400
    for text, entities in zip(many, together[-1].json()["entities"], strict=True):
        assert_same(entities, alone[text])


def test_shapes(served: Served, pipeline: Any) -> None:
    first, second = SHORT[:2]
    expected = pipeline([first, second], aggregation_strategy="simple", ignore_labels=["MISC"])
    options = {"aggregation_strategy": "simple", "ignore_labels": "MISC"}
    plain, one, listed, predicted, tensors = served.ask(
        {"text": first, **options},
        {"inputs": first, "parameters": options},
        {"inputs": [first, second], "parameters": options},
        {"instances": [first, {"text": second}], "parameters": options},
        {
            "id": "7",
            "inputs": [{"name": "text", "datatype": "BYTES", "shape": [2], "data": [first, second]}],
            "parameters": options,
        },
    )
    assert_same(plain.json()["entities"], expected[0])
    assert_same(one.json(), expected[0])
    for found, wanted in zip(listed.json(), expected, strict=True):
        assert_same(found, wanted)
    for found, wanted in zip(predicted.json()["predictions"], expected, strict=True):
        assert_same(found, wanted)
    output = tensors.json()["outputs"][0]
    assert (tensors.json()["id"], output["name"], output["shape"]) == ("7", "entities", [2])
    for found, wanted in zip(output["data"], expected, strict=True):
        assert_same(json.loads(found), wanted)


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"text": 3}, 400, "invalid_type", "text"),
        ({"texts": []}, 400, "empty_list", "texts"),
        ({"texts": ["a", None]}, 400, "invalid_type", "texts[1]"),
        ({"instances": [{"words": "a"}]}, 400, "missing_field", "instances[0].text"),
        ({"text": "a", "aggregation_strategy": "best"}, 400, "invalid_value", "aggregation_strategy"),
        ({"text": "a", "ignore_labels": [1]}, 400, "invalid_type", "ignore_labels"),
        ({"text": "a", "stride": -1}, 400, "invalid_value", "stride"),
        ({"text": "a", "stride": 30}, 400, "invalid_value", "stride"),
        ({"text": "a", "truncate": True}, 400, "unknown_option", "truncate"),
        ({"text": "a" * 1_000_001}, 413, "text_too_long", "text"),
    ],
)
def test_bad_requests_beside_a_good_one(
    served: Served, pipeline: Any, body: Any, status: int, code: str, param: str
) -> None:
    bad, good = served.ask(body, {"text": SHORT[0]})
    assert (bad.status, bad.json()["code"], bad.json()["param"]) == (status, code, param)
    assert_same(good.json()["entities"], pipeline(SHORT[0]))


def test_the_card_names_the_labels(served: Served) -> None:
    assert served.handler.card()["labels"] == LABELS


def test_a_build_finds_the_task_and_verifies(tmp_path: Path, directory: Path) -> None:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(build)
    arguments = [str(directory), "--name", "ner", "--store", str(tmp_path)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "verified" in result.output
    found = archive.read(tmp_path / "ner.mar")
    assert found.handler == "handlers.token_classification"
    assert (found.settings["task"], found.settings["max_tokens"]) == ("token_classification", MOST)
