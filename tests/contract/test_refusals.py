"""Answers and texts that are too large, in tasks whose items are objects: what fits is answered, the rest is named."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.contract.conftest import Serve
from tests.families import family


def test_rankings_are_refused_by_their_sum_and_not_by_the_largest(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family(tmp_path / "m", "bert", head="sequence-classification", labels=["LABEL_0"])
    served = serve(model, handler="handlers.reranking", max_tokens=32)
    monkeypatch.setattr(served.handler, "settings", replace(served.handler.settings, max_response_bytes=20_000))
    large, small = ({"query": "cat", "documents": ["the cat " * n]} for n in (1000, 1))
    fits, passes = served.ask(
        {"instances": [large, small, small, small], "parameters": {"return_documents": True}},
        {"instances": [large, large, large, small], "parameters": {"return_documents": True}},
    )
    assert fits.status == 200
    assert len(fits.body) > 8000
    assert (passes.status, passes.json()["code"], passes.json()["param"]) == (413, "answer_too_large", "instances")


def test_a_pair_of_the_body_itself_has_errors_without_a_hanging_colon(serve: Serve, tmp_path: Path) -> None:
    model = family(tmp_path / "m", "bert", head="sequence-classification")
    served = serve(model, handler="handlers.classification", max_tokens=16)
    pair = {"text": "the cat " * 600_000, "text_pair": "a dog"}
    alone, listed = served.ask(pair, {"texts": [pair]})
    assert (alone.status, alone.json()["param"]) == (413, None)
    assert alone.json()["message"].startswith("The text has 4800005 characters")
    assert listed.json()["message"].startswith("texts[0]: the text has 4800005 characters")


def test_a_question_that_leaves_no_room_is_told_of_its_context(serve: Serve, tmp_path: Path) -> None:
    model = family(tmp_path / "m", "bert", head="question-answering")
    served = serve(model, handler="handlers.question_answering", max_tokens=32)
    body = {"question": "where does the cat sleep " * 20, "context": "in the house " * 20}
    alone, listed = served.ask(body, {"instances": [body]})
    for answer, param in ((alone, "context"), (listed, "instances[0].context")):
        assert (answer.status, answer.json()["code"]) == (400, "too_long")
        content = answer.json()
        assert content["param"] == param
        assert f"{param}: the tokens of its other text alone leave no room" in str(content)


def test_entities_without_end_are_not_gathered(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = family(tmp_path / "m", "bert", head="token-classification", labels=["O", "PER"])
    served = serve(model, handler="handlers.token_classification", max_tokens=32)
    monkeypatch.setattr(served.handler, "settings", replace(served.handler.settings, max_response_bytes=3000))
    seen = []
    of = served.handler.entities.of
    monkeypatch.setattr(
        served.handler.entities, "of", lambda text, *rest, **own: seen.append(text) or of(text, *rest, **own)
    )
    texts = ["the cat sleeps in the old house"] * 20
    bad, good = served.ask({"texts": texts, "ignore_labels": []}, {"text": "the cat"})
    assert (bad.status, bad.json()["code"], bad.json()["param"]) == (413, "answer_too_large", "texts")
    assert good.status == 200
    assert 0 < seen.count(texts[0]) < 20
