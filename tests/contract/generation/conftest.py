"""Generation archives in the test's process, behind the frontend of tests/contract/frontend.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.contract.conftest import Serve
from tests.contract.frontend import Frontend
from tests.generation_models import Oracle, tiny_llama

Start = Callable[..., Frontend]


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def oracle(directory: Path) -> Oracle:
    return Oracle(directory)


@pytest.fixture(scope="module")
def start(serve: Serve) -> Any:
    """start(model directory, **handler settings) → Frontend; its engine ends with the module."""
    made = []

    def make(model: Path, **settings: Any) -> Frontend:
        defaults = {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 48, "threads": 1}
        served = serve(model, handler="handlers.generation.handler", task="generation", **(defaults | settings))
        made.append(Frontend(served.service))
        return made[-1]

    yield make
    for frontend in made:
        frontend.handler.engine.stop()
        if frontend.handler.grammars is not None:
            frontend.handler.grammars.stop()


@pytest.fixture(scope="module")
def frontend(start: Start, directory: Path) -> Frontend:
    return start(directory)
