"""Archives loaded through TorchServe's own TsModelLoader and Service, in the test's process."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
import yaml
from sentence_transformers import SentenceTransformer
from typer.testing import CliRunner

from scripts.build import build
from scripts.lib import archive, service
from scripts.lib.archive import Archive
from scripts.lib.service import Answer, Body


class Served:
    """An archive as a worker runs it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = directory / "model"
        self.service = service.load(directory)
        self.handler: Any = self.service._entry_point.__self__

    def ask(self, *bodies: Any, route: str = "") -> list[Answer]:
        """Send JSON values, or Body objects, as one batch."""
        headers = {"url_path": route} if route else {}
        return service.predict(
            self.service,
            [b if _is_raw(b) else Body(json.dumps(b).encode(), headers=headers) for b in bodies],
        )


def _is_raw(body: Any) -> bool:
    return isinstance(body, Body) or (isinstance(body, list) and bool(body) and isinstance(body[0], Body))


SETTINGS = {"max_tokens": 48, "normalize": True, "pooling": "mean"}
# Several threads only get into each other's way on models of this size; small micro-batches make a short warm-up
SMALL = {"threads": 1, "max_batch_items": 32}
MIXED = ["the cat", "", "a dog runs in the old house and eats " * 6, "hello world", "THE Cat", "ünïcödé ☃", "x"]


def vectors(answer: Answer) -> np.ndarray[Any, Any]:
    """The vectors of an answer of any shape, (texts, dimension)."""
    assert answer.status == 200, answer.body
    content = answer.json()
    if isinstance(content, dict):
        if "data" in content:
            content = [item["embedding"] for item in content["data"]]
        else:
            content = content.get("embeddings") or content.get("predictions") or [content["embedding"]]
    return np.array(content, dtype=np.float32)


def assert_close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


Serve = Callable[..., Served]
Build = Callable[..., Archive]
APP = typer.Typer(pretty_exceptions_enable=False)
APP.command()(build)


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """For the oracles, as SMALL for the archives."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """serve(model directory, handler=module, **handler settings) → Served: what an extracted archive holds, loaded.

    `members` are files of the archive beside these: name → content.
    """

    def make(
        model: Path,
        *,
        handler: str = "handlers.embedding",
        response_timeout: int = 120,
        members: Mapping[str, bytes] | None = None,
        **settings: Any,
    ) -> Served:
        directory = tmp_path_factory.mktemp("archive")
        (directory / "model").symlink_to(model)
        for name, content in (members or {}).items():
            (directory / name).write_bytes(content)
        manifest = {
            "runtime": "python",
            "model": {
                "modelName": "tiny",
                "modelVersion": "1.0",
                "handler": handler,
                "configFile": "model-config.yaml",
            },
        }
        (directory / "MAR-INF").mkdir()
        (directory / "MAR-INF" / "MANIFEST.json").write_text(json.dumps(manifest))
        small = {} if handler.startswith("handlers.generation") else SMALL  # a batch there is a step of the engine
        own = {"task": handler.rpartition(".")[2], **small, **settings}
        config = {"responseTimeout": response_timeout, "handler": own}
        (directory / "model-config.yaml").write_text(yaml.safe_dump(config))
        return loaded(directory)

    return make


def loaded(directory: Path) -> Served:
    """An extracted archive, loaded; what that changes in the process is put back."""
    cwd, path = Path.cwd(), list(sys.path)
    try:
        return Served(directory)
    finally:
        os.chdir(cwd)
        sys.path[:] = path
        torch.set_num_threads(1)


@pytest.fixture
def build_archive(tmp_path: Path, unverified: None) -> Build:
    """build_archive(model directory, *options) → the archive that `batchserve build` makes of it.

    It answers its own sample: that is tried in this process; one in a clean process takes ten seconds.
    """

    def make(model: Path, *options: str) -> Archive:
        arguments = [str(model), "--name", "m", "--store", str(tmp_path / "store"), *options]
        result = CliRunner().invoke(APP, [*arguments, "--threads", "1"], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        archive.extract(tmp_path / "store" / "m.mar", tmp_path / "extracted")
        served = loaded(tmp_path / "extracted")
        (answer,) = served.ask(served.handler.sample())
        assert answer.status == 200, answer.body
        return archive.read(tmp_path / "store" / "m.mar")

    return make


@pytest.fixture(scope="session")
def served(serve: Serve, tiny_model: Path) -> Served:
    return serve(tiny_model, **SETTINGS)


@pytest.fixture(scope="session")
def oracle(tiny_model: Path) -> SentenceTransformer:
    return SentenceTransformer(str(tiny_model), device="cpu")
