"""Decoder-only models as archives: what is packed, what is refused and why."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.lib import archive, decoder, deployment, tree
from scripts.lib.errors import UserError
from scripts.lib.recipe import Order, prepare
from scripts.lib.serving import Serving
from scripts.lib.source import Source
from tests.generation_models import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "llama")


def order(model: Path, **options: Any) -> Order:
    return Order(source=Source(model, "tiny"), name="tiny", version="1.0", **options)


def test_a_decoder_is_packed_for_one_worker_of_the_continuous_mode(model: Path, tmp_path: Path) -> None:
    recipe = prepare(order(model, max_tokens=128, overrides={"attention": "auto", "dtype": "bfloat16"}), tmp_path)
    config = yaml.safe_load(recipe.contents[archive.CONFIG])
    assert config["continuousBatching"] is True
    assert (config["minWorkers"], config["maxWorkers"]) == (1, 1)
    assert "batchSize" not in config
    assert config["handler"] == {
        "task": "generation", "model": "model", "trust_remote_code": False, "max_model_len": 128, "dtype": "bfloat16"
    }  # fmt: skip
    manifest = json.loads(recipe.contents[archive.MANIFEST])
    assert manifest["model"]["handler"] == "handlers.generation.handler"
    assert {"handlers/generation/handler.py", "model/model.safetensors", "model/tokenizer.json"} <= set(recipe.contents)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": 513}, "513 tokens is not possible"),
        ({"overrides": {"pooling": ["cls"]}}, "--pooling is not for generation"),
        ({"overrides": {"attention": "packed"}}, "--attention is not for generation"),
        ({"overrides": {"page_size": 0}}, "page_size is 0"),
        ({"overrides": {"engine": "other"}}, "engine is 'other'"),
    ],
)
def test_what_is_not_possible_is_refused(model: Path, tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        prepare(order(model, **options), tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed")
def test_vllm_that_is_not_there_is_refused_at_build(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="vllm is not installed"):
        prepare(order(model, overrides={"engine": "vllm"}), tmp_path)


def test_what_is_for_decoders_is_not_for_encoders(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--page-size is not for embedding models"):
        prepare(order(tiny_model, overrides={"attention": "auto", "page_size": 16}), tmp_path)


def test_the_task_is_also_known_as_transformers_pipeline(model: Path) -> None:
    files = tree.walk(model)
    assert all(decoder.is_decoder(files, task) for task in ("auto", "generation", "text-generation"))
    assert not decoder.is_decoder(files, "embedding")


def test_a_model_without_a_chat_template_is_told(tmp_path: Path) -> None:
    files = tree.walk(tiny_llama(tmp_path / "plain", template=None))
    assert "no chat template" in decoder.read(files, max_tokens=None, trust_remote_code=False).notes[0]


def test_what_is_no_decoder_is_refused(tiny_model: Path) -> None:
    files = tree.walk(tiny_model)
    assert not decoder.is_decoder(files, "auto")
    with pytest.raises(UserError, match="no decoder-only language model"):
        decoder.read(files, max_tokens=None, trust_remote_code=False)


@pytest.mark.parametrize("workers", [1, 2])
def test_another_number_of_workers_is_refused_with_the_reason(model: Path, tmp_path: Path, workers: int) -> None:
    (tmp_path / "work").mkdir()
    recipe = prepare(order(model), tmp_path / "work")
    archive.write(tmp_path / "tiny.mar", recipe.contents, recipe.members)
    entry = {"archive": "tiny.mar", "version": "1.0", "workers": workers, "batch_size": 4, "queue": 10}
    serving = Serving.from_mapping({"server": {"model_store": str(tmp_path)}, "models": {"tiny": entry}}, "test")
    if workers == 1:
        assert list(deployment.check(serving)) == ["tiny"]
        return
    with pytest.raises(UserError, match=r"workers: must be 1.*several devices"):
        deployment.check(serving)
