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
# Under nohup HUP is ignored, children inherit that, and the commands respect it: the tests of HUP need the default.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build leaves out the process that loads the archive, which takes seconds; the bytes are still checked."""
    monkeypatch.setattr("scripts.lib.verification.answer_one", lambda *_, **__: {"card": {}})


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny sentence-transformers BERT (mean pooling, normalised). Read only: copy it to change it."""
    from tests.models import tiny_bert

    return tiny_bert(tmp_path_factory.mktemp("models") / "tiny-bert")
