"""Tiny encoder-decoders as archives, loaded once. Oracle: the model's `generate` on one text at a time."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from handlers.generator import Pace
from tests.contract.conftest import Serve, Served
from tests.corpus import SENTENCES
from tests.families import family

# One thread: two on a busy machine wait for each other at every small step
SETTINGS = {"max_tokens": 48, "threads": 1}
TEXTS = [*SENTENCES[:4], "", "x", " ".join(SENTENCES[4:7]), "ünïcödé ☃", " ".join(SENTENCES[:20])]
FAMILIES = ("t5", "bart", "marian", "pegasus")
PREFIX = "translate: "
TASKS = {
    "translation_en_to_de": {"prefix": PREFIX, "max_length": 12, "num_beams": 3, "early_stopping": True},
    "summarization": {"prefix": "summarize: ", "max_length": 9, "min_length": 4},
}

Generate = Callable[..., str]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("seq2seq")
    return {
        name: family(
            directory / name, name, head="seq2seq-lm", **({"task_specific_params": TASKS} if name == "t5" else {})
        )
        for name in FAMILIES
    }


@pytest.fixture(scope="session")
def everyone(serve: Serve, models: dict[str, Path]) -> dict[str, Served]:
    return {name: serve(models[name], handler="handlers.seq2seq", **SETTINGS) for name in FAMILIES}


@pytest.fixture(scope="session")
def t5(everyone: dict[str, Served]) -> Served:
    return everyone["t5"]


@pytest.fixture(scope="session")
def oracles(models: dict[str, Path]) -> dict[str, Generate]:
    return {name: oracle(models[name]) for name in FAMILIES}


def oracle(directory: Path) -> Generate:
    """A text and arguments of `generate`, and perhaps a seed → what the model writes, alone."""
    model = AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)

    @functools.cache
    def generate(text: str, seed: int = 0, **parameters: Any) -> str:
        inputs = tokenizer(text, truncation=True, max_length=SETTINGS["max_tokens"], return_tensors="pt")
        inputs.pop("token_type_ids", None)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            ids = model.generate(**inputs, **parameters)[0]
        found: str = tokenizer.decode(ids, skip_special_tokens=True)
        return found

    return generate


def together(served: Served) -> Pace:
    """A pace at which a step costs so much that all texts are written at once."""
    return replace(served.handler.generator.pace, step=1e6)
