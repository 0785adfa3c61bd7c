"""RerankingHandler through TorchServe's own loader and Service. Oracle: CrossEncoder on the same directory."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import CrossEncoder

from handlers.base import ENVELOPE_BYTES
from handlers.request import Request
from handlers.scores import CandidateDocuments
from handlers.serialise import dumps
from scripts.lib import checkpoint, tree
from tests.contract.conftest import Build, Serve, Served, assert_close
from tests.families import family

HANDLER = "handlers.reranking"
SETTINGS = {"max_tokens": 32, "activation": "Sigmoid"}
QUERY = "where does the cat sleep"
DOCUMENTS = ["the cat", "", "a dog runs in the old house and eats " * 6, "ünïcödé ☃", "The Cat sleeps", "the cat"]


def reranker(directory: Path, name: str = "bert", labels: tuple[str, ...] = ("LABEL_0",), **config: Any) -> Path:
    return family(directory, name, head="sequence-classification", labels=list(labels), **config)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reranker(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="module")
def served(serve: Serve, model: Path) -> Served:
    return serve(model, handler=HANDLER, **SETTINGS, max_items=40)


@pytest.fixture(scope="module")
def oracle(model: Path) -> CrossEncoder:
    return CrossEncoder(str(model), device="cpu", max_length=32)


def body(*documents: Any, query: str = QUERY, **options: Any) -> dict[str, Any]:
    return {"query": query, "documents": list(documents), **options}


def by_index(ranking: list[dict[str, Any]], key: str = "score") -> list[float]:
    """Scores in the order of the documents; the ranking must be whole and sorted."""
    assert sorted(entry["index"] for entry in ranking) == list(range(len(ranking)))
    order = [(-entry[key], entry["index"]) for entry in ranking]
    assert order == sorted(order), "best first, ties in order"
    return [entry[key] for entry in sorted(ranking, key=lambda entry: entry["index"])]


def assert_ranks_as(answer: Any, oracle: CrossEncoder, query: str, documents: list[str], **options: Any) -> None:
    assert answer.status == 200, answer.body
    expected = oracle.predict([[query, document] for document in documents], **options)
    assert_close(by_index(answer.json()["ranking"]), expected)


@pytest.mark.parametrize(("name", "packed"), [("xlm-roberta", True), ("deberta-v2", False), ("qwen3", False)])
def test_families_equal_cross_encoder(serve: Serve, tmp_path: Path, name: str, packed: bool) -> None:
    model = reranker(tmp_path / "model", name)
    served = serve(model, handler=HANDLER, **SETTINGS)
    oracle = CrossEncoder(str(model), device="cpu", max_length=32)
    assert_ranks_as(served.ask(body(*DOCUMENTS))[0], oracle, QUERY, DOCUMENTS)
    assert served.handler.model.packed == packed, served.handler.model.why_padded


def test_packed_and_padded_equal_cross_encoder(serve: Serve, served: Served, model: Path, oracle: CrossEncoder) -> None:
    assert served.handler.model.packed, served.handler.model.why_padded
    assert_ranks_as(served.ask(body(*DOCUMENTS))[0], oracle, QUERY, DOCUMENTS)
    served = serve(model, handler=HANDLER, **SETTINGS, attention="padded")
    assert not served.handler.model.packed
    assert_ranks_as(served.ask(body(*DOCUMENTS))[0], oracle, QUERY, DOCUMENTS)


def test_the_order_is_that_of_rank(served: Served, oracle: CrossEncoder) -> None:
    documents = DOCUMENTS[:5]
    ranking = served.ask(body(*documents))[0].json()["ranking"]
    assert [entry["index"] for entry in ranking] == [e["corpus_id"] for e in oracle.rank(QUERY, documents)]


def test_equal_documents_stay_in_order(served: Served) -> None:
    documents = [*DOCUMENTS, *DOCUMENTS, *DOCUMENTS]
    ranking = served.ask(body(*documents))[0].json()["ranking"]
    by_index(ranking)
    for text in set(DOCUMENTS):
        places = [entry["index"] for entry in ranking if documents[entry["index"]] == text]
        assert places == sorted(places)


def test_options(served: Served, oracle: CrossEncoder) -> None:
    best, given_back, raw, refused = served.ask(
        body(*DOCUMENTS, top_n=2),
        body("the cat", {"text": 'a "dog"'}, return_documents=True),
        body(*DOCUMENTS, raw_scores=True),
        body(*DOCUMENTS, truncate=False),
    )
    whole = served.ask(body(*DOCUMENTS))[0].json()["ranking"]
    assert [entry["index"] for entry in best.json()["ranking"]] == [entry["index"] for entry in whole[:2]]
    assert {e["index"]: e["document"] for e in given_back.json()["ranking"]} == {
        0: {"text": "the cat"}, 1: {"text": 'a "dog"'},
    }  # fmt: skip
    assert_ranks_as(raw, oracle, QUERY, DOCUMENTS, activation_fn=torch.nn.Identity())
    assert (refused.status, refused.json()["code"], refused.json()["param"]) == (400, "too_long", "documents[2]")


def test_shapes(served: Served) -> None:
    documents = ["the cat", "a dog"]
    expected = served.ask(body(*documents))[0].json()["ranking"]
    instance = {"query": QUERY, "documents": documents}
    other = {"query": "a dog", "passages": ["the house", {"text": "a dog"}, "x"]}
    second = served.ask(other)[0].json()["ranking"]
    answers = served.ask(
        {"query": QUERY, "texts": documents},
        {"query": QUERY, "documents": documents, "parameters": {"top_n": 9}},
        [instance, other],
        {"inputs": instance, "parameters": {"raw_scores": False}},
        {"inputs": [instance, other]},
        {"instances": [instance, other]},
        {
            "id": "7",
            "inputs": [
                {"name": "query", "datatype": "BYTES", "shape": [1], "data": [QUERY]},
                {"name": "documents", "datatype": "BYTES", "shape": [1, 2], "data": documents},
            ],
        },
    )
    found = [answer.json() for answer in answers]
    assert_rankings([found[0]["ranking"], found[1]["ranking"]], [expected, expected])
    assert_rankings(found[2]["rankings"], [expected, second])
    assert_rankings(found[3], [expected])
    assert_rankings(found[4], [expected, second])
    assert_rankings(found[5]["predictions"], [expected, second])


def assert_rankings(found: Any, expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert_close(by_index(one), by_index(other))


def test_text_embeddings_inference_route(served: Served, oracle: CrossEncoder) -> None:
    texts = ["the cat", "a dog"]
    plain, full, empty, missing = served.ask(
        {"query": QUERY, "texts": texts},
        {"query": QUERY, "texts": texts, "return_text": True, "raw_scores": True, "truncate": True},
        {"query": QUERY, "texts": []},
        {"texts": texts},
        route="rerank",
    )
    assert_close(by_index(plain.json()), oracle.predict([[QUERY, text] for text in texts]))
    assert {entry["index"]: entry["text"] for entry in full.json()} == dict(enumerate(texts))
    logits = oracle.predict([[QUERY, text] for text in texts], activation_fn=torch.nn.Identity())
    assert_close(by_index(full.json()), logits)
    assert (empty.status, empty.json()["error_type"]) == (400, "Empty")
    assert (missing.status, missing.json()["param"]) == (422, "query")


@pytest.mark.parametrize("route", ["v1/rerank", "v2/rerank"])
def test_cohere_and_jina_route(served: Served, oracle: CrossEncoder, route: str) -> None:
    documents = ["the cat", {"text": "a dog"}, "a dog runs " * 20]
    asked = {"model": "m", "query": QUERY, "documents": documents, "top_n": 3, "return_documents": True}
    good, bad = served.ask(asked, {**asked, "documents": ["a", 3]}, route=route)
    content = good.json()
    texts = [d if isinstance(d, str) else d["text"] for d in documents]
    expected = oracle.predict([[QUERY, text] for text in texts])
    assert_close(by_index(content["results"], "relevance_score"), expected)
    assert {entry["index"]: entry["document"]["text"] for entry in content["results"]} == dict(enumerate(texts))
    assert content["usage"]["total_tokens"] > 32
    assert content["usage"]["truncated_tokens"] == int(good.headers["X-Truncated-Tokens"])
    assert (bad.status, bad.json()["param"]) == (400, "documents[1]")
    assert bad.json()["message"] == "documents[1] is a number; it must be a string or an object with 'text'."


BAD = [
    ({"query": "a"}, "missing_field", "documents"),
    ({"documents": ["a"]}, "missing_field", "query"),
    ({"query": "a", "documents": []}, "empty_list", "documents"),
    ({"query": "a", "documents": "b"}, "invalid_type", "documents"),
    ({"query": "a", "documents": ["b"], "texts": ["b"]}, "ambiguous_input", "texts"),
    ({"query": "a", "documents": ["b", None]}, "invalid_type", "documents[1]"),
    ({"query": "a", "documents": [{"title": "b"}]}, "missing_field", "documents[0].text"),
    ({"query": "a", "documents": [{"text": "b", "title": "c"}]}, "unknown_field", "documents[0]"),
    ({"query": 3, "documents": ["b"]}, "invalid_type", "query"),
    ({"query": "a", "passages": ["\ud800"]}, "invalid_text", "passages[0]"),
    ({"query": "a", "documents": ["b"], "top_n": 0}, "invalid_value", "top_n"),
    ({"query": "a", "documents": ["b"], "return_documents": 1}, "invalid_type", "return_documents"),
    ({"query": "a", "documents": ["b"], "topn": 1}, "unknown_option", "topn"),
    ({"instances": [{"query": "a", "texts": ["b"]}, "c"]}, "missing_field", "instances[1].documents"),
    ({"instances": [{"query": "a", "texts": ["b", 1]}]}, "invalid_type", "instances[0].texts[1]"),
    ({"query": "a", "inputs": "b"}, "ambiguous_input", "inputs"),
    ([["a", "b"]], "invalid_type", "texts[0]"),
]


@pytest.mark.parametrize(("bad", "code", "param"), BAD)
def test_bad_requests_beside_good_ones(served: Served, bad: Any, code: str, param: str) -> None:
    good = body("the cat", "a dog")
    before, answer, after = served.ask(good, bad, good)
    assert (answer.status, answer.json()["code"], answer.json()["param"]) == (400, code, param), answer.body
    expected = served.ask(good)[0].json()["ranking"]
    for beside in (before, after):
        assert_close(by_index(beside.json()["ranking"]), by_index(expected))


def test_limits_count_documents(served: Served) -> None:
    fits, many, spread = served.ask(
        body(*["a"] * 40),
        body(*["a"] * 41),
        {"instances": [{"query": "a", "documents": ["b"] * 21}] * 2},
    )
    assert fits.status == 200
    for answer in (many, spread):
        assert (answer.status, answer.json()["code"]) == (413, "too_many_items")
    assert (many.json()["param"], spread.json()["param"]) == ("documents[40]", "instances")


def test_an_answer_that_is_too_large_is_refused_before_compute(serve: Serve, model: Path) -> None:
    served = serve(model, handler=HANDLER, **SETTINGS, max_response_bytes=ENVELOPE_BYTES + 1000)
    long = "\n" * 300
    small, large, best = served.ask(
        body(*[long] * 3),
        body(*[long] * 3, return_documents=True),
        body(*[long] * 3, return_documents=True, top_n=1),
    )
    assert (small.status, best.status) == (200, 200)
    assert (large.status, large.json()["code"]) == (413, "answer_too_large")


documents = st.lists(st.text(st.characters(codec="utf-8"), max_size=20), min_size=1, max_size=6)


@settings(deadline=None, max_examples=50)
@given(documents, st.integers(1, 7), st.booleans(), st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_no_ranking_is_longer_than_its_bound(
    served: Served, found: list[str], top_n: int, back: bool, score: float
) -> None:
    item = CandidateDocuments("q", tuple(found), "documents")
    request = Request((item,), {"top_n": top_n, "return_documents": back}, "")
    entries = [{"index": i, "score": score, **({"document": {"text": d}} if back else {})} for i, d in enumerate(found)]
    for order in (entries, entries[::-1]):
        assert len(dumps(order[:top_n])) <= served.handler.item_bytes(request)


@settings(deadline=None, max_examples=8)
@given(st.lists(st.sampled_from(DOCUMENTS), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_neither_company_nor_order_changes_a_score(served: Served, many: list[str], shuffle: random.Random) -> None:
    alone = {text: served.ask(body(text))[0].json()["ranking"][0]["score"] for text in set(many)}
    shuffled = list(many)
    shuffle.shuffle(shuffled)
    *singles, whole, other = served.ask(*map(body, many), body(*shuffled), body(*many, query="another"))
    for text, answer in zip(many, singles, strict=True):
        assert_close(answer.json()["ranking"][0]["score"], alone[text])
    assert_close(by_index(whole.json()["ranking"]), [alone[text] for text in shuffled])
    assert len(other.json()["ranking"]) == len(many)


def test_several_labels_are_answered_in_order(serve: Serve, tmp_path: Path) -> None:
    names = ("contradiction", "entailment", "neutral")
    model = reranker(tmp_path / "model", labels=names)
    served = serve(model, handler=HANDLER, max_tokens=32)
    answer, back, refused = served.ask(body(*DOCUMENTS), body("a", return_documents=True), body("a", top_n=1))
    expected = CrossEncoder(str(model), device="cpu", max_length=32).predict([[QUERY, d] for d in DOCUMENTS])
    rows = answer.json()["ranking"]
    assert [row["index"] for row in rows] == list(range(len(DOCUMENTS)))
    assert [[entry["label"] for entry in row["scores"]] for row in rows] == [list(names)] * len(DOCUMENTS)
    assert_close([[entry["score"] for entry in row["scores"]] for row in rows], expected)
    assert back.json()["ranking"][0]["document"] == {"text": "a"}
    assert (refused.status, refused.json()["param"]) == (400, "top_n")
    assert served.ask(body("a"), route="rerank")[0].status == 404
    assert served.handler.card()["labels"] == list(names)


def test_modular_saves(serve: Serve, tmp_path: Path) -> None:
    oracle = CrossEncoder(str(reranker(tmp_path / "made", "roberta")), device="cpu", max_length=16)
    oracle.prompts = {"question": "question: ", "none": ""}
    oracle.default_prompt_name = "question"
    oracle.activation_fn = torch.nn.Tanh()
    model = tmp_path / "model"
    oracle.save_pretrained(str(model))
    edit(model / "sentence_bert_config.json", do_lower_case=True)
    found = checkpoint.read(tree.walk(model))
    assert (found.task, found.max_tokens) == ("reranking", 16)
    served = serve(model, handler=HANDLER, **{k: v for k, v in found.settings().items() if k not in ("task", "model")})
    again = CrossEncoder(str(model), device="cpu")
    default, named, own, unknown, both = served.ask(
        body(*DOCUMENTS),
        body(*DOCUMENTS, prompt_name="none"),
        body(*DOCUMENTS, prompt="THE "),
        body("a", prompt_name="non"),
        body("a", prompt_name="none", prompt="b"),
    )
    assert_ranks_as(default, again, QUERY, DOCUMENTS)
    assert_ranks_as(named, again, QUERY, DOCUMENTS, prompt_name="none")
    assert_ranks_as(own, again, QUERY, DOCUMENTS, prompt="THE ")
    assert (unknown.status, unknown.json()["param"]) == (400, "prompt_name")
    assert (both.status, both.json()["param"]) == (400, "prompt")


def test_a_build_finds_the_task_and_the_archive_answers(model: Path, build_archive: Build) -> None:
    whole = build_archive(model)
    assert whole.handler == HANDLER
    assert whole.settings["activation"] == "Sigmoid"
