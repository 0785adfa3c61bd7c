"""A real TorchServe for the tests of this folder, with trivial handlers."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from scripts.lib import properties
from scripts.lib.addresses import free_ports
from scripts.lib.server import TorchServe
from scripts.lib.serving import PORT_FIELDS, Serving
from tests.e2e.archives import write_archive

CLI = [sys.executable, "-m", "scripts"]
REPOSITORY = Path(__file__).resolve().parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here is one of a real server."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)


def serving_mapping(store: Path, models: Mapping[str, Any], **server: Any) -> dict[str, Any]:
    """A deployment on free ports."""
    ports = dict(zip(PORT_FIELDS, free_ports(), strict=True))
    return {"server": {**ports, "model_store": str(store), **server}, "models": dict(models)}


def start_server(directory: Path, mapping: Mapping[str, Any], **options: Any) -> TorchServe:
    """A server for a deployment, not yet started; its files go into `directory`."""
    path = directory / "config.properties"
    path.write_text(properties.render(Serving.from_mapping(mapping, "test")), encoding="ascii")
    return TorchServe(path, work_dir=directory / "state", **options)


@pytest.fixture(scope="session")
def echo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchServe]:
    """Two models of a trivial handler: `echo` with two workers, `other`, which the manifest calls something else.

    It is started as a hostile environment would: PYTHONPATH leads to another handler of the same name.
    """
    directory = tmp_path_factory.mktemp("echo")
    store = directory / "model store"
    store.mkdir()
    write_archive(store / "echo.mar")
    write_archive(store / "other one.mar", name="something_else", version="2.1", config="responseTimeout: 30\n")
    models = {
        "echo": {"archive": "echo.mar", "version": "1.0", "workers": 2, "batch_size": 16, "max_batch_delay": 3,
                 "queue": 321, "response_timeout": 45, "startup_timeout": 55},
        "other": {"archive": "other one.mar", "version": "2.1", "batch_size": 4, "max_batch_delay": 50, "queue": 321,
                  "response_timeout": 30},
    }  # fmt: skip
    hostile = directory / "hostile"
    hostile.mkdir()
    (hostile / "trivial_handler.py").write_text("raise RuntimeError('from PYTHONPATH')")
    server = start_server(directory, serving_mapping(store, models))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(hostile))
        server.start()
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()
