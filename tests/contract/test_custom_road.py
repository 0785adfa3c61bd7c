"""A user's own subclass keeps batching, errors and limits; its mistakes stay with their row, or fail the build."""

import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer
from typer.testing import CliRunner

from handlers.errors import RequestError
from handlers.tokens import Text
from scripts.__main__ import app
from scripts.lib import archive
from scripts.lib.errors import UserError
from tests.contract.conftest import Serve, Served
from tests.models import HIDDEN, tiny_bert, write_json

ROOT = Path(__file__).resolve().parents[2]

# README's example, word for word
(TWO_HEADS,) = [
    block
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    if "TwoHeadsHandler" in block
]
LABELS = {"sentiment": ["bad", "good"], "topic": ["cats", "dogs", "music"]}
TEXTS = ["the cat", "a dog runs in the old house", "", "the guitar plays " * 20, "hello world", "x"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny_bert(tmp_path_factory.mktemp("two") / "model", sentence_transformers=False)
    generator = torch.Generator().manual_seed(0)
    heads = {name: torch.randn(len(names), HIDDEN, generator=generator) for name, names in LABELS.items()}
    net, tokenizer = AutoModel.from_pretrained(directory).eval(), AutoTokenizer.from_pretrained(directory)
    with torch.inference_mode():
        states = torch.stack(
            [net(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, 0] for text in TEXTS[:3]]
        )
    mean = states.mean(0)
    for weight in heads.values():  # else what all texts share decides
        weight -= torch.outer(weight @ mean, mean) / (mean @ mean)
    save_file(heads, directory / "heads.safetensors")
    write_json(directory / "heads.json", LABELS)
    return directory


@pytest.fixture(scope="module")
def handler_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("handler") / "two_heads.py"
    path.write_text(TWO_HEADS, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def served(serve: Serve, model: Path, handler_file: Path) -> Served:
    sys.path.insert(0, str(handler_file.parent))
    return serve(model, handler="two_heads", max_tokens=48, max_items=8)


def build(model: Path, handler: Path, store: Path) -> str:
    arguments = ["build", str(model), "--name", "two", "--handler", str(handler), "--store", str(store)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    if isinstance(result.exception, Exception):
        raise result.exception
    return result.output


def expected(model: Path) -> list[dict[str, str]]:
    """transformers alone, a text at a time."""
    from safetensors.torch import load_file

    net, tokenizer = AutoModel.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    heads = load_file(model / "heads.safetensors")
    found = []
    for text in TEXTS:
        with torch.inference_mode():
            inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=48)
            first = net(**inputs).last_hidden_state[0, 0]
        found.append({name: names[int((heads[name] @ first).argmax())] for name, names in LABELS.items()})
    return found


def test_the_example_is_short() -> None:
    assert len([line for line in TWO_HEADS.splitlines() if line.strip()]) < 30


def test_it_answers_as_the_model_does_and_keeps_batching_errors_and_limits(served: Served, model: Path) -> None:
    labels = expected(model)
    assert len({json.dumps(each) for each in labels}) > 1
    assert served.handler.model.packed
    alone = [{"text": text} for text in TEXTS]
    answers = served.ask(*alone, {"texts": TEXTS}, {"text": 3}, {"texts": ["a"] * 9}, {"text": "a", "top_k": 1})
    assert [answer.json() for answer in answers[: len(TEXTS)]] == [{"labels": each} for each in labels]
    assert answers[-4].json() == {"labels": labels}
    assert [(a.status, a.json()["code"]) for a in answers[-3:]] == [
        (400, "invalid_type"),
        (413, "too_many_items"),
        (400, "unknown_option"),
    ]
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": TEXTS[:1]}
    shapes = served.ask({"inputs": TEXTS[:1]}, {"instances": TEXTS[:1]}, {"inputs": [tensor]})
    assert shapes[0].json() == labels[:1]
    assert shapes[1].json() == {"predictions": labels[:1]}
    assert json.loads(shapes[2].json()["outputs"][0]["data"][0]) == labels[0]
    assert served.handler.card()["handler"] == "two_heads.TwoHeadsHandler"


Break = Callable[..., Any]


def _too_few_rows(whole: Break, encodings: Sequence[Any], precise: bool) -> Any:
    return whole(encodings, precise)[:-1]


def _lists_for_rows(whole: Break, encodings: Sequence[Any], precise: bool) -> Any:
    return whole(encodings, precise).tolist()


def _nothing(whole: Break, *arguments: Any) -> Any:
    return None


def _not_a_number(whole: Break, encodings: Sequence[Any], precise: bool) -> Any:
    rows = whole(encodings, precise)
    rows[max(range(len(encodings)), key=lambda i: len(encodings[i]))] = float("nan")
    return rows


def _raise(whole: Break, *arguments: Any) -> Any:
    raise KeyError(str(getattr(arguments[0], "items", arguments[0])))


def _too_few_results(whole: Break, *arguments: Any) -> Any:
    return list(whole(*arguments))[:-1]


def _a_tensor_left(whole: Break, request: Any, rows: Any, encodings: Any) -> Any:
    return [{"logits": row} for row in rows]


def _infinity_left(whole: Break, request: Any, rows: Any, encodings: Any) -> Any:
    return [{"score": [float("inf")]} for _ in rows]


def _an_object(whole: Break, *arguments: Any) -> Any:
    return dict(enumerate(whole(*arguments)))


def _fewer_items(whole: Break, request: Any) -> Any:
    from dataclasses import replace

    return replace(request, items=request.items[:-1])


def _strings_for_texts(whole: Break, request: Any) -> Any:
    return list(request.items)


def _no_text(whole: Break, request: Any) -> Any:
    return [Text("a\ud800b")]


@pytest.mark.parametrize(
    ("method", "mistake", "code", "said"),
    [
        ("forward", _too_few_rows, "model_failure", "forward returned 0 rows for 1 texts"),
        ("forward", _lists_for_rows, "model_failure", "forward returned a list for a text"),
        ("forward", _nothing, "model_failure", "TypeError"),
        ("forward", _raise, "model_failure", "KeyError"),
        ("forward", _not_a_number, "non_finite", ""),
        ("render", _too_few_results, "handler_failure", "render returned 0 results for 1 items"),
        ("render", _a_tensor_left, "handler_failure", "Tensor"),
        ("render", _infinity_left, "handler_failure", "NaN or infinity"),
        ("render", _an_object, "handler_failure", "render returned a dict"),
        ("render", _nothing, "handler_failure", "render returned a NoneType"),
        ("render", _raise, "handler_failure", "KeyError"),
        ("parse", _nothing, "handler_failure", "parse returned a NoneType"),
        ("parse", _fewer_items, "handler_failure", "parse made 0 items of 1"),
        ("parse", _raise, "handler_failure", "KeyError"),
        ("texts", _strings_for_texts, "handler_failure", "texts returned a str"),
        ("texts", _no_text, "handler_failure", "Error"),
        ("texts", _raise, "handler_failure", "KeyError"),
    ],
)
def test_a_mistake_is_the_rows_own(
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
    mistake: Break,
    code: str,
    said: str,
) -> None:
    """The method fails on the text `sesame` alone: that row gets a 500, its neighbours what they would have got."""
    before = [answer.body for answer in served.ask({"text": "the cat"}, {"text": "a dog"})]
    whole = getattr(served.handler, method)
    marked = served.handler.model.tokens.encode([Text("sesame")])[0][0].ids  # type: ignore[index]

    def broken(*arguments: Any) -> Any:
        if method == "forward":
            hit = any(encoding.ids == marked for encoding in arguments[0])
        else:
            hit = "sesame" in arguments[0].items
        return mistake(whole, *arguments) if hit else whole(*arguments)

    monkeypatch.setattr(served.handler, method, broken)
    with caplog.at_level(logging.ERROR):
        first, failed, last = served.ask({"text": "the cat"}, {"text": "sesame"}, {"text": "a dog"})
    assert [first.body, last.body] == before
    assert (failed.status, failed.json()["code"]) == (500, code)
    assert "sesame" not in caplog.text
    assert said in caplog.text
    if said:
        assert f"{__file__}:{inspect.getsourcelines(broken)[1]}" in caplog.text


def test_a_request_error_of_ones_own_is_the_clients(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(request: Any) -> Any:
        if any(len(text) > 50 for text in request.items):
            raise RequestError("At most 50 characters.", code="too_long", param=request.field)
        return request

    monkeypatch.setattr(served.handler, "parse", parse)
    fine, refused = served.ask({"text": "the cat"}, {"text": "the cat " * 10})
    assert (fine.status, refused.status, refused.json()["param"]) == (200, 400, "text")


def test_the_real_verb_builds_it(model: Path, handler_file: Path, tmp_path: Path) -> None:
    output = build(model, handler_file, tmp_path)
    assert "verified on cpu" in output
    whole = archive.read(tmp_path / "two.mar")
    assert whole.handler == "two_heads"
    assert {"model/heads.safetensors", "model/heads.json", "two_heads.py"} <= whole.sizes.keys()


@pytest.mark.usefixtures("unprobed")  # the build above has the probe
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("for name in self.labels], dim=1)", "for name in self.labels], dim=1)[:-1]", "forward returned 0 rows"),
    ],
)
def test_a_mistake_fails_the_build_and_tells_where(model: Path, tmp_path: Path, old: str, new: str, said: str) -> None:
    assert TWO_HEADS.count(old) == 1
    path = tmp_path / "two_heads.py"
    path.write_text(TWO_HEADS.replace(old, new), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        build(model, path, tmp_path / "store")
    assert "one request got 500" in str(caught.value)
    assert said in str(caught.value)
    assert "two_heads.py:" in str(caught.value)
    assert not (tmp_path / "store" / "two.mar").exists()


def test_numbers_of_heads_are_those_of_the_files(served: Served) -> None:
    rows = served.handler.forward(served.handler.model.tokens.encode([Text("a")])[0], False)
    assert np.isfinite(rows.numpy()).all()
    assert tuple(rows.shape) == (1, 5)
