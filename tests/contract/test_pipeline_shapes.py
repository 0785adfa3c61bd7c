"""What Hugging Face's clients get for one input and for a list of one. Oracle: transformers' pipeline."""

from pathlib import Path
from typing import Any

import pytest
from transformers import pipeline

from tests.contract.conftest import Serve
from tests.families import family


def rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [rounded(entry) for entry in value]
    return {key: pytest.approx(entry, abs=1e-5) if key == "score" else entry for key, entry in value.items()}


def test_labels_of_one_input_are_nested_as_the_pipeline_nests_them(serve: Serve, tmp_path: Path) -> None:
    model = family(tmp_path / "m", "bert", head="sequence-classification", labels=["bad", "good", "unsure"])
    served = serve(model, handler="handlers.classification", max_tokens=48)
    oracle = pipeline("text-classification", str(model), device="cpu")
    asked: list[tuple[Any, dict[str, Any]]] = [
        (inputs, options) for inputs in ("the cat", ["the cat"]) for options in ({}, {"top_k": 1}, {"top_k": None})
    ]
    answers = served.ask(*({"inputs": inputs, "parameters": options} for inputs, options in asked))
    for (inputs, options), answer in zip(asked, answers, strict=True):
        assert answer.json() == rounded(oracle(inputs, **options)), (inputs, options)
