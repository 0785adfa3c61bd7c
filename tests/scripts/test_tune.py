"""The tune verb on a machine of formulas in place of the server and the profile; e2e/test_tune.py has the real one."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import Result
from typer.testing import CliRunner

from scripts.__main__ import app
from scripts.lib import archive, forecast, integrity, tuner
from scripts.lib.costs import Profile, Rates
from scripts.lib.errors import UserError
from scripts.lib.forecast import Forecast
from scripts.lib.objective import Objective
from scripts.lib.serving import Serving
from scripts.lib.tuning import Kind, Point, Setting
from tests.e2e.archives import write_archive
from tests.scripts.lib.profiles import profile

SERVING = """\
server: {model_store: store}
models:
  m:
    archive: tiny.mar     # ours
    version: "1.0"
    workers: 4            # too many
    batch_size: 64
"""
SMALL = ("--workers", "1,2", "--batch-size", "1,8", "--max-batch-delay", "1,20")


def costs(threads: int | None) -> Profile:
    rates = Rates(per_batch_s=2e-3, per_request_s=1e-4, seconds_per_token=3e-5 if threads == 2 else 5e-5)
    return profile(requests=((20,),) * 9 + ((48,),), rates=(rates,), launch_cost=30)


class Formulas:
    """In place of `Trials`: what the forecast says is what is measured."""

    asked: ClassVar[list[tuple[Setting, Kind, float | None]]] = []
    interrupt_at: int | None = None

    def __init__(self, about: Any, sent: Any, objective: Objective, windows: Any, *_: Any) -> None:
        known = {(threads, None): costs(threads) for threads in (1, 2, 4)}
        self.truth = Forecast(known, objective, times=sent.times)
        self.windows = windows

    def __enter__(self) -> "Formulas":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def seconds(self, kind: Kind, rate: float | None) -> float:
        return float(getattr(self.windows, kind.value))

    def measure(self, setting: Setting, kind: Kind, rate: float | None) -> Point:
        if len(self.asked) == self.interrupt_at:
            raise KeyboardInterrupt
        self.asked.append((setting, kind, rate))
        margin = self.truth.lone(setting) if kind == Kind.QUIET else self.truth.margin(setting, rate)
        return Point(
            setting=setting, kind=kind, rate=rate, seconds=self.seconds(kind, rate), met=margin >= 0, margin=margin,
            judged_ms=10.0, p50_ms=9.0, p95_ms=10.0, per_s=rate or 1.0, requests=100,
        )  # fmt: skip


@pytest.fixture
def here(tiny_archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("config", "store"):
        Path(name).mkdir()
    Path("config/serving.yaml").write_text(SERVING)
    Path("store/tiny.mar").hardlink_to(tiny_archive)
    monkeypatch.setattr(forecast, "COUNT", 300)
    monkeypatch.setattr(tuner, "Trials", Formulas)
    monkeypatch.setattr(tuner, "cores", lambda: 2)
    monkeypatch.setattr(tuner, "profile", lambda path, texts, *, threads, **_: costs(threads))
    monkeypatch.setattr(Formulas, "asked", [])
    monkeypatch.setattr(Formulas, "interrupt_at", None)
    return tmp_path


def run(*arguments: str, name: str = "m") -> Result:
    return CliRunner().invoke(app, ["tune", name, "--objective", "p95<=50ms", *SMALL, *arguments])


def told(*arguments: str, status: int = 0) -> dict[str, Any]:
    result = run("--json", "out.json", *arguments)
    assert result.exit_code == status, (result.output, result.exception)
    document: dict[str, Any] = json.loads(Path("out.json").read_bytes())
    return document


def test_the_highest_rate_is_found_compared_and_written_down(here: Path) -> None:
    document = told()
    winner = document["outcome"]["winner"]
    assert winner["setting"]["workers"] == 2, "two workers of one thread make more than one of two"
    assert winner["point"]["kind"] == "final"
    assert winner["point"]["met"]
    assert set(document["ratios"]) == {"TorchServe's defaults", "the tutorials' setting"}
    assert all(ratio > 1 for ratio in document["ratios"].values())
    report = here / ".batchserve" / "tune"
    assert "# Tuning of tiny" in (report / "tiny.md").read_text()
    assert "Pareto front" in (report / "tiny.html").read_text()
    assert Serving.load(Path("config/serving.yaml")).models["m"].workers == 4, "nothing is applied unasked"


def test_no_comparison_no_baselines(here: Path) -> None:
    assert told("--no-compare")["outcome"]["baselines"] == []
    assert all(setting.max_batch_delay != 100 for setting, *_ in Formulas.asked)


def test_what_was_found_is_shown_again_at_once_and_applied(here: Path) -> None:
    first = told()
    asked = len(Formulas.asked)
    second = told("--apply")
    assert len(Formulas.asked) == asked
    assert second["outcome"] == first["outcome"]
    assert any("earlier run" in note for note in second["notes"])
    served, winner = Serving.load(Path("config/serving.yaml")).models["m"], first["outcome"]["winner"]["setting"]
    assert (served.workers, served.batch_size, served.max_batch_delay, served.archive) == (
        winner["workers"], winner["batch_size"], winner["max_batch_delay"], "tiny.mar",
    )  # fmt: skip
    text = Path("config/serving.yaml").read_text()
    assert "# ours" in text
    assert "# too many" in text
    told("--fresh")
    assert len(Formulas.asked) == 2 * asked


def test_a_larger_budget_or_another_space_is_searched_anew(here: Path) -> None:
    told("--budget", "2m")
    asked = len(Formulas.asked)
    told("--budget", "1m")
    assert len(Formulas.asked) == asked
    told("--budget", "10m")
    assert len(Formulas.asked) > asked, "longer windows are measured"
    asked = len(Formulas.asked)
    told("--batch-size", "16")
    assert len(Formulas.asked) > asked


def test_ctrl_c_keeps_what_was_measured_and_the_same_command_goes_on(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = told()
    expected = list(Formulas.asked)
    monkeypatch.setattr(Formulas, "asked", [])
    monkeypatch.setattr(Formulas, "interrupt_at", 3)
    document = told("--fresh", status=130)
    assert document["interrupted"]
    assert len(document["points"]) == 3
    monkeypatch.setattr(Formulas, "interrupt_at", None)
    document = told()
    assert document["outcome"] == whole["outcome"]
    assert Formulas.asked == expected
    assert "3 of the windows were measured by an earlier run" in document["notes"]


def test_a_rate_gets_the_cheapest_setting_and_its_archive(here: Path) -> None:
    document = told("--rate", "100", "--apply")
    setting = document["outcome"]["winner"]["setting"]
    assert (setting["workers"], setting["threads"]) == (1, 1), "one core is enough"
    assert document["outcome"]["winner"]["rate"] == 100
    served = Serving.load(Path("config/serving.yaml")).models["m"]
    assert (served.workers, served.archive) == (1, "tiny-1-threads.mar")
    made = Path("store") / served.archive
    assert archive.read(made).settings["threads"] == 1
    assert integrity.problems(made) == []
    assert sorted(path.name for path in Path("store").iterdir()) == ["tiny-1-threads.mar", "tiny.mar"]


@pytest.mark.parametrize("rate", ["100", "100.25"])
def test_the_rate_is_the_one_that_was_asked_for(here: Path, rate: str) -> None:
    assert told("--rate", rate)["outcome"]["winner"]["rate"] == float(rate)
    assert {found for _, kind, found in Formulas.asked if kind != Kind.QUIET} == {float(rate)}


def test_beside_another_model_the_applied_archive_fixes_its_threads(here: Path) -> None:
    other = SERVING + "  n: {archive: tiny.mar, version: '1.0'}\n"
    Path("config/serving.yaml").write_text(other)
    setting = told("--apply")["outcome"]["winner"]["setting"]
    assert (setting["workers"], setting["threads"]) == (2, 1)
    served = Serving.load(Path("config/serving.yaml")).models["m"]
    assert archive.read(Path("store") / served.archive).settings["threads"] == 1


def test_the_deployments_gpus_are_the_most(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "_gpus", lambda: ["a GPU"] * 4)
    served = Serving.load(Path("config/serving.yaml"))
    for allowed, found in ((None, 4), (2, 2), (0, 0)):
        server = served.model_copy(update={"server": served.server.model_copy(update={"gpus": allowed})})
        assert made(server).gpus == found


def made(server: Serving, trace: Path | None = None) -> tuner.Tuner:
    """A tuner of the archive in a deployment."""
    wanted = tuner.Wanted(
        Path("store/tiny.mar"), server.models["m"], server, Objective.parse("p95<=50ms"), None, trace, None, None,
        "poisson", 600.0, None, None, None, None, (), True, Path("report"), False,
    )  # fmt: skip
    return tuner.Tuner(wanted, lambda _: nullcontext())


def test_what_was_measured_with_other_versions_or_on_another_machine_is_not_taken(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, keys = Serving.load(Path("config/serving.yaml")), set[str]()
    known = tuner.machine.describe()
    versions = {**known.versions, "torch": "0.1"}
    for changed in ({}, {"versions": versions}, {"flags": ("avx2", "x")}, {"memory_gb": known.memory_gb + 64}):
        here_now = replace(known, **changed)
        monkeypatch.setattr(tuner.machine, "describe", lambda now=here_now: now)
        keys.add(made(served).state.key)
    monkeypatch.setattr(tuner, "_gpus", lambda: ["a GPU"])
    keys.add(made(served).state.key)
    monkeypatch.setattr(tuner, "_gpus", lambda: ["another GPU"])
    keys.add(made(served).state.key)
    assert len(keys) == 6


def test_a_failure_is_not_the_last_word(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = Formulas.measure

    def fail(trials: Formulas, setting: Setting, kind: Kind, rate: float | None) -> Point:
        failed = {"met": False, "margin": None, "failure": "no memory now"}
        return measure(trials, setting, kind, rate).model_copy(update=failed)

    with monkeypatch.context() as patch:
        patch.setattr(Formulas, "measure", fail)
        assert told(status=1)["outcome"]["winner"] is None
    assert told()["outcome"]["winner"] is not None


def test_profiling_takes_its_share_of_the_budget_and_goes_on_the_next_time(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiled: list[int | None] = []

    def slow(path: Path, texts: Any, *, threads: int | None, **_: Any) -> Profile:
        profiled.append(threads)
        return costs(threads)

    monkeypatch.setattr(tuner, "profile", slow)
    words = ("--rate", "50", "--no-compare", "--threads", "1,2")
    with monkeypatch.context() as patch:  # the first one takes more than its share
        patch.setattr(tuner.Budget, "left", property(lambda budget: budget.seconds * (1 - 0.4 * len(profiled))))
        document = told(*words)
    assert len(profiled) == 1
    assert document["outcome"]["winner"] is not None
    assert any("were left out" in note for note in document["notes"])
    document = told(*words)
    assert set(profiled) == {1, 2}
    assert not any("were left out" in note for note in document["notes"])


def test_a_trace_is_a_load_of_its_own(here: Path) -> None:
    Path("t.jsonl").write_text("".join(json.dumps({"at": n / 10, "body": {"text": "a"}}) + "\n" for n in range(30)))
    winner = told("--trace", "t.jsonl")["outcome"]["winner"]
    assert winner["rate"] is None
    assert (winner["setting"]["workers"], winner["setting"]["threads"]) == (1, 1)


def test_a_trace_is_predicted_where_it_is_busiest(here: Path) -> None:
    times = [0, 50, 100, 101, 102, 103, 104, 150, 180, 190]
    Path("t.jsonl").write_text("".join(json.dumps({"at": at, "body": {"text": "a"}}) + "\n" for at in times))
    found = made(Serving.load(Path("config/serving.yaml")), Path("t.jsonl"))._forecast()
    assert list(found.times) == [0, 1, 2, 3, 4]
    assert all(each.requests == costs(1).requests[2:7] for each in found.profiles.values())


def test_a_percentile_of_few_requests_is_told(here: Path) -> None:
    Path("t.jsonl").write_text("".join(json.dumps({"at": n / 10, "body": {"text": "a"}}) + "\n" for n in range(30)))
    notes = told("--trace", "t.jsonl")["notes"]
    assert any("in a window of 100 requests; it takes 200" in note for note in notes)


def test_that_nothing_meets_it_is_said_and_the_command_fails(here: Path) -> None:
    result = CliRunner().invoke(app, ["tune", "m", "--objective", "p50<=1ms", *SMALL, "--apply"])
    assert result.exit_code == 1
    assert "No setting meets p50<=1ms" in result.output
    assert "What would: " in result.output
    assert Path("config/serving.yaml").read_text() == SERVING
    again = CliRunner().invoke(app, ["tune", "m", "--objective", "p50<=1ms", *SMALL])
    assert "What would: " in again.output


def test_an_archive_without_an_entry_is_tuned_and_has_nothing_to_apply_to(here: Path) -> None:
    Path("other.mar").hardlink_to(Path("store/tiny.mar"))
    assert run("--no-compare", name="other.mar").exit_code == 0
    with pytest.raises(UserError, match="declares no model of other"):
        CliRunner().invoke(app, ["tune", "other.mar", "--apply"], catch_exceptions=False)
    assert run("--apply", name="store/tiny.mar").exit_code == 0, "the entry that names this file"
    assert Serving.load(Path("config/serving.yaml")).models["m"].workers == 2
    Path("config/serving.yaml").unlink()
    assert run("--no-compare", name="other.mar").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("x",), "declares no model x"),
        (("m", "--rate", "5", "--trace", "t"), "different loads"),
        (("m", "--objective", "fast"), "is no objective"),
        (("m", "--budget", "5s"), "--budget 5s"),
        (("m", "--budget", "soon"), "--budget soon"),
        (("m", "--workers", "0"), "--workers 0"),
        (("m", "--batch-size", "8,x"), "--batch-size 8,x"),
        (("m", "--dtype", "int8"), "--dtype int8"),
        (("m", "--arrivals", "bursts"), "--arrivals bursts"),
        (("m", "--workload", "long"), "--workload long"),
        (("m", "--batch-size", "2000"), "holds no batch"),
        (("m", "--json", "no/where.json"), "there is no directory"),
        (("echo.mar",), "not built by this tool"),
    ],
)
def test_what_cannot_be_tuned_is_refused(here: Path, arguments: tuple[str, ...], words: str) -> None:
    write_archive(Path("echo.mar"))
    with pytest.raises(UserError, match=words):
        CliRunner().invoke(app, ["tune", *arguments], catch_exceptions=False)
    assert Formulas.asked == []


def test_a_trace_that_fills_the_budget_is_refused(here: Path) -> None:
    Path("t.jsonl").write_text('{"at": 0, "body": 1}\n{"at": 500, "body": 1}\n')
    with pytest.raises(UserError, match="lasts 500 s"):
        CliRunner().invoke(app, ["tune", "m", "--trace", "t.jsonl"], catch_exceptions=False)


def test_generation_is_refused_with_the_reason(here: Path) -> None:
    config = "continuousBatching: true\nhandler: {task: generation}\n"
    write_archive(Path("chat.mar"), name="chat", config=config)
    with pytest.raises(UserError, match="one worker") as error:
        CliRunner().invoke(app, ["tune", "chat.mar"], catch_exceptions=False)
    assert "workers: 1" in error.value.hint


def test_what_the_archive_itself_says_of_batching_would_win(here: Path) -> None:
    about = archive.read(Path("store/tiny.mar"))
    winning = archive.Archive(about.path, about.manifest, {**about.config, "batchSize": 4}, about.provenance, {})
    deployed = Serving.load(Path("config/serving.yaml"))
    with pytest.raises(UserError, match="batchSize: 4"):
        tuner.check(winning, deployed.models["m"], deployed)
