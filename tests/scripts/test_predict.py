import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from handlers import embedding
from scripts.__main__ import app
from scripts.lib.errors import UserError


@pytest.fixture(autouse=True)
def _stay_put(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loading an archive changes the directory, the import path and torch's threads, as in a worker."""
    monkeypatch.chdir(Path.cwd())
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = dict(sys.modules)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    sys.modules.update({name: module for name, module in modules.items() if name.partition(".")[0] == "handlers"})


def test_a_list_of_bodies_is_one_batch(tiny_archive: Path, tmp_path: Path) -> None:
    bodies = tmp_path / "bodies.json"
    bodies.write_text(json.dumps([{"text": "the cat"}, {"texts": []}, {"inputs": ["a dog"]}]))
    result = CliRunner().invoke(app, ["predict", str(tiny_archive), str(bodies), "--full"])
    assert result.exit_code == 1, "one of the bodies is bad"
    assert "[0] 200" in result.stdout
    assert "[1] 400" in result.stdout
    assert "'texts' is an empty list" in result.stdout
    assert "[2] 200" in result.stdout
    line = next(line for line in result.stdout.splitlines() if line.startswith('{"embedding"'))
    assert len(json.loads(line)["embedding"]) == 32


def test_stdin_text_and_route(tiny_archive: Path) -> None:
    run = CliRunner()
    piped = run.invoke(app, ["predict", str(tiny_archive)], input='{"input": "the cat"}')
    assert piped.exit_code == 0
    assert '"object":"list"' in piped.stdout
    said = run.invoke(app, ["predict", str(tiny_archive), "--text", "the cat", "--text", "a dog"])
    assert said.exit_code == 0
    assert "[1] 200" in said.stdout
    routed = run.invoke(app, ["predict", str(tiny_archive), "--text", "x", "--route", "v1/nothing"])
    assert "[0] 404" in routed.stdout


def test_the_archives_own_code_runs(tiny_archive: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed.mar"
    with zipfile.ZipFile(tiny_archive) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name == "handlers/embedding.py":
                content = content.replace(b'Nouns("embedding", "embeddings")', b'Nouns("changed", "embeddings")')
            new.writestr(name, content)
    assert sys.modules["handlers.embedding"] is embedding, "the checkout's own is there, and is not what runs"
    done = CliRunner().invoke(app, ["predict", str(changed), "--text", "the cat"])
    assert done.exit_code == 0
    assert '{"changed":' in done.stdout


@pytest.mark.parametrize(
    ("arguments", "stdin", "says"),
    [
        (["nowhere.mar", "--text", "a"], "", "no archive nowhere.mar"),
        (["nowhere.mar", "nowhere.json"], "", "nowhere.json cannot be read"),
        (["nowhere.mar"], "{", "stdin is not JSON"),
        (["nowhere.mar"], "[]", "empty list"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], stdin: str, says: str) -> None:
    result = CliRunner().invoke(app, ["predict", *arguments], input=stdin)
    assert isinstance(result.exception, UserError)
    assert says in str(result.exception)
