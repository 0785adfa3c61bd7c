"""Seq2SeqHandler's texts: whatever shares the batch. Oracle: the model's `generate` on one text at a time."""

import json
import logging
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.lib.service import Body
from tests.contract.conftest import Build, Serve, Served, loaded
from tests.contract.seq2seq.conftest import FAMILIES, PREFIX, SETTINGS, TEXTS, Generate, oracle, together
from tests.corpus import SENTENCES
from tests.models import write_json
from tests.opus import checkpoint

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 12},
    "beams": {"max_new_tokens": 12, "num_beams": 3},
    "early": {"max_new_tokens": 10, "num_beams": 2, "length_penalty": 2.0, "early_stopping": True},
    "penalties": {"max_length": 14, "min_length": 8, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
    "sampled": {"max_new_tokens": 8, "do_sample": True, "seed": 7, "top_k": 20, "top_p": 0.9, "temperature": 1.5},
}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *[("t5", way) for way in WAYS],
        *[("bart", way) for way in ("greedy", "beams", "penalties")],
        *[("marian", way) for way in ("greedy", "early")],
        *[("pegasus", way) for way in ("greedy", "sampled")],
    ],
)
def test_equals_generate_one_by_one(
    everyone: dict[str, Served], oracles: dict[str, Generate], name: str, way: str
) -> None:
    parameters = WAYS[way]
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
@settings(deadline=None, max_examples=5)
@given(many=st.lists(words, min_size=1, max_size=5), rng=st.randoms(use_true_random=False))
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


def test_a_checkpoint_of_opus_mt_is_built_and_answers(build_archive: Build, tmp_path: Path) -> None:
    """source.spm, target.spm, vocab.json, and no tokenizer.json. Oracle: generate, with MarianTokenizer."""
    pytest.importorskip("sentencepiece", reason="trains the tokenizer: pip install sentencepiece protobuf")
    directory = checkpoint(tmp_path / "opus")
    whole = build_archive(directory)
    assert whole.handler == "handlers.seq2seq"
    assert (whole.settings["task"], whole.settings["max_tokens"]) == ("seq2seq", 64)
    served = loaded(tmp_path / "extracted")
    texts = [*TEXTS[:5], ">>fra<< the cat", ">>deu_Latn<< the cat", ">>xyz<< the cat", "ünïcödé ☃ ø"]
    generate = oracle(directory)
    expected = [generate(text) for text in texts]
    assert len(set(expected)) > 4
    assert served.ask({"texts": texts})[0].json() == {"texts": expected}
