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
import yaml
from sentence_transformers import SentenceTransformer

from scripts.lib import service
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


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """Several threads only get into each other's way on models of this size, ten times over on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """serve(model directory, handler=module, **handler settings) → Served: what an extracted archive holds, loaded.

    `members` are files of the archive beside these: name → content.
    """
    cwd, path = Path.cwd(), list(sys.path)

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
        config = {"responseTimeout": response_timeout, "handler": {"task": handler.rpartition(".")[2], **settings}}
        (directory / "model-config.yaml").write_text(yaml.safe_dump(config))
        try:
            return Served(directory)
        finally:
            os.chdir(cwd)
            sys.path[:] = path
            torch.set_num_threads(1)

    return make


@pytest.fixture(scope="session")
def served(serve: Serve, tiny_model: Path) -> Served:
    return serve(tiny_model, **SETTINGS)


@pytest.fixture(scope="session")
def oracle(tiny_model: Path) -> SentenceTransformer:
    return SentenceTransformer(str(tiny_model), device="cpu")
