"""The bench verb's options, and how a run is laid out; the measuring itself is tested end to end by hand and in e2e."""

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from scripts.__main__ import app
from scripts.bench import _choices, _counts, _of_archive, bench
from scripts.lib import benchmark
from scripts.lib.benchmark import Settings, agreement, cosine
from scripts.lib.errors import UserError
from scripts.lib.load import LoadResult, Sample
from scripts.lib.offline import SingleText
from scripts.lib.scrape import BatchingWindow
from scripts.lib.subjects import QUERY, SUBJECTS
from scripts.lib.workloads import WORKLOADS, Body, Workload
from tests.e2e.archives import write_archive


def settings(**changes: Any) -> Settings:
    given: dict[str, Any] = {
        "workloads": ("short",),
        "clients": (1, 64),
        "workers": 2,
        "threads": None,
        "max_batch_delay": 1,
        "batch_sizes": (32, 1),
        "rounds": 2,
    }
    return Settings(**given | changes)


def test_lists_of_choices() -> None:
    assert _choices("all", WORKLOADS, "--workload") == WORKLOADS
    assert _choices("mixed, short,mixed", WORKLOADS, "--workload") == ("mixed", "short")
    assert _counts("64,1,8,8") == (1, 8, 64)


@pytest.mark.parametrize("text", ["", "huge", "short,huge", ","])
def test_unknown_choices_are_named_with_the_known_ones(text: str) -> None:
    with pytest.raises(UserError, match="--workload") as error:
        _choices(text, WORKLOADS, "--workload")
    assert "mixed" in error.value.hint


@pytest.mark.parametrize("text", ["", "0,1", "-3", "two", "1.5"])
def test_clients_are_whole_numbers_from_one(text: str) -> None:
    with pytest.raises(UserError, match="--clients"):
        _counts(text)


def test_a_window_has_one_end() -> None:
    with pytest.raises(UserError, match="exclude each other"):
        bench(requests=10, duration=1.0)


@pytest.mark.parametrize("option", ["model", "dtype", "threads"])
def test_an_archive_is_measured_as_it_was_built(option: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"--{option} can't change an archive"):
        bench(archive_file=tmp_path / "none.mar", **{option: 3})  # type: ignore[arg-type]
    path = tmp_path / "a.mar"
    write_archive(path, config="handler: {dtype: bfloat16, threads: 3}\n")
    assert _of_archive(path, {"--dtype": None}) == (("bfloat16",), 3)
    write_archive(path, config="handler: {dtype: auto}\n")
    assert _of_archive(path, {}) == (("float32",), None)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"workload": "generation", "clients": "8"}, "--clients would do nothing here: generation has one worker"),
        ({"task": "generation", "workers": 2, "duration": 5.0}, "--duration and --workers would do nothing"),
        ({"task": "embedding", "workload": "generation"}, "--workload generation is not for --task embedding"),
        ({"task": "generation", "workload": "mixed"}, "--workload mixed: not known"),
        (
            {"vllm_python": Path(sys.executable)},
            "--vllm-python would do nothing here: vLLM is measured beside generation",
        ),
        ({"task": "generation", "vllm_python": Path("there", "is", "none")}, "there is no such program"),
        ({"task": "generation", "workload": "prefix", "vllm_python": Path(sys.executable)}, "would do nothing here"),
    ],
)
def test_what_generation_has_no_use_for_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        bench(**given)


def test_an_archive_of_another_task_does_not_generate(tmp_path: Path) -> None:
    path = tmp_path / "a.mar"
    write_archive(path, config="handler: {task: embedding}\n")
    with pytest.raises(UserError, match="no generation model's archive"):
        bench(task="generation", archive_file=path)


def test_the_yardstick_gets_the_threads_of_all_workers() -> None:
    assert settings(workers=2).total_threads(cores=4) == 4
    assert settings(workers=3).total_threads(cores=2) == 3
    assert settings(workers=2, threads=4).total_threads(cores=2) == 8


def test_counts_of_requests() -> None:
    assert settings().requests_for("mixed", 64) == settings().pool("mixed") == benchmark.POOL_REQUESTS
    assert settings().requests_for("mixed", 1) == 100
    assert settings().requests_for("lists", 64) == 192
    assert settings(requests=300).requests_for("short", 64) == 300
    assert settings(requests=300).requests_for("lists", 64) == 30
    assert settings(duration_s=5.0).pool("lists") > 0


class FakeOffline:
    """A yardstick whose speed is told by the test, and which writes down when it is used."""

    threads = 2

    def __init__(self, seconds: list[float], events: list[str]) -> None:
        self.seconds = seconds
        self.events = events

    def run(self, texts: Sequence[str]) -> float:
        self.events.append("offline")
        return self.seconds.pop(0)

    def single(self, texts: Sequence[str]) -> SingleText:
        self.events.append("single")
        return SingleText(10.0, 12.0)


def test_server_and_yardstick_take_turns_and_ratios_use_the_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    body = Body(b"{}", 1, 5)
    pool = Workload("short", (body,) * 10, ("x",) * 10, (5,) * 10, ("x",) * 10)
    servers = {size: SimpleNamespace(name=str(size)) for size in (32, 1)}

    def window(self: Any, server: Any, pool: Workload, clients: int) -> tuple[LoadResult, BatchingWindow, int]:
        events.append(f"{clients} clients, batch size {server.name}")
        samples = tuple(Sample(0, 0.1, 200, 5, 1, 5) for _ in range(30))
        batching = BatchingWindow(30, 30, 150, 0, 0, 3, 3, {}, {}, 0, 0, 0)
        return LoadResult(samples, clients, 1.0, 0.1, 0.1), batching, clients * 100

    monkeypatch.setattr(benchmark._Run, "_window", window)
    # 10 texts in 1.0, 0.5 and 0.25 s: 10, 20 and 40 texts/s.
    offline = FakeOffline([1.0, 0.5, 0.25], events)
    run = benchmark._Run(
        "m", "float32", settings(), cast(Any, servers), cast(Any, offline), lambda label: nullcontext()
    )
    points, yardstick = run._workload(pool)

    turn = ["1 clients, batch size 32", "64 clients, batch size 32", "64 clients, batch size 1"]
    assert events == ["offline", "single", *turn, "offline", "single", *turn, "offline"]
    assert yardstick.texts_per_s == (10, 20, 40)
    assert [(point.clients, point.batch_size) for point in points] == [(1, 32), (64, 32), (64, 1)]
    for point in points:
        assert [each.ratio for each in point.rounds] == [30 / 15, 30 / 30]
        assert point.peak_memory == point.clients * 100


def test_other_workloads_are_not_run_with_batch_size_one() -> None:
    run = benchmark._Run("m", "float32", settings(), {}, cast(Any, None), lambda label: nullcontext())
    assert list(run._plan(Workload("mixed", (), (), (), ()))) == [(32, 1), (32, 64)]


def test_cosine() -> None:
    assert cosine([1, 0], [2, 0]) == 1
    assert cosine([1, 0], [0, 3]) == 0
    assert cosine([0, 0], [0, 3]) == 0


@pytest.mark.parametrize(
    ("served", "offline", "expected"),
    [
        ([1.0, -1.0] * 8, [2.0, -2.0] * 8, 1.0),
        ([0.9], [0.8], 0.9),
        ([0.5] * 20, [0.5] * 19 + [0.25], 0.75),
        (["a", "b"], ["a", "c"], 0.5),
        (["a"], ["a", "c"], 0.0),
        ([], [], 1.0),
    ],
)
def test_agreement(served: list[Any], offline: list[Any], expected: float) -> None:
    assert agreement(served, offline) == pytest.approx(expected)


def test_an_unknown_task_is_named_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="--task ranking") as error:
        bench(task="ranking")
    assert "reranking" in error.value.hint


def test_what_the_subjects_answers_are_read_as() -> None:
    ranking = {"ranking": [{"index": 1, "score": 0.9}, {"index": 0, "score": 0.1}]}
    assert SUBJECTS["reranking"].values(ranking, 2) == [[0.1], [0.9]]
    assert SUBJECTS["reranking"].many(["a"]) == {"query": QUERY, "documents": ["a"]}
    assert SUBJECTS["embedding"].values({"embeddings": [[1, 2]]}, 1) == [[1.0, 2.0]]
    assert SUBJECTS["classification"].values({"predictions": [{"label": "a", "score": 0.5}]}, 1) == [[0.5]]
    assert SUBJECTS["token_classification"].values({"entities": [[{"score": 0.5}], []]}, 2) == [[0.5], []]
    assert SUBJECTS["seq2seq"].values({"texts": ["a b"]}, 1) == [["a", "b"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": "5"}, "--rate would do nothing"),
        ({"html_file": Path("x.html"), "warm_up": 0}, "--html and --warm-up would do nothing"),
        ({"against": "http://h/x", "workers": 2}, "--workers would do nothing"),
        (
            {"against": "http://h/x", "archive_file": Path("a.mar"), "rounds": 3},
            "--archive and --rounds would do nothing",
        ),
        ({"compare": (Path("a"), Path("b")), "clients": "1"}, "--clients would do nothing"),
        ({"against": "http://h/x", "json_file": Path("/none/x.json")}, "there is no directory"),
        ({"against": "http://h/x", "html_file": Path("/none/x.html")}, "there is no directory"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        bench(**options)


def test_a_running_server_from_the_terminal(tmp_path: Path) -> None:
    """Results are written as they are printed, and two of them compared."""
    answered = 0

    class Predict(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            nonlocal answered
            answered += 1
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"[]")

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Predict) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/predictions/m"
        options = ["--clients", "2", "--requests", "10", "--warm-up", "4", "--workload", "short"]
        files = ["--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
        result = CliRunner().invoke(app, ["bench", "--against", url, *options, *files])
        server.shutdown()
    assert result.exit_code == 0, result.output
    assert answered == 1 + 4 + 10
    (window,) = json.loads((tmp_path / "a.json").read_bytes())["windows"]
    assert (window["label"], window["summary"]["requests"]) == ("2 clients", 10)
    assert "2 clients" in (tmp_path / "a.html").read_text()
    result = CliRunner().invoke(app, ["bench", "--compare", *[str(tmp_path / "a.json")] * 2])
    assert result.exit_code == 0, result.output
