"""Embedding models of every family. Oracle: sentence-transformers on the same directory, saved by it."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

from scripts.lib import checkpoint, tree
from tests.contract.conftest import Serve, Served, assert_close, vectors
from tests.families import family
from tests.models import write_json

TEXTS = ["the cat", "", "a dog runs in the old house and eats " * 9, "hello world " * 9, "THE Cat", "ünïcödé ☃", "x"]
ENCODERS = {
    "bert": True, "roberta": True, "xlm-roberta": True, "distilbert": True, "electra": True, "albert": True,
    "mpnet": False, "deberta-v2": False, "modernbert": False,
}  # fmt: skip
DECODERS = {"qwen3": True, "llama": True}
PACKED = ENCODERS | DECODERS


def sentence_transformer(directory: Path, name: str, pooling: str, **options: Any) -> SentenceTransformer:
    """A tiny model of a family with a pooling, saved to `directory` by the library itself."""
    home = family(directory.parent / f"{directory.name}-network", name)
    if name in DECODERS:  # as their embedding checkpoints have it
        config = home / "tokenizer_config.json"
        write_json(config, json.loads(config.read_text()) | {"padding_side": "left"})
    network = Transformer(str(home))
    network.max_seq_length = 60
    model = SentenceTransformer(
        modules=[network, Pooling(network.get_embedding_dimension(), pooling), Normalize()], device="cpu", **options
    )
    model.save(str(directory))
    return model


def served_as_built(serve: Serve, directory: Path, **settings: Any) -> Served:
    """The model with the settings that a build finds in its files."""
    found = checkpoint.read(tree.walk(directory)).settings()
    del found["model"], found["task"]
    return serve(directory, **found | settings)


@pytest.mark.parametrize("name", PACKED)
def test_a_family(serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    prompts = {"query": "which text tells: ", "document": ""}
    pooling = "lasttoken" if name in DECODERS else "mean"
    oracle = sentence_transformer(tmp_path / "model", name, pooling, prompts=prompts)
    caplog.set_level(logging.WARNING, "handlers")
    served = served_as_built(serve, tmp_path / "model")
    assert served.handler.model.packed == PACKED[name], served.handler.model.why_padded
    said = [record.getMessage() for record in caplog.records if "Running padded" in record.getMessage()]
    assert len(said) == (not PACKED[name])
    many, query, *alone = served.ask(
        {"texts": TEXTS}, {"texts": TEXTS, "prompt_name": "query"}, *({"text": text} for text in TEXTS)
    )
    expected = oracle.encode(TEXTS)
    assert_close(vectors(many), expected)
    assert_close(np.concatenate([vectors(answer) for answer in alone]), expected)
    assert_close(vectors(query), oracle.encode_query(TEXTS))


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("attention", ["packed", "padded"])
def test_padding_on_the_left_and_on_the_right_are_one(serve: Serve, tmp_path: Path, name: str, attention: str) -> None:
    """The library pads decoders on the left; here padding, where there is any, lies behind the text."""
    oracle = sentence_transformer(tmp_path / "model", name, "lasttoken")
    assert oracle.tokenizer.padding_side == "left"
    if name == "qwen3":  # its embedding checkpoints append an end, which is what is pooled
        assert len({row[-1] for row in oracle.tokenizer(TEXTS)["input_ids"]}) == 1
    served = served_as_built(serve, tmp_path / "model", attention=attention)
    assert_close(vectors(served.ask({"texts": TEXTS})[0]), oracle.encode(TEXTS))


@pytest.mark.parametrize("attention", ["auto", "padded"])
def test_windows_shorter_than_the_texts(serve: Serve, tmp_path: Path, attention: str) -> None:
    oracle = sentence_transformer(tmp_path / "model", "modernbert", "cls")
    window = oracle[0].config.sliding_window
    assert window * 2 < max(len(row) for row in oracle.tokenizer(TEXTS)["input_ids"])
    served = served_as_built(serve, tmp_path / "model", attention=attention)
    assert_close(vectors(served.ask({"texts": TEXTS})[0]), oracle.encode(TEXTS))
