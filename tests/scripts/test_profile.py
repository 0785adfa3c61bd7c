import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from scripts import profile as verb
from scripts.__main__ import app
from scripts.lib.costs import Profile
from scripts.lib.errors import UserError
from tests.scripts.lib.profiles import profile


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What the verb asks to be measured; tests of the measuring itself are in lib."""
    found: dict[str, Any] = {}

    def measure(path: Path, texts: Any, **options: Any) -> Profile:
        found.update(path=path, texts=texts, **options)
        return profile(device_name="a GPU", device="cuda")

    monkeypatch.setattr(verb, "measure", measure)
    monkeypatch.chdir(tmp_path)
    return found


def test_costs_are_shown_and_written_for_plan(asked: dict[str, Any]) -> None:
    Path("bodies.jsonl").write_text('{"text": "a"}\n"b"\n')
    options = ["--bodies", "bodies.jsonl", "--workers", "2", "--threads", "3", "--json", "gpu.json"]
    result = CliRunner().invoke(app, ["profile", "m.mar", *options])
    assert result.exit_code == 0, result.exception
    assert (asked["path"], asked["workers"], asked["threads"]) == (Path("m.mar"), 2, 3)
    assert [json.loads(body) if body != b"b" else body for body in asked["texts"].bodies] == [{"text": "a"}, b"b"]
    assert "m.mar (embedding) on a GPU: float32, threads 1, packed" in result.stdout
    assert Profile.read(Path("gpu.json")) == profile(device_name="a GPU", device="cuda")
    planned = CliRunner().invoke(
        app, ["plan", "m.mar", "--profile", "gpu.json", "--rate", "10", "--requests", "200", "--objective", "p99<=1s"]
    )
    assert planned.exit_code == 0, planned.exception
    assert "needed" in planned.stdout


def test_nothing_runs_when_the_result_has_no_place(asked: dict[str, Any]) -> None:
    result = CliRunner().invoke(app, ["profile", "m.mar", "--json", "no/where.json"])
    assert isinstance(result.exception, UserError)
    assert "there is no directory" in str(result.exception)
    assert not asked
    CliRunner().invoke(app, ["profile", "m.mar", "--workload", "short"])
    assert asked["texts"].workload == "short"
