"""Scores. Oracle: the functions of transformers' text-classification pipeline and torch.nn."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.pipelines import text_classification

from handlers import scores
from handlers.config import ACTIVATIONS

LOGITS = st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=6)


@given(LOGITS)
def test_functions_are_the_pipelines(logits: list[float]) -> None:
    array = np.array(logits, dtype=np.float32)
    for name in ("sigmoid", "softmax"):
        found = scores.FUNCTIONS[name](torch.from_numpy(array)).numpy()
        np.testing.assert_allclose(found, getattr(text_classification, name)(array), rtol=1e-5, atol=1e-7)
    assert scores.FUNCTIONS["none"](torch.from_numpy(array)).tolist() == array.tolist()


@pytest.mark.parametrize(
    ("problem_type", "labels", "function"),
    [
        (None, 1, "sigmoid"),
        (None, 3, "softmax"),
        ("regression", 1, "none"),
        ("regression", 3, "none"),
        ("single_label_classification", 1, "sigmoid"),
        ("single_label_classification", 3, "softmax"),
        ("multi_label_classification", 3, "sigmoid"),
    ],
)
def test_the_function_follows_the_problem(problem_type: str | None, labels: int, function: str) -> None:
    assert scores.default_function(SimpleNamespace(problem_type=problem_type, num_labels=labels)) == function


@given(st.sampled_from(ACTIVATIONS), LOGITS)
def test_activations_stay_finite_and_are_those_of_torch(name: str, logits: list[float]) -> None:
    rows = torch.tensor([logits, logits[::-1]])
    module = torch.nn.Softmax(dim=1) if name == "Softmax" else getattr(torch.nn, name)()
    found = scores.activation(name)(rows)
    assert torch.equal(found, module(rows))
    assert torch.isfinite(found).all()


@given(st.lists(st.sampled_from([0.1, 0.5, -2.0]), max_size=8))
def test_ties_stay_in_order(values: list[float]) -> None:
    entries = [{"index": i, "score": value} for i, value in enumerate(values)]
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert [entry["index"] for entry in scores.best_first(entries)] == expected


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=9), min_size=1, max_size=4), st.floats(width=32))
def test_no_label_is_longer_than_the_bound_on_an_answer(names: list[str], score: float) -> None:
    if not np.isfinite(score):
        return
    for name, most in zip(names, scores.labels_bytes(names), strict=True):
        entry = scores.labelled([name], [score])[0]
        content = json.dumps(entry, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(content) + 1 <= most
