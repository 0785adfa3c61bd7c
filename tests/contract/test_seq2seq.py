"""Seq2SeqHandler through TorchServe's own loader and Service. Oracle: the model's `generate` on one text at a time."""

import json
import logging
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from typer.testing import CliRunner

from handlers import generator as generation
from handlers.decoding_options import Decoding
from handlers.request import Request
from handlers.serialise import dumps
from scripts.build import build
from scripts.lib import archive
from scripts.lib.service import Body
from tests.contract.conftest import Serve, Served
from tests.corpus import SENTENCES
from tests.families import family
from tests.models import write_json

# One thread: two on a busy machine wait for each other at every small step
SETTINGS = {"max_tokens": 48, "threads": 1}
TEXTS = [*SENTENCES[:4], "", "x", " ".join(SENTENCES[4:7]), "ünïcödé ☃", " ".join(SENTENCES[:20])]
FAMILIES = ("t5", "bart", "marian", "pegasus")
PREFIX = "translate: "
TASKS = {
    "translation_en_to_de": {"prefix": PREFIX, "max_length": 12, "num_beams": 3, "early_stopping": True},
    "summarization": {"prefix": "summarize: ", "max_length": 9, "min_length": 4},
}

APP = typer.Typer(pretty_exceptions_enable=False)
APP.command()(build)
Generate = Callable[..., str]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("seq2seq")
    return {
        name: family(
            directory / name, name, head="seq2seq-lm", **({"task_specific_params": TASKS} if name == "t5" else {})
        )
        for name in FAMILIES
    }


@pytest.fixture(scope="module")
def everyone(serve: Serve, models: dict[str, Path]) -> dict[str, Served]:
    return {name: serve(models[name], handler="handlers.seq2seq", **SETTINGS) for name in FAMILIES}


@pytest.fixture(scope="module")
def t5(everyone: dict[str, Served]) -> Served:
    return everyone["t5"]


@pytest.fixture(scope="module")
def oracles(models: dict[str, Path]) -> dict[str, Generate]:
    return {name: oracle(models[name]) for name in FAMILIES}


def oracle(directory: Path) -> Generate:
    """A text and arguments of `generate`, and perhaps a seed → what the model writes, alone."""
    model = AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)

    def generate(text: str, seed: int = 0, **parameters: Any) -> str:
        inputs = tokenizer(text, truncation=True, max_length=SETTINGS["max_tokens"], return_tensors="pt")
        inputs.pop("token_type_ids", None)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            ids = model.generate(**inputs, **parameters)[0]
        found: str = tokenizer.decode(ids, skip_special_tokens=True)
        return found

    return generate


def together(served: Served) -> generation.Pace:
    """A pace at which a step costs so much that all texts are written at once."""
    return replace(served.handler.generator.pace, step=1e6)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "parameters",
    [
        {"max_new_tokens": 12},
        {"max_new_tokens": 12, "num_beams": 3},
        {"max_new_tokens": 10, "num_beams": 2, "length_penalty": 2.0, "early_stopping": True},
        {"max_length": 14, "min_length": 8, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
        {"max_new_tokens": 8, "do_sample": True, "seed": 7, "top_k": 20, "top_p": 0.9, "temperature": 1.5},
    ],
    ids=["greedy", "beams", "early", "penalties", "sampled"],
)
def test_equals_generate_one_by_one(
    everyone: dict[str, Served], oracles: dict[str, Generate], name: str, parameters: dict[str, Any]
) -> None:
    answer = everyone[name].ask({"texts": TEXTS, "parameters": parameters})[0]
    assert answer.status == 200, answer.body
    assert answer.json() == {"texts": [oracles[name](text, **parameters) for text in TEXTS]}


@pytest.mark.parametrize("name", FAMILIES)
def test_defaults_are_the_models_own(
    everyone: dict[str, Served], oracles: dict[str, Generate], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also under another name of the same length, and no call is worth a warning."""
    logging.getLogger("transformers").addHandler(caplog.handler)
    answers = everyone[name].ask({"text": TEXTS[0]}, {"text": TEXTS[1], "max_new_tokens": 5})
    assert caplog.text == ""
    assert answers[0].json() == {"text": oracles[name](TEXTS[0])}
    assert answers[1].json() == {"text": oracles[name](TEXTS[1], max_new_tokens=5)}


words = st.lists(st.sampled_from(" ".join(SENTENCES[:30]).split()), max_size=30).map(" ".join)


@pytest.mark.parametrize(("name", "beams"), [("t5", 1), ("bart", 2)])
@settings(deadline=None, max_examples=8)
@given(many=st.lists(words, min_size=1, max_size=6), rng=st.randoms(use_true_random=False))
def test_neither_company_nor_order_changes_a_text(
    everyone: dict[str, Served], name: str, beams: int, many: list[str], rng: random.Random
) -> None:
    served = everyone[name]
    body = {"num_beams": beams, "max_new_tokens": 8}
    alone = {text: served.ask({"text": text, **body})[0].json()["text"] for text in set(many)}
    shuffled = list(many)
    rng.shuffle(shuffled)
    others = [{"text": "other", "max_new_tokens": 3}, {"text": "other", "do_sample": True}, {"text": "bad", "seed": 1}]
    together = served.ask(*({"text": text, **body} for text in shuffled), *others, {"texts": many, **body})
    assert [answer.json()["text"] for answer in together[: len(many)]] == [alone[text] for text in shuffled]
    assert together[-1].json() == {"texts": [alone[text] for text in many]}
    assert together[-2].status == 400


def test_a_draw_depends_on_its_seed_alone(t5: Served) -> None:
    body = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 12}
    before = torch.random.get_rng_state()
    answers = t5.ask(
        {"texts": ["a dog", "the cat", "a dog"], "seed": 3, **body},
        {"text": "a dog", "seed": 3, **body},
        *[{"text": "a dog", **body} for _ in range(3)],
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    first, _, third = answers[0].json()["texts"]
    assert first == third == answers[1].json()["text"]
    assert len({answer.json()["text"] for answer in answers[1:]}) > 2, "without a seed, each its own"


def test_equal_parameters_share_a_batch(t5: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    write = t5.handler.generator.write

    def watched(encodings: Sequence[Any], precise: bool, deadline: float) -> Any:
        seen.append((len(encodings), encodings[0].key.num_beams))
        return write(encodings, precise, deadline)

    monkeypatch.setattr(t5.handler.generator, "write", watched)
    monkeypatch.setattr(t5.handler.generator, "pace", together(t5))
    monkeypatch.setattr(t5.handler, "time_budget", 1e9)
    t5.ask({"text": "a"}, {"text": "b c", "num_beams": 2}, {"texts": ["c", "d e f"]}, {"text": "e", "max_length": 21})
    assert sorted(seen) == [(1, 2), (4, 1)]


def test_shapes(t5: Served, oracles: dict[str, Generate]) -> None:
    text, other = (oracles["t5"](text, max_new_tokens=6) for text in ("a dog", "the cat"))
    parameters = {"max_new_tokens": 6}
    plain, one, many, instances, tensors = t5.ask(
        {"text": "a dog", **parameters},
        {"inputs": "a dog", "parameters": parameters},
        {"inputs": ["a dog", "the cat"], "parameters": parameters},
        {"instances": ["a dog", {"text": "the cat"}], "parameters": parameters},
        {
            "id": "7",
            "inputs": [{"name": "text", "datatype": "BYTES", "shape": [2], "data": ["a dog", "the cat"]}],
            "parameters": parameters,
        },
    )
    assert plain.json() == {"text": text}
    assert one.json() == [{"generated_text": text}]
    assert many.json() == [{"generated_text": text}, {"generated_text": other}]
    assert instances.json() == {"predictions": [text, other]}
    output = tensors.json()["outputs"][0]
    assert (tensors.json()["id"], output["datatype"], output["data"]) == ("7", "BYTES", [text, other])
    assert t5.ask(Body(b"a dog", "text/plain"))[0].json() == {"text": oracles["t5"]("a dog")}


def test_a_task_of_the_models_own_brings_its_prefix_and_settings(t5: Served, oracles: dict[str, Generate]) -> None:
    german, summary, named, shorter, own = t5.ask(
        {"inputs": "a dog", "parameters": {"task": "translation_en_to_de"}},
        {"inputs": "a dog", "parameters": {"task": "summarization"}},
        {"inputs": "a dog", "parameters": {"task": "translation"}},
        {"text": "a dog", "task": "summarization", "max_new_tokens": 5, "min_new_tokens": 0},
        {"text": "a dog", "task": "summarization", "prefix": "", "num_beams": 2, "max_length": 9},
    )
    generate = oracles["t5"]
    expected = generate(PREFIX + "a dog", max_length=12, num_beams=3, early_stopping=True)
    assert german.json() == [{"translation_text": expected}]
    assert summary.json() == [{"summary_text": generate("summarize: a dog", max_length=9, min_length=4)}]
    assert named.json() == [{"translation_text": generate("a dog")}]
    assert shorter.json() == {"text": generate("summarize: a dog", max_new_tokens=5)}
    assert own.json() == {"text": generate("a dog", max_length=9, min_length=4, num_beams=2)}


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
    texts = [*SENTENCES[:12], "x"]
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


def test_overflowing_scores_are_written_again_in_fp32(serve: Serve, models: dict[str, Path], oracles: Any) -> None:
    served = serve(models["bart"], handler="handlers.seq2seq", **SETTINGS)
    handler = served.handler
    generate = handler.model.generate
    asked: list[tuple[int, bool]] = []

    def spoilt(encodings: Sequence[Any], *, precise: bool = False, **settings: Any) -> torch.Tensor:
        """As a half-precision head that overflows on the first text."""
        asked.append((len(encodings), precise))
        head = handler.model.net.lm_head.register_forward_hook(
            lambda _, __, out: None if precise else out.index_fill(0, torch.tensor([0]), float("nan"))
        )
        try:
            found: torch.Tensor = generate(encodings, precise=precise, **settings)
            return found
        finally:
            head.remove()

    handler.model.generate = spoilt
    handler.generator.pace, handler.time_budget = together(served), 1e9
    for parameters in ({"max_new_tokens": 5}, {"max_new_tokens": 5, "do_sample": True, "seed": 1}):
        asked.clear()
        answer = served.ask({"texts": ["a dog", "the cat in the house"], **parameters})[0]
        assert answer.json() == {
            "texts": [oracles["bart"](text, **parameters) for text in ("a dog", "the cat in the house")]
        }
        assert asked[-1][1] or (1, True) in asked


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


def test_a_setting_of_the_models_that_reads_the_source_keeps_texts_apart(
    serve: Serve, tmp_path: Path, models: dict[str, Path]
) -> None:
    """Else padding would be among the words that must not be repeated."""
    model = tmp_path / "model"
    shutil.copytree(models["bart"], model)
    path = model / "generation_config.json"
    write_json(path, json.loads(path.read_text()) | {"encoder_no_repeat_ngram_size": 1})
    served = serve(model, handler="handlers.seq2seq", **SETTINGS)
    generate = oracle(model)
    answer = served.ask({"texts": TEXTS[:4], "max_new_tokens": 6})[0]
    assert answer.json() == {"texts": [generate(text, max_new_tokens=6) for text in TEXTS[:4]]}


def test_a_build_finds_the_task_and_the_archive_answers(models: dict[str, Path], tmp_path: Path) -> None:
    result = CliRunner().invoke(APP, [str(models["marian"]), "--name", "writer", "--store", str(tmp_path)])
    assert result.exit_code == 0, result.output
    whole = archive.read(tmp_path / "writer.mar")
    assert whole.handler == "handlers.seq2seq"
    assert (whole.settings["task"], whole.settings["max_tokens"]) == ("seq2seq", 64)
