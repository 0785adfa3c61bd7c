"""Fixtures that several test folders share."""

import os
import signal
from pathlib import Path

import pytest

# Nothing in these tests may reach a hub: a model that is not on disk must fail at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# xdist tells its workers a terminal's width; what the commands print without a terminal is not wrapped to one.
os.environ.pop("COLUMNS", None)
# Under nohup HUP is ignored, in a script's background INT is; children inherit that, and the commands respect it: the
# tests of both need the default.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build leaves out the process that loads the archive, which takes seconds; the bytes are still checked."""
    monkeypatch.setattr("scripts.lib.verification.answer_one", lambda *_, **__: {"card": {}})


@pytest.fixture
def unprobed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build leaves out the process that imports a user's handler, which takes seconds; its text is still checked."""
    monkeypatch.setattr("scripts.lib.user_handler.check_import", lambda *_: None)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny sentence-transformers BERT (mean pooling, normalised). Read only: copy it to change it."""
    from tests.models import tiny_bert

    return tiny_bert(tmp_path_factory.mktemp("models") / "tiny-bert")


@pytest.fixture(scope="session")
def tiny_archive(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of that model, `tiny` 1.0. Read only: copy it to change it."""
    from scripts.lib import archive
    from scripts.lib.recipe import Order, prepare
    from scripts.lib.source import resolve

    path = tmp_path_factory.mktemp("store") / "tiny.mar"
    order = Order(source=resolve(str(tiny_model)), name="tiny", version="1.0")
    recipe = prepare(order, tmp_path_factory.mktemp("work"))
    archive.write(path, recipe.contents, recipe.members)
    return path
