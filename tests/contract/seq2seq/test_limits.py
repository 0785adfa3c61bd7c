"""What Seq2SeqHandler refuses, bounds and cannot do in time. Oracle: the model's `generate` on one text at a time."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from handlers import generator as generation
from handlers.decoding_options import Decoding
from handlers.request import Request
from handlers.serialise import dumps
from tests.contract.conftest import Serve, Served
from tests.contract.seq2seq.conftest import SETTINGS, Generate, together
from tests.corpus import SENTENCES


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"text": 7}, "text", "invalid_type"),
        ({"texts": ["a", 7]}, "texts[1]", "invalid_type"),
        ({"texts": []}, "texts", "empty_list"),
        ({}, "text", "missing_field"),
        ({"text": "a", "max_tokens": 5}, "max_tokens", "unknown_option"),
        ({"text": "a", "num_return_sequences": 2}, "num_return_sequences", "unknown_option"),
        ({"text": "a", "src_lang": "en"}, "src_lang", "unknown_option"),
        ({"text": "a", "max_new_tokens": 100_000}, "max_new_tokens", "invalid_value"),
        ({"text": "a", "num_beams": 17}, "num_beams", "invalid_value"),
        ({"text": "a", "num_beams": True}, "num_beams", "invalid_type"),
        ({"text": "a", "temperature": 0.7}, "temperature", "no_effect"),
        ({"text": "a", "task": "translation_en_to_ge"}, "task", "invalid_value"),
        ({"text": "a", "prefix": 1}, "prefix", "invalid_type"),
        ({"text": "a", "parameters": {"min_new_tokens": 30}}, "min_new_tokens", "invalid_value"),
        ({"text": "a b c d " * 30, "truncate": False}, "text", "too_long"),
    ],
)
def test_bad_requests_beside_good_ones(t5: Served, body: dict[str, Any], param: str, code: str) -> None:
    good = {"text": "the cat", "max_new_tokens": 3}
    before, bad, after = t5.ask(good, body, good)
    assert (bad.status, bad.json()["param"], bad.json()["code"]) == (400, param, code)
    assert before.body == after.body == t5.ask(good)[0].body


def test_limits_of_the_model_and_of_its_archive(serve: Serve, models: dict[str, Path]) -> None:
    """BART has 64 positions; an archive may allow less."""
    served = serve(models["bart"], handler="handlers.seq2seq", **SETTINGS, max_response_bytes=4096)
    handler = served.handler
    assert handler.generator.limit == 63
    longest, longer, large = served.ask(
        {"text": "a", "max_new_tokens": 63, "min_new_tokens": 63},
        {"text": "a", "max_new_tokens": 64},
        {"texts": ["a"] * 50, "max_new_tokens": 40},
    )
    assert longest.status == 200
    assert longer.json()["message"] == "max_new_tokens is 64; this model writes at most 63."
    assert (large.status, large.json()["code"]) == (413, "answer_too_large")
    card = handler.card()
    assert card["max_new_tokens"] == 63
    assert card["attention"] == "padded: its decoder reads padded texts"
    few, many = (handler.limits(Decoding(num_beams=beams, max_length=60)) for beams in (1, 16))
    assert few.max_items >= 16 * many.max_items > 0
    assert few.max_tokens == 16 * many.max_tokens


def _largest(handler: Any) -> str:
    return max(handler.model.tokens.tokenizer.get_vocab(), key=lambda piece: len(piece.encode()))


def test_an_answer_stays_within_its_bound(everyone: dict[str, Served]) -> None:
    """Whatever the tokens are."""
    for served in everyone.values():
        handler = served.handler
        request = Request(("a",), {"max_new_tokens": 20})
        rows = torch.randint(handler.model.tokens.vocabulary, (200, 20))
        worst = torch.full((1, 20), handler.model.tokens.tokenizer.convert_tokens_to_ids(_largest(handler)))
        for text in handler.render(request, [*rows, *worst], []):
            value = handler.pipeline_value(request, text)
            assert len(dumps(value)) <= handler.item_bytes(request)


def test_work_that_cannot_be_done_in_time_is_refused(serve: Serve, models: dict[str, Path]) -> None:
    """Predicted by tokens to write, beams counted."""
    served = serve(models["t5"], handler="handlers.seq2seq", **SETTINGS)
    generator = served.handler.generator
    step = served.handler.time_budget / 40 / served.handler.model.costs.seconds_per_token
    generator.pace = replace(generator.pace, step=step, row=0.0)
    long, short = {"max_new_tokens": 60, "min_new_tokens": 60}, {"max_new_tokens": 3}
    huge, fine = served.ask({"text": "a", **long}, {"text": "a", **short})
    assert (huge.status, huge.json()["code"], fine.status) == (413, "too_much_work", 200)
    generator.pace = replace(generator.pace, step=step, row=0.0)
    half = {"max_new_tokens": 30, "min_new_tokens": 30}
    answers = served.ask({"text": "a", **half}, {"text": "b", **half, "num_beams": 2}, {"text": "c d", **half})
    assert [answer.status for answer in answers] == [200, 503, 200], "equal parameters share their steps"
    assert answers[1].headers["Retry-After"] == "1"


def test_what_is_unfinished_at_the_deadline_is_refused_and_what_is_finished_is_answered(
    serve: Serve, models: dict[str, Path], oracles: dict[str, Generate], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(models["t5"], handler="handlers.seq2seq", **SETTINGS)
    texts = [*SENTENCES[:8], "x"]
    lengths = [len(served.handler.model.tokens.tokenizer(oracles["t5"](t, max_new_tokens=60)).input_ids) for t in texts]
    assert min(lengths) + 3 < max(lengths), "some texts end early"
    at = (min(lengths) + max(lengths)) // 2
    steps = 0
    clock = time.monotonic

    def monotonic() -> float:
        """Time ends after so many steps."""
        return clock() + (1e10 if steps >= at else 0)

    class Clock(generation._Clock):
        def __call__(self, *arguments: Any, **more: Any) -> torch.Tensor:
            nonlocal steps
            steps += 1
            return super().__call__(*arguments, **more)

    monkeypatch.setattr(generation, "_Clock", Clock)
    monkeypatch.setattr(time, "monotonic", monotonic)
    served.handler.generator.pace, served.handler.time_budget = together(served), 1e9
    answers = served.ask(*({"text": text, "max_new_tokens": 60} for text in texts))
    late = [answer for answer in answers if answer.status == 503]
    assert 0 < len(late) < len(texts)
    assert all(answer.json()["code"] == "deadline" for answer in late)
    for text, answer in zip(texts, answers, strict=True):
        if answer.status != 503:
            assert answer.json() == {"text": oracles["t5"](text, max_new_tokens=60)}
    steps = 0
    monkeypatch.setattr(time, "monotonic", clock)
    assert served.ask({"text": "x"})[0].status == 200


def test_predictions_follow_what_batches_take(serve: Serve, models: dict[str, Path]) -> None:
    served = serve(models["t5"], handler="handlers.seq2seq", **SETTINGS)
    generator = served.handler.generator
    served.handler.model.costs = replace(served.handler.model.costs, seconds_per_token=1.0)
    generator.pace = replace(generator.pace, ratio=50.0)
    served.handler.time_budget = 1e9
    for _ in range(8):
        assert served.ask({"texts": ["the cat"] * 3, "max_new_tokens": 4})[0].status == 200
    assert served.handler.model.costs.seconds_per_token < 0.5
    assert generator.pace.ratio < 20


def test_t5_never_runs_in_fp16(serve: Serve, models: dict[str, Path]) -> None:
    served = serve(models["t5"], handler="handlers.seq2seq", **SETTINGS, dtype="float16")
    assert served.handler.model.dtype == torch.bfloat16
    assert served.ask({"text": "the cat"})[0].status == 200


def test_packing_is_refused_once_in_the_log(
    serve: Serve, models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    serve(models["bart"], handler="handlers.seq2seq", **SETTINGS)
    lines = [record for record in caplog.records if "cannot be packed" in record.getMessage()]
    assert len(lines) == 1
    with pytest.raises(ValueError, match="cannot be packed"):
        serve(models["bart"], handler="handlers.seq2seq", **SETTINGS, attention="packed")
