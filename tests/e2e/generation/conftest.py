"""A tiny decoder behind a real TorchServe."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
import requests

from scripts.lib import archive
from scripts.lib.recipe import Order, prepare
from scripts.lib.scrape import Snapshot
from scripts.lib.server import TorchServe
from scripts.lib.source import Source
from tests.e2e.conftest import serving_mapping, start_server
from tests.generation_models import Oracle, tiny_llama

NAME = "tiny"
Start = Callable[..., TorchServe]


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "llama", positions=4096)


@pytest.fixture(scope="session")
def oracle(directory: Path) -> Oracle:
    return Oracle(directory)


@pytest.fixture(scope="module")
def start(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """start(slots, queue, **handler settings) → a server of the model; it ends with the module."""
    with ExitStack() as servers:

        def make(slots: int, queue: int, **settings: Any) -> TorchServe:
            store = tmp_path_factory.mktemp("store")
            order = Order(source=Source(directory, NAME), name=NAME, version="1.0", overrides=settings)
            recipe = prepare(order, tmp_path_factory.mktemp("work"))
            archive.write(store / f"{NAME}.mar", recipe.contents, recipe.members)
            model = {"archive": f"{NAME}.mar", "version": "1.0", "batch_size": slots, "max_batch_delay": 1}
            mapping = serving_mapping(store, {NAME: {**model, "queue": queue}})
            return servers.enter_context(start_server(tmp_path_factory.mktemp(NAME), mapping))

        yield make


@pytest.fixture
def client(server: TorchServe) -> openai.OpenAI:
    key = server.headers()["Authorization"].removeprefix("Bearer ")
    return openai.OpenAI(base_url=f"{url(server)}/v1", api_key=key, max_retries=0, timeout=60)


def url(server: TorchServe) -> str:
    return f"{server.urls.inference}/predictions/{NAME}/1.0"


def stats(server: TorchServe) -> dict[str, Any]:
    """How the engine stands; it takes a slot."""
    answer = requests.get(f"{url(server)}/describe", headers=server.headers(), timeout=30)
    found: dict[str, Any] = answer.json()["stats"]
    return found


def running(server: TorchServe, count: int) -> None:
    """Wait until the engine runs so many sequences."""
    deadline = time.monotonic() + 20
    while stats(server)["running"] < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def rests(server: TorchServe, seconds: float) -> bool:
    """Whether the engine holds nothing any more, within some seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = stats(server)
        if found["running"] == found["waiting"] == found["used_blocks"] == 0:
            return True
        time.sleep(0.1)
    return False


def metrics(server: TorchServe) -> Snapshot:
    return Snapshot.parse(requests.get(f"{server.urls.metrics}/metrics", timeout=10).text)
