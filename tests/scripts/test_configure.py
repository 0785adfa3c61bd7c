"""`batchserve configure`: what it writes, and what it refuses with the archive in hand."""

import json
import os
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import typer
from ruamel.yaml import YAML
from typer.testing import CliRunner, Result

from scripts.configure import configure
from scripts.lib import properties
from scripts.lib.errors import UserError
from tests.e2e.archives import write_archive

app = typer.Typer()
app.command()(configure)

OURS = "responseTimeout: 120\nstartupTimeout: 240\nhandler: {task: embedding, max_response_bytes: 6553500}\n"


class Desk:
    """A directory with a serving.yaml and a model store."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = path / "model_store"
        self.store.mkdir()

    def declare(self, server: dict[str, Any] | None = None, **models: dict[str, Any]) -> None:
        full = {name: {"archive": f"{name}.mar", "version": "1.0", **model} for name, model in models.items()}
        with (self.path / "serving.yaml").open("w") as file:
            YAML().dump({"server": server or {}, "models": full}, file)

    def configure(self, *options: str) -> Result:
        return CliRunner().invoke(app, ["--serving", "serving.yaml", "--output", "config/config.properties", *options])

    def refusal(self) -> str:
        result = self.configure()
        assert isinstance(result.exception, UserError), result.output
        assert not (self.path / "config" / "config.properties").exists()
        return str(result.exception)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.chdir(tmp_path)
    return Desk(tmp_path)


def test_it_writes_the_file_and_says_how_to_use_it(desk: Desk) -> None:
    write_archive(desk.store / "minilm.mar", config=OURS)
    desk.declare(minilm={"workers": 2})
    result = desk.configure()
    assert result.exit_code == 0
    assert "wrote config/config.properties" in result.output
    assert "minilm 1.0: minilm.mar, 2 workers, batches of at most 32 after 2 ms, queue 1000" in result.output
    assert "torchserve --start --ncs --ts-config config/config.properties --model-store model_store" in result.output
    written = properties.load(desk.path / "config" / "config.properties")
    assert written["model_store"] == str(desk.store)
    assert properties.models(written)["minilm"]["1.0"]["minWorkers"] == 2


def test_the_name_in_the_manifest_may_differ(desk: Desk) -> None:
    write_archive(desk.store / "minilm.mar", name="called_otherwise", config=OURS)
    desk.declare(minilm={})
    assert desk.configure().exit_code == 0


def test_a_second_time_replaces_the_file(desk: Desk) -> None:
    write_archive(desk.store / "minilm.mar")
    for workers in (1, 3):
        desk.declare(minilm={"workers": workers})
        assert desk.configure().exit_code == 0
    assert '"minWorkers":3' in (desk.path / "config" / "config.properties").read_text()
    assert [path.name for path in (desk.path / "config").iterdir()] == ["config.properties"]


@pytest.mark.parametrize(
    ("config", "model", "message"),
    [
        ("batchSize: 8\n", {}, "batch_size: 32 is declared, but the archive's model-config.yaml has batchSize: 8"),
        ("maxBatchDelay: 5\n", {}, "max_batch_delay: 2 is declared, but the archive's"),
        ("jobQueueSize: 5\n", {}, "queue: 1000 is declared, but the archive's"),
        ("minWorkers: 1\nmaxWorkers: 4\n", {}, "workers: 1 is declared, but the archive's"),
        ("responseTimeout: 60\n", {"response_timeout": 5}, "response_timeout: 5 is declared, but the archive's"),
        # Any model-config.yaml sets both timeouts, if only to their default.
        ("x: 1\n", {"response_timeout": 5}, "has responseTimeout: 120, which wins"),
        ("continuousBatching: true\n", {"workers": 2}, "workers: must be 1"),
    ],
)
def test_an_archive_that_would_win_is_refused(desk: Desk, config: str, model: dict[str, Any], message: str) -> None:
    write_archive(desk.store / "minilm.mar", config=config)
    desk.declare(minilm=model)
    assert f"models.minilm.{message}" in desk.refusal() or message in desk.refusal()


@pytest.mark.parametrize(
    ("config", "model"),
    [
        ("batchSize: 8\nmaxBatchDelay: 3\n", {"batch_size": 8, "max_batch_delay": 3}),
        ("minWorkers: 1\n", {"workers": 2}),
        ("maxBatchDelay: 0\nbatchSize: many\nbatch_size: 9\n", {}),
        ("jobQueueSize: 5\n", {"queue": 5, "batch_size": 5}),
        ("responseTimeout: 60\n", {"response_timeout": 60}),
    ],
)
def test_an_archive_that_changes_nothing_is_taken(desk: Desk, config: str, model: dict[str, Any]) -> None:
    write_archive(desk.store / "minilm.mar", config=config)
    desk.declare(minilm=model)
    result = desk.configure()
    assert result.exit_code == 0, result.exception


def test_a_version_that_is_not_the_archives(desk: Desk) -> None:
    write_archive(desk.store / "minilm.mar", version="1.0")
    desk.declare(minilm={"version": "1"})
    assert 'models.minilm.version: "1" is declared and minilm.mar is "1.0"' in desk.refusal()


def test_missing_and_damaged_archives_are_all_named(desk: Desk) -> None:
    whole = write_archive(desk.store / "whole.mar").read_bytes()
    (desk.store / "cut.mar").write_bytes(whole[: len(whole) // 2])
    (desk.store / "text.mar").write_text("hello")
    desk.declare(cut={}, text={}, gone={})
    refusal = desk.refusal()
    assert re.search(r"models.cut.archive: .*truncated", refusal)
    assert re.search(r"models.text.archive: .*not a model archive", refusal)
    assert re.search(r"models.gone.archive: there is no archive", refusal)


def test_no_model_store(desk: Desk) -> None:
    desk.declare({"model_store": "elsewhere"}, minilm={})
    assert "model store elsewhere: no such directory" in desk.refusal()


def test_a_response_limit_below_the_handlers(desk: Desk) -> None:
    write_archive(desk.store / "minilm.mar", config=OURS)
    desk.declare({"max_response_size": 2000}, minilm={})
    assert "6553500 bytes (max_response_bytes) and server.max_response_size is 2000" in desk.refusal()


def test_requirements_are_installed_by_name_only(desk: Desk) -> None:
    write_archive(desk.store / "minilm.mar", requirements="emoji\n")
    desk.declare(minilm={})
    assert "models.minilm.install_requirements: the archive has a requirements.txt" in desk.refusal()
    desk.declare(minilm={"install_requirements": True})
    assert desk.configure().exit_code == 0


def test_different_queues(desk: Desk) -> None:
    for name in ("a", "b"):
        write_archive(desk.store / f"{name}.mar")
    desk.declare(a={"queue": 100}, b={"queue": 200})
    assert "the models' queues differ (a: 100, b: 200)" in desk.refusal()


def test_an_output_that_cannot_be_written(desk: Desk) -> None:
    write_archive(desk.store / "minilm.mar")
    desk.declare(minilm={})
    (desk.path / "config").write_text("a file where the directory should be")
    result = desk.configure()
    assert isinstance(result.exception, UserError)
    assert "cannot be written" in str(result.exception)
    (desk.path / "config").unlink()
    (desk.path / "config" / "config.properties").mkdir(parents=True)
    result = desk.configure()
    assert isinstance(result.exception, UserError)
    assert [path.name for path in (desk.path / "config").iterdir()] == ["config.properties"]


def test_the_file_says_what_wrote_it_and_how_to_use_it(desk: Desk) -> None:
    write_archive(desk.store / "minilm.mar")
    desk.declare(minilm={})
    assert desk.configure("--output", "my ströme/a.properties").exit_code == 0
    text = (desk.path / "my ströme" / "a.properties").read_text("ascii")
    assert text.startswith("# Written by batchserve configure from serving.yaml: change that, not this file.\n")
    assert "# torchserve --start --ncs --ts-config 'my str\\xf6me/a.properties' --model-store model_store\n" in text


def test_only_its_owner_reads_a_file_that_may_hold_secrets(desk: Desk) -> None:
    write_archive(desk.store / "minilm.mar")
    path = desk.path / "config" / "config.properties"
    before = os.umask(0o022)
    try:
        desk.declare(minilm={})
        assert desk.configure().exit_code == 0
        assert path.stat().st_mode & 0o777 == 0o644
        desk.declare({"extra": {"keystore_pass": "secret"}}, minilm={})
        result = desk.configure()
        assert result.exit_code == 0, result.exception
        assert path.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


@pytest.mark.parametrize("model", ["oops", None, []])
def test_a_crafted_manifest_is_refused(desk: Desk, model: object) -> None:
    with zipfile.ZipFile(desk.store / "minilm.mar", "w") as file:
        file.writestr("MAR-INF/MANIFEST.json", json.dumps({"model": model}))
    desk.declare(minilm={})
    assert "MANIFEST.json describes no model" in desk.refusal()
