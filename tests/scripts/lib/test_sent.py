import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.lib import archive, sent
from scripts.lib.archive import Archive
from scripts.lib.errors import UserError
from scripts.lib.recipe import Order, prepare
from scripts.lib.sent import Sent, busiest
from scripts.lib.source import resolve
from scripts.lib.tuning import Kind
from tests.e2e.archives import write_archive


@pytest.fixture(scope="module")
def about(tmp_path_factory: pytest.TempPathFactory) -> Archive:
    from tests.models import tiny_bert

    directory = tmp_path_factory.mktemp("store")
    recipe = prepare(
        Order(source=resolve(str(tiny_bert(directory / "model"))), name="tiny", version="1.0"),
        tmp_path_factory.mktemp("work"),
    )
    archive.write(directory / "tiny.mar", recipe.contents, recipe.members)
    return archive.read(directory / "tiny.mar")


def read(about: Archive, **given: object) -> Sent:
    options: dict[str, object] = {"bodies": None, "trace": None, "workload": None, "arrivals": "poisson"}
    return sent.read(about, **{**options, **given})  # type: ignore[arg-type]


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30), st.floats(0.1, 50))
def test_the_busiest_stretch(found: list[float], seconds: float) -> None:
    times = sorted(found)
    first, end = busiest(times, seconds)
    assert end > first
    assert times[end - 1] < times[first] + seconds
    most = max(sum(start <= each < start + seconds for each in times) for start in times)
    assert end - first == most


def test_a_rate_takes_bodies_in_turn_and_verifies_on_other_arrivals(about: Archive) -> None:
    made = read(about)
    assert made.words == "mixed texts for embedding"
    assert len(made.bodies) == 1000
    search, again, final = (made.dues(kind, 40.0, 10.0) for kind in (Kind.SEARCH, Kind.SEARCH, Kind.FINAL))
    assert search == again
    assert [due.at for due in search] != [due.at for due in final]
    assert [due.body for due in search] == list(made.bodies[: len(search)])
    assert 300 < len(search) < 500
    constant = read(about, arrivals="constant").dues(Kind.SEARCH, 40.0, 10.0)
    assert len(constant) == 400


def test_a_trace_keeps_its_times_and_is_searched_where_it_is_busiest(about: Archive, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    times = [0, 1, 2, 30, 30.5, 31, 31.5, 32, 60]
    trace.write_text("".join(json.dumps({"at": at, "body": {"text": f"number {at}"}}) + "\n" for at in times))
    made = read(about, trace=trace)
    assert made.times == tuple(times)
    assert [due.at for due in made.dues(Kind.FINAL, None, 60)] == times
    stretch = made.dues(Kind.SEARCH, None, 3)
    assert [due.at for due in stretch] == [0, 0.5, 1, 1.5, 2]
    assert b"number 30" in stretch[0].body.data


def test_bodies_of_a_file(about: Archive, tmp_path: Path) -> None:
    file = tmp_path / "b.jsonl"
    file.write_text('{"texts": ["a", "b"]}\n{"text": "c"}\n')
    made = read(about, bodies=file)
    assert [body.texts for body in made.bodies] == [2, 1]
    assert len(made.dues(Kind.SEARCH, 10.0, 2.0)) > 2


def test_what_is_sent_has_a_digest_of_its_own(about: Archive, tmp_path: Path) -> None:
    digests = {read(about).digest(), read(about, workload="short").digest(), read(about, arrivals="constant").digest()}
    for last in ('"at": 1', '"at": 2', '"at": 2, "headers": {"Accept": "a/b"}'):
        trace = tmp_path / "t.jsonl"
        trace.write_text(f'{{"at": 0, "body": 1}}\n{{{last}, "body": 1}}\n')
        digests.add(read(about, trace=trace).digest())
    assert len(digests) == 6
    assert read(about).digest() in digests


def test_two_sources_or_none_are_refused(about: Archive, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--bodies and --workload"):
        read(about, bodies=tmp_path / "b", workload="short")
    with pytest.raises(UserError, match="--workload long"):
        read(about, workload="long")
    foreign = archive.read(write_archive(tmp_path / "echo.mar"))
    with pytest.raises(UserError, match="no texts are made"):
        read(foreign)
