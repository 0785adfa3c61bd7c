"""scripts.lib.source: what MODEL can be, and what a mistake is told."""

import time
from pathlib import Path

import pytest

from scripts.lib import source
from scripts.lib.errors import UserError


def test_a_directory_is_named_without_its_path(tmp_path: Path) -> None:
    (tmp_path / "here" / "my model").mkdir(parents=True)
    found = source.resolve(str(tmp_path / "here" / "my model"))
    assert found == source.Source(tmp_path / "here" / "my model", "my model")


def test_bundled() -> None:
    found = source.resolve("bundled:minilm")
    assert found.name == "bundled:minilm"
    assert (found.directory / "config.json").is_file()
    with pytest.raises(UserError, match="no model is bundled") as error:
        source.resolve("bundled:maxilm")
    assert "bundled:minilm" in error.value.hint


def test_only_the_hub_has_revisions(tmp_path: Path) -> None:
    for model in ("bundled:minilm", str(tmp_path)):
        with pytest.raises(UserError, match="has no revisions, and v2 is asked for"):
            source.resolve(model, revision="v2")


def test_neither_directory_nor_hub_id(tmp_path: Path) -> None:
    for model in ("./models/minilm", "minilm", "", "a/b/c", "https://example.com/x"):
        with pytest.raises(UserError, match="no directory"):
            source.resolve(model)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match="is a file"):
        source.resolve(str(tmp_path / "model.safetensors"))


def test_a_hub_id_without_a_network_fails_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A snapshot of which only a part was downloaded must not pass for the model
    partial = tmp_path / "hub" / "models--some--model" / "snapshots" / ("0" * 40)
    partial.mkdir(parents=True)
    (partial / "config.json").write_text("{}")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    start = time.monotonic()
    with pytest.raises(UserError, match="there is no directory some/model, and the hub cannot be reached"):
        source.resolve("some/model")
    assert time.monotonic() - start < 15
