"""The peers' table: ratios point the same way, and nothing that went wrong is left out."""

import orjson

from benchmarks.table import OURS, Entrant, Figure, Result, Turn, markdown, to_json
from scripts.lib.drive import Generator, Window
from scripts.lib.load import LoadResult, Sample
from scripts.lib.machine import Machine
from scripts.lib.stats import summarize

HERE = Machine("a processor", 2, (), 8.0, 0.0, {"python": "3.11"}, "2026-01-02T00:00:00+00:00")


def window(label: str, clients: int, latencies: list[float], *, open_loop: bool = False, status: int = 200) -> Window:
    """A window of 2 s in which requests took so many seconds; the last of several has the status."""
    samples = [Sample(0.0, latency, 200, 1, 1, 5) for latency in latencies[:-1]]
    samples.append(Sample(0.0, latencies[-1], status, 1, 1, 5))
    summary = summarize(LoadResult(tuple(samples), clients, 2.0, 0.1, 0.1))
    return Window(label, open_loop, clients, 1.0, summary, None, None, Generator(0.1, 0.1, 0, False), 0, {}, (), ())


def loads(scale: int, status: int = 200) -> tuple[Window, ...]:
    """Many clients, one client and an open loop at a server that is `scale` times as slow."""
    return (
        window("64 clients", 64, [1.0] * (12 // scale), status=status),
        window("1 client", 1, [0.01 * scale] * 3),
        window("5/s", 40, [0.02 * scale] * 3, open_loop=True),
    )


def result(*turns: Turn, failures: dict[str, str] | None = None) -> Result:
    entrants = {name: Entrant(f"{name}'s settings", {"torch": "2.0"}) for name in (OURS, "one", "other")}
    return Result(HERE, "python -m benchmarks.peers", 2.0, 2, entrants, list(turns), failures or {})


def rows(text: str) -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {first: rest for first, *rest in cells}


def test_a_ratio_above_one_is_always_in_our_favour() -> None:
    ours, theirs = loads(1), loads(2)
    assert [Figure.of(one).name for one in ours] == ["texts/s", "p50 ms", "p95 ms"]
    assert [Figure.of(a).advantage(a, b) for a, b in zip(ours, theirs, strict=True)] == [2.0, 2.0, 2.0]
    assert [Figure.of(b).advantage(b, a) for a, b in zip(ours, theirs, strict=True)] == [0.5, 0.5, 0.5]


def test_a_server_that_answered_nothing_has_no_ratio() -> None:
    none = window("1 client", 1, [0.1], status=500)
    assert Figure.of(none).advantage(loads(1)[1], none) is None


def test_the_table_has_medians_and_extremes_of_the_rounds() -> None:
    table = rows(
        markdown(
            result(
                Turn(OURS, 0, 1.0, 10**6, {"mixed": loads(1)}),
                Turn("one", 0, 0.9999, 2 * 10**6, {"mixed": loads(2)}),
                Turn(OURS, 1, 1.0, 10**6, {"mixed": loads(1)}),
                Turn("one", 1, 0.9995, 10**6, {"mixed": loads(4)}),
                failures={"other": "can't be installed: no such package"},
            )
        )
    )
    assert table["mixed"] == ["64 clients, texts/s", "1 client, p50 ms", "5/s, p95 ms"]
    assert table[OURS] == ["6.0", "10.0", "20.0"]
    assert table["one"] == ["2.2 (3.00 ×, 2.00–4.00)", "30.0 (3.00 ×, 2.00–4.00)", "60.0 (3.00 ×, 2.00–4.00)"]
    assert table["other"] == ["not measured"] * 3


def test_what_went_wrong_is_told() -> None:
    text = markdown(
        result(
            Turn(OURS, 0, 1.0, 10**6, {"mixed": loads(1)}),
            Turn("one", 0, 0.9995, 3 * 10**6, {"mixed": loads(2, status=500)}, ("mixed: the generator was late",)),
            failures={"one": "ended", "other": "can't be installed: no such package"},
        )
    )
    assert rows(text)["one"][0] == "2.5 (2.40 ×), 1 errors"
    assert "- **one**: one's settings; torch 2.0; 3 MB; cosine with sentence-transformers ≥ 0.99950; " in text
    assert "; stopped early: ended; mixed: the generator was late\n" in text
    assert "- **other**: other's settings; torch 2.0; not measured: can't be installed: no such package\n" in text
    assert "interrupted" not in text


def test_an_interrupted_run_says_so() -> None:
    measured = result(Turn(OURS, 0, 1.0, 1, {"mixed": loads(1)}))
    measured.interrupted = True
    assert markdown(measured).endswith("- interrupted before all had their turns\n")


def test_requests_that_were_shed_stand_beside_the_rate() -> None:
    text = markdown(
        result(Turn(OURS, 0, 1.0, 1, {"mixed": loads(1)}), Turn("one", 0, 1.0, 1, {"mixed": loads(2, status=503)}))
    )
    assert rows(text)["one"][0] == "2.5 (2.40 ×), 1 shed"


def test_without_our_own_turn_there_are_no_ratios() -> None:
    assert rows(markdown(result(Turn("one", 0, 1.0, 1, {"mixed": loads(2)}))))["one"] == ["3.0", "20.0", "40.0"]


def test_nothing_measured_is_no_error() -> None:
    text = markdown(result(failures={"one": "ended"}))
    assert not rows(text)
    assert "not measured: ended" in text


def test_the_json_has_everything() -> None:
    found = orjson.loads(to_json(result(Turn(OURS, 0, 1.0, 5, {"mixed": loads(1)}), failures={"one": "ended"})))
    assert found["command"] == "python -m benchmarks.peers"
    assert found["failures"] == {"one": "ended"}
    assert found["turns"][0]["windows"]["mixed"][0]["summary"]["texts_per_s"] == 6.0
