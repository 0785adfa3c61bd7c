"""The yardstick runs in a process of its own, answers what was asked, and never outlives its context."""

import json
from pathlib import Path

import psutil
import pytest
import torch

from scripts.lib.offline import Offline, OfflineError, _library
from tests.families import family

pytest.importorskip("sentence_transformers")


def test_it_measures_and_ends(tiny_model: Path) -> None:
    with Offline(tiny_model, "float32", threads=1) as offline:
        pid = offline.pid
        assert offline.run(["one text", "another"] * 5) > 0
        single = offline.single(["one text", "another"])
        assert single.forward_ms > 0
        assert single.encode_ms > 0
        one, other, again = offline.values(["one text", "something else entirely", "one text"])
        assert one == pytest.approx(again, abs=1e-6)
        assert one != pytest.approx(other, abs=1e-3)
        assert sum(x * x for x in one) == pytest.approx(1.0, abs=1e-5)
    assert not psutil.pid_exists(pid)
    with pytest.raises(OfflineError, match="isn't running"):
        offline.run(["late"])


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(OfflineError, match="could not load the model"), Offline(tmp_path, "float32", threads=1):
        pytest.fail("entered without a model")


@pytest.mark.parametrize(
    ("task", "name", "head"),
    [
        ("reranking", "bert", "sequence-classification"),
        ("classification", "bert", "sequence-classification"),
        ("token_classification", "bert", "token-classification"),
        ("seq2seq", "t5", "seq2seq-lm"),
    ],
)
def test_every_tasks_library_answers_what_json_can_carry(tmp_path: Path, task: str, name: str, head: str) -> None:
    labels = ["LABEL_0"] if task == "reranking" else None
    model = family(tmp_path / "model", name, head=head, labels=labels)
    library = _library(str(model), torch.float32, task)
    inputs = [("a query", "a text")] * 2 if task == "reranking" else ["a text of some words"] * 2
    values = json.loads(json.dumps(library.values(inputs)))
    assert len(values) == 2
    assert values[0] == values[1]
    assert values[0] or task == "seq2seq"
