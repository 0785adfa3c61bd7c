import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from scripts import plan as verb
from scripts.__main__ import app
from scripts.lib import validation
from scripts.lib.costs import Profile, Request
from scripts.lib.errors import UserError
from tests.scripts.lib.profiles import profile

SERVING = """
models:
  m: {archive: m.mar, version: "1.0", workers: 2, batch_size: 8, max_batch_delay: 3, queue: 200}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("config").mkdir()
    Path("config/serving.yaml").write_text(SERVING)
    Path("gpu.json").write_text(profile().model_dump_json())
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", "m", "--profile", "gpu.json", "--requests", "2000", *arguments])


def rows(*arguments: str) -> list[dict[str, Any]]:
    result = run("--json", "plan.json", *arguments)
    assert result.exit_code == 0, result.exception
    found: list[dict[str, Any]] = json.loads(Path("plan.json").read_text())["rows"]
    return found


def test_a_rate_is_predicted_for_the_declared_setup_and_for_what_is_needed(here: Path) -> None:
    found = rows("--rate", "500", "--objective", "p99<=20ms")
    assert [row["what"] for row in found] == ["declared"] + ["needed"] * 4
    declared, *needed = found
    assert (declared["workers"], declared["requests_per_s"]) == (2, 500)
    assert [row["requests_per_s"] for row in needed] == [500, 1000, 10_000, 100_000]
    assert all(row["met"] and row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"] <= 20 for row in needed)
    assert needed[-1]["devices"] > needed[0]["devices"]
    assert all(0 < row["utilisation"] <= 1 and 1 <= row["batch_size"] <= 8 for row in found)


def test_the_same_seed_gives_the_same_figures(here: Path) -> None:
    arguments = ("--rate", "30000", "--workload", "mixed")
    assert rows(*arguments) == rows(*arguments)
    assert rows(*arguments, "--seed", "1") != rows(*arguments)


def test_options_stand_above_serving_yaml(here: Path) -> None:
    setup = ("--batch-size", "4", "--max-batch-delay", "7", "--workers", "3", "--queue", "99")
    result = run("--rate", "500", *setup)
    assert "batch size 4, delay 7 ms, queue 99, 3 workers a device" in result.stdout
    assert rows("--rate", "500", *setup)[0]["workers"] == 3
    shared = rows("--rate", "500", "--workers-per-device", "1", "--devices-per-server", "5")
    assert shared[0]["devices"] == 2


def test_clients_and_traces_are_loads_too(here: Path) -> None:
    declared, needed = rows("--clients", "16", "--objective", "p95<=50ms")
    assert declared["requests_per_s"] > 0
    assert needed["met"]
    with pytest.raises(UserError, match="300 clients pass the queue of 200"):
        CliRunner().invoke(app, ["plan", "m", "--profile", "gpu.json", "--clients", "300"], catch_exceptions=False)


def test_a_trace_brings_times_and_lengths(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path, list[bytes]]] = []

    def lengths(path: Path, bodies: Any) -> list[Request]:
        asked.append((path, list(bodies)))
        return [(5,), (7,), (200,)]

    monkeypatch.setattr(verb, "token_lengths", lengths)
    Path("trace.jsonl").write_text("".join(f'{{"at": {at}, "body": {{"text": "{at}"}}}}\n' for at in (10, 10.5, 11)))
    declared, needed = rows("--trace", "trace.jsonl")
    assert asked == [(Path("model_store/m.mar"), [b'{"text": "10"}', b'{"text": "10.5"}', b'{"text": "11"}'])]
    assert needed["workers"] == 2
    # each waits 3 ms, then 1 ms and 100 tokens for the launch besides its own
    assert declared["p99_ms"] == pytest.approx(3 + 1 + 3, abs=0.1)


def test_what_cannot_be_met_is_said_plainly(here: Path) -> None:
    result = run("--rate", "500", "--objective", "p50<=4ms")
    assert result.exit_code == 0
    assert "No number of devices up to 1 a TorchServe meets p50<=4ms" in result.stdout
    assert "missed" in result.stdout
    assert "needed" not in result.stdout


def test_more_workers_than_were_profiled_are_mentioned(here: Path) -> None:
    assert "profiled with at most 1 busy workers on the device; more are taken to" in run("--rate", "50").stdout
    assert "profiled with" not in run("--rate", "50", "--workers", "1").stdout


def test_costs_are_measured_where_none_are_given(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def measure(path: Path, texts: Any, **options: Any) -> Profile:
        asked.update(path=path, texts=texts, **options)
        return profile()

    monkeypatch.setattr(verb, "profile", measure)
    result = CliRunner().invoke(app, ["plan", "x.mar", "--rate", "9", "--requests", "100", "--workload", "short"])
    assert result.exit_code == 0, result.exception
    assert (asked["path"], asked["texts"].workload, asked["workers"]) == (Path("x.mar"), "short", 1)
    CliRunner().invoke(app, ["plan", "m", "--rate", "9", "--requests", "100"])
    assert (asked["path"], asked["texts"].workload, asked["workers"]) == (Path("model_store/m.mar"), "mixed", 2)


def test_a_measurement_is_shown_beside_its_prediction(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "REQUESTS", 500)
    point = {
        "workload": "short", "clients": 1, "dtype": "float32", "batch_size": 8, "p95_ms": 5.3,
        "effective_batch_size": 1.0, "requests_per_s": {"median": 180.0},
    }  # fmt: skip
    settings = {"task": "embedding", "workers": 1, "threads per worker": 1, "max batch delay ms": 3}
    Path("bench.json").write_text(json.dumps({"settings": settings, "points": [point, {**point, "p95_ms": 50.0}]}))
    result = run("--against", "bench.json", "--json", "out.json")
    assert result.exit_code == 0, result.exception
    assert "are NOT within 20 %" in result.stdout
    first, second = json.loads(Path("out.json").read_text())["points"]
    assert first["batch_size"] == {"predicted": 1.0, "measured": 1.0, "ratio": 1.0}
    assert 0.8 < first["p95_ms"]["ratio"] < 1.2
    assert second["p95_ms"]["ratio"] < 0.2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "plan needs one load"),
        (["--rate", "5", "--clients", "3"], "plan needs one load"),
        (["--rate", "5", "--objective", "fast"], "'fast' is no objective"),
        (["--rate", "5", "--arrivals", "uniform"], "--arrivals uniform: not known"),
        (["--rate", "5", "--workload", "lists"], "--workload lists: not known"),
        (["--rate", "5", "--workload", "short", "--bodies", "b.jsonl"], "each say what is sent"),
        (["--rate", "5", "--profile", "nowhere.json"], "nowhere.json can't be read"),
        (["--rate", "5", "--json", "no/where.json"], "there is no directory no"),
        (["--against", "nowhere.json"], "nowhere.json can't be read"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], says: str, here: Path) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, UserError)
    assert says in str(result.exception)


def test_an_unknown_model_is_named(here: Path) -> None:
    result = CliRunner().invoke(app, ["plan", "other", "--profile", "gpu.json", "--rate", "1"])
    assert isinstance(result.exception, UserError)
    assert "declares no model other (it has m)" in str(result.exception)
