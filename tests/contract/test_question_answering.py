"""QuestionAnsweringHandler through TorchServe's own loader and Service.

Oracle: the windows of transformers' tokenizer, the model run on each alone, and every span of each window tried, scored
as transformers 4's pipeline scored it (transformers 5 has none).
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForQuestionAnswering, AutoTokenizer
from typer.testing import CliRunner

from scripts.build import build
from scripts.lib import archive
from scripts.lib.service import Body
from tests.contract.conftest import Serve, Served
from tests.corpus import ENGLISH
from tests.families import family

HANDLER = "handlers.question_answering"
LENGTH = 48
SETTINGS = {"max_tokens": LENGTH}
ITEMS = [
    {"question": "Where does my sister live?", "context": ENGLISH[9]},
    {"question": "Who was born?", "context": " ".join(ENGLISH[10:20])},
    {"question": "Wer?", "context": "ünïcödé ☃  Müller-Lüdenscheidt\n\twohnt in (Berlin)."},
    {"question": ENGLISH[33], "context": " ".join(ENGLISH[20:26])},
    {"question": "x", "context": "y"},
]
APP = typer.Typer(pretty_exceptions_enable=False)
APP.command()(build)


@dataclass
class Oracle:
    """Exhaustive search over one model's scores."""

    tokenizer: Any
    net: Any

    @torch.no_grad()
    def windows(self, question: str, context: str, stride: int) -> list[tuple[Any, Any, Any, Any]]:
        """Per window: its encoding, context tokens, and (tokens,) probabilities of starts and ends, CLS among them."""
        found = self.tokenizer(
            [question],
            [context],
            truncation="only_second",
            max_length=LENGTH,
            stride=stride,
            return_overflowing_tokens=True,
        )
        made = []
        for encoding in found.encodings:
            given = {"input_ids": torch.tensor([encoding.ids]), "attention_mask": torch.ones(1, len(encoding.ids))}
            if "token_type_ids" in self.tokenizer.model_input_names:
                given["token_type_ids"] = torch.tensor([encoding.type_ids])
            output = self.net(**given)
            context_tokens = [i for i, sequence in enumerate(encoding.sequence_ids) if sequence == 1]
            allowed = np.zeros(len(encoding.ids), dtype=bool)
            allowed[context_tokens] = True
            if self.tokenizer.cls_token_id is not None:
                allowed[0] = True
            chances = []
            for scores in (output.start_logits[0].numpy(), output.end_logits[0].numpy()):
                scaled = np.where(allowed, np.exp(scores - scores[allowed].max()), 0)
                chances.append(scaled / scaled.sum())
            made.append((encoding, context_tokens, *chances))
        return made

    def answers(
        self,
        question: str,
        context: str,
        *,
        top_k: int = 1,
        max_answer_len: int = 15,
        doc_stride: int = LENGTH // 2,
        handle_impossible_answer: bool = False,
        align_to_words: bool = True,
    ) -> list[dict[str, Any]]:
        """Every distinct answer by descending score, at least the first `top_k` of which are to be found."""
        windows = self.windows(question, context, doc_stride)
        whole = self.tokenizer(question, context, add_special_tokens=False).encodings[0]
        best: dict[tuple[int, int], float] = {}
        for encoding, tokens, starts, ends in windows:
            for first in tokens:
                for last in [token for token in tokens if first <= token < first + max_answer_len]:
                    key = encoding.offsets[first][0], encoding.offsets[last][1]
                    if align_to_words:
                        words = encoding.word_ids[first], encoding.word_ids[last]
                        key = whole.word_to_chars(words[0], 1)[0], whole.word_to_chars(words[1], 1)[1]
                    best[key] = max(best.get(key, 0.0), float(starts[first] * ends[last]))
        if handle_impossible_answer:
            none = min(float(starts[0] * ends[0]) for _, _, starts, ends in windows)
            assert (0, 0) not in best
            best[0, 0] = none
        ranked = sorted(best.items(), key=lambda entry: -entry[1])
        return [{"answer": context[a:b], "score": score, "start": a, "end": b} for (a, b), score in ranked]


def model_of(directory: Path, name: str = "bert") -> Path:
    """A model that is sure of itself, as trained ones are."""
    family(directory, name, head="question-answering", seed=2)
    net = AutoModelForQuestionAnswering.from_pretrained(directory)
    with torch.no_grad():
        [layer for layer in net.modules() if isinstance(layer, torch.nn.Linear)][-1].weight.mul_(4)
    net.save_pretrained(directory)
    return directory


def oracle_of(model: Path) -> Oracle:
    return Oracle(AutoTokenizer.from_pretrained(model), AutoModelForQuestionAnswering.from_pretrained(model).eval())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="module")
def served(serve: Serve, model: Path) -> Served:
    return serve(model, handler=HANDLER, **SETTINGS)


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return oracle_of(model)


def assert_best(found: Any, item: dict[str, str], oracle: Oracle, **options: Any) -> None:
    """The best there is, and what it says it is; answers of equal scores may change places."""
    listed = options.get("top_k", 1) > 1
    assert isinstance(found, list) == listed
    answers = found if listed else [found]
    everything = oracle.answers(**item, **options)
    known = {(answer["start"], answer["end"]): answer for answer in everything}
    scores = [answer["score"] for answer in everything][: options.get("top_k", 1)]
    assert [answer["score"] for answer in answers] == pytest.approx(scores, abs=1e-5)
    assert len({(answer["start"], answer["end"]) for answer in answers}) == len(answers)
    for answer in answers:
        expected = known[answer["start"], answer["end"]]
        assert answer == expected | {"score": pytest.approx(expected["score"], abs=1e-5)}
        assert answer["answer"] == item["context"][answer["start"] : answer["end"]]


def ask(served: Served, items: list[Any], **options: Any) -> Any:
    answer = served.ask({"instances": items, **options})[0]
    assert answer.status == 200, answer.body
    return answer.json()["predictions"]


ASKED: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 100, "max_answer_len": 3},
    {"max_answer_len": 1},
    {"top_k": 3, "max_answer_len": 500, "doc_stride": 0},
    {"top_k": 3, "doc_stride": 9, "align_to_words": False},
    {"top_k": 3, "handle_impossible_answer": True},
    {"handle_impossible_answer": True, "align_to_words": False},
]


@pytest.mark.parametrize("attention", ["packed", "padded"])
def test_the_best_answers_are_found(serve: Serve, served: Served, model: Path, oracle: Oracle, attention: str) -> None:
    if attention == "padded":
        served = serve(model, handler=HANDLER, **SETTINGS, attention="padded")
    assert served.handler.model.packed == (attention == "packed"), served.handler.model.why_padded
    assert any(len(oracle.windows(**item, stride=LENGTH // 2)) > 3 for item in ITEMS)
    for options in ASKED:
        for item, found in zip(ITEMS, ask(served, ITEMS, **options), strict=True):
            assert_best(found, item, oracle, **options)


@pytest.mark.parametrize(
    ("name", "packed"), [("roberta", True), ("xlm-roberta", True), ("distilbert", True), ("modernbert", False)]
)
def test_families(serve: Serve, tmp_path: Path, name: str, packed: bool) -> None:
    model = model_of(tmp_path / "model", name)
    served, oracle = serve(model, handler=HANDLER, **SETTINGS), oracle_of(model)
    assert served.handler.model.packed == packed, served.handler.model.why_padded
    for options in ({}, {"top_k": 5, "handle_impossible_answer": True}):
        for item, found in zip(ITEMS[:3], ask(served, ITEMS[:3], **options), strict=True):
            assert_best(found, item, oracle, **options)


def test_shapes(served: Served, oracle: Oracle) -> None:
    one, two = ITEMS[0], ITEMS[1]
    tensors = [
        {"name": name, "datatype": "BYTES", "shape": [2], "data": [one[name], two[name]]}
        for name in ("question", "context")
    ]
    rows = f'"{one["question"]}","{one["context"]}"\n"{two["question"]}","{two["context"]}"\n'
    answers = served.ask(
        one,
        {"texts": [one, two]},
        [one, two],
        {"inputs": one, "parameters": {"top_k": 2}},
        {"inputs": [one, two]},
        {"instances": [one, two], "parameters": {"max_answer_len": 2}},
        {"id": "7", "inputs": tensors},
        [Body(one[name].encode(), None, name=name) for name in ("question", "context")],
        Body(rows.encode(), "text/csv"),
    )
    assert [answer.status for answer in answers] == [200] * len(answers), [answer.body for answer in answers]
    *found, _ = [answer.json() if answer.content_type == "application/json" else None for answer in answers]
    assert_best(found[0]["answer"], one, oracle)
    for many in (found[1]["answers"], found[2]["answers"], found[4]):
        assert_best(many[0], one, oracle)
        assert_best(many[1], two, oracle)
    assert_best(found[3], one, oracle, top_k=2)
    assert_best(found[5]["predictions"][1], two, oracle, max_answer_len=2)
    assert (found[6]["id"], found[6]["outputs"][0]["datatype"], found[6]["outputs"][0]["shape"]) == ("7", "BYTES", [2])
    assert_best(found[7]["answer"], one, oracle)
    assert len(answers[8].body.splitlines()) == 2


GOOD = ITEMS[0]
LONG = "Who wrote the first computer program? " * 9
BAD = [
    ({"question": "a"}, "missing_field", "context"),
    ({"context": "a"}, "missing_field", "question"),
    ("a", "missing_field", "context"),
    ({"inputs": "a"}, "invalid_type", "inputs"),
    ({"inputs": {"question": "a"}}, "missing_field", "inputs.context"),
    ({"instances": [GOOD, {"question": "a", "context": 7}]}, "invalid_type", "instances[1].context"),
    ({"instances": [GOOD, {"question": " ", "context": "a"}]}, "empty_string", "instances[1].question"),
    ({"instances": [GOOD | {"title": "a"}]}, "unknown_field", "instances[0]"),
    ({"question": "a", "context": ""}, "empty_string", "context"),
    ({"question": "a", "context": "\ud800"}, "invalid_text", "context"),
    ({"texts": ["a", GOOD]}, "invalid_type", "texts[0]"),
    ({"instances": [GOOD, {"question": "a", "context": "\u200b\x00"}]}, "empty_text", "instances[1].context"),
    ({**GOOD, "top_k": 0}, "invalid_value", "top_k"),
    ({**GOOD, "top_k": True}, "invalid_type", "top_k"),
    ({**GOOD, "top_k": 10**9}, "invalid_value", "top_k"),
    ({**GOOD, "max_answer_len": 0}, "invalid_value", "max_answer_len"),
    ({**GOOD, "doc_stride": -1}, "invalid_value", "doc_stride"),
    ({**GOOD, "doc_stride": LENGTH}, "invalid_value", "doc_stride"),
    ({**GOOD, "handle_impossible_answer": "no"}, "invalid_type", "handle_impossible_answer"),
    ({**GOOD, "topk": 3}, "unknown_option", "topk"),
    ({"instances": [GOOD, {"question": LONG, "context": "a"}]}, "too_long", "instances[1]"),
]


def test_bad_requests_beside_good_ones(served: Served, oracle: Oracle) -> None:
    answers = served.ask(*(body for bad, _, _ in BAD for body in (bad, GOOD)))
    expected = served.ask(GOOD)[0].json()
    assert_best(expected["answer"], GOOD, oracle)
    for (body, code, param), bad, good in zip(BAD, answers[::2], answers[1::2], strict=True):
        told = bad.json()
        assert (bad.status, told["code"], told["param"]) == (400, code, param), (body, told)
        score = pytest.approx(expected["answer"]["score"], abs=1e-5)
        assert good.json()["answer"] == expected["answer"] | {"score": score}


def test_a_long_question_leaves_less_overlap(served: Served) -> None:
    question = "a " * (LENGTH - 3 - 8)
    assert len(served.handler.model.tokens.tokenizer(question)["input_ids"]) == LENGTH - 1 - 8
    (found,) = ask(served, [{"question": question, "context": ITEMS[1]["context"]}])
    assert found["answer"]


items = st.fixed_dictionaries(
    {
        "question": st.sampled_from([item["question"] for item in ITEMS]),
        "context": st.lists(st.sampled_from(ENGLISH), min_size=1, max_size=6, unique=True).map(" ".join),
    }
)


@settings(deadline=None, max_examples=12)
@given(st.lists(items, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_neither_company_nor_order_changes_an_answer(
    served: Served, many: list[dict[str, str]], chance: random.Random
) -> None:
    def scores(answers: Any) -> dict[tuple[int, int], float]:
        return {(answer["start"], answer["end"]): answer["score"] for answer in answers}

    alone = [scores(served.ask(item | {"top_k": 2})[0].json()["answer"]) for item in many]
    order = chance.sample(range(len(many)), len(many))
    together = served.ask(*(many[i] | {"top_k": 2} for i in order), {"instances": many, "top_k": 2})
    pairs = [(scores(answer.json()["answer"]), alone[i]) for answer, i in zip(together, order, strict=False)]
    pairs += [(scores(a), b) for a, b in zip(together[-1].json()["predictions"], alone, strict=True)]
    for found, expected in pairs:
        assert sorted(found.values()) == pytest.approx(sorted(expected.values()), abs=1e-5)
        for span in found.keys() & expected.keys():
            assert found[span] == pytest.approx(expected[span], abs=1e-5)
        assert found.keys() == expected.keys() or min(found.values()) == pytest.approx(min(expected.values()), abs=1e-5)


def test_a_build_finds_the_task_and_verifies(tmp_path: Path, model: Path) -> None:
    result = CliRunner().invoke(APP, [str(model), "--name", "qa", "--store", str(tmp_path)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = archive.read(tmp_path / "qa.mar")
    assert (found.handler, found.settings["task"], found.settings["max_tokens"]) == (HANDLER, "question_answering", 64)
