"""Which windows the options ask for, and what requests they are made of."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.lib.errors import UserError
from scripts.lib.load_plan import Closed, Open, Stretch, _texts, plan, prepare_bodies
from scripts.lib.workloads import Body


def test_closed_loops() -> None:
    assert plan() == (Closed(1, 30.0), Closed(8, 30.0))
    assert plan((3,), duration_s=2.5) == (Closed(3, 2.5),)
    assert plan((3,), requests=100) == (Closed(3, None, 100),)
    assert [load.label for load in plan((1, 2))] == ["1 client", "2 clients"]


def test_rates_are_a_window_each() -> None:
    slow, fast = plan(rate="50, 20,50", duration_s=4, arrivals="constant")
    assert isinstance(slow, Open)
    assert isinstance(fast, Open)
    assert (slow.label, fast.label, slow.seconds) == ("20/s", "50/s", 4)
    assert [due.at for due in slow.dues([Body(b"", 1, 1)])] == pytest.approx([number / 20 for number in range(80)])


def test_bodies_go_round() -> None:
    (load,) = plan(rate="10", duration_s=1, arrivals="constant")
    bodies = [Body(bytes([number]), 1, 1) for number in range(3)]
    assert isinstance(load, Open)
    assert [due.body for due in load.dues(bodies)] == (bodies * 4)[:10]


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50), st.integers(1, 9)), min_size=1, max_size=5))
def test_the_stretches_of_steps_hold_every_request_once(steps: list[tuple[int, int, int]]) -> None:
    (load,) = plan(steps=",".join(f"{low}-{high}x{seconds}" for low, high, seconds in steps))
    assert isinstance(load, Open)
    assert load.seconds == sum(seconds for *_, seconds in steps) == load.stretches[-1].end
    ends = [0.0, *(stretch.end for stretch in load.stretches)]
    assert [stretch.start for stretch in load.stretches] == pytest.approx(ends[:-1])
    assert all(0 <= due.at <= load.seconds for due in load.dues([Body(b"", 1, 1)]))
    assert len({stretch.label for stretch in load.stretches}) == len(steps)


def test_steps_name_their_stretches() -> None:
    (load,) = plan(steps="20x30, 20-200x60")
    assert isinstance(load, Open)
    assert load.stretches == (Stretch("20x30 (from 0 s)", 0, 30), Stretch("20-200x60 (from 30 s)", 30, 90))


def test_a_trace_keeps_its_bodies_and_headers(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at": 5, "body": {"text": "a"}, "headers": {"X-A": "1"}}\n{"at": 7, "body": ["b", "c"]}\n')
    loads = plan(trace=path)
    (load,) = loads
    assert isinstance(load, Open)
    assert (load.label, load.seconds) == ("trace.jsonl", 2)
    bodies = prepare_bodies(loads, None, "mixed", "embedding", None, None)
    one, other = load.dues(bodies)
    assert (one.at, one.body, one.headers) == (0, Body(b'{"text": "a"}', 1, 0), {"X-A": "1"})
    assert (other.at, other.body.texts) == (2, 2)
    with pytest.raises(UserError, match="--trace has its own bodies"):
        prepare_bodies(loads, path, "mixed", "embedding", None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": "1", "steps": "1x1"}, "--rate and --steps are different loads"),
        ({"clients": (1,), "trace": Path("t")}, "--clients and --trace are different loads"),
        ({"arrivals": "poisson"}, "--arrivals says nothing about a load by --clients"),
        ({"rate": "1", "requests": 5}, "--requests says nothing"),
        ({"steps": "1x1", "duration_s": 5.0}, "--duration says nothing"),
        ({"rate": "1", "arrivals": "even"}, "--arrivals even"),
        ({"rate": "0"}, "--rate 0"),
        ({"rate": "nan"}, "--rate nan"),
        ({"rate": "inf"}, "--rate inf"),
        ({"rate": "fast"}, "--rate fast"),
        ({"steps": "5"}, "no step"),
    ],
)
def test_options_that_make_no_load(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(**options)


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ({"text": "a"}, 1),
        ({"texts": ["a", "b"]}, 2),
        ({"query": "q", "documents": ["a", "b", "c"]}, 3),
        ({"input": ["a"] * 4, "model": "m"}, 4),
        (["a", "b"], 2),
        ([], 1),
        ({"texts": []}, 1),
        ("a", 1),
    ],
)
def test_texts_of_a_request(body: Any, texts: int) -> None:
    assert _texts(json.dumps(body).encode()) == texts


def test_texts_of_what_is_no_json() -> None:
    assert _texts(b"{") == 1


def test_generated_requests_are_texts_of_known_lengths() -> None:
    bodies = prepare_bodies(plan(), None, "short", "embedding", None, None)
    assert len({body.data for body in bodies}) > 900
    assert all(set(json.loads(body.data)) == {"text"} and 5 <= body.tokens <= 25 for body in bodies)


def test_generated_requests_of_openai_hold_the_same_texts() -> None:
    own = prepare_bodies(plan(), None, "lists", "embedding", None, None)
    asked = prepare_bodies(plan(), None, "lists", "embedding", "embeddings", "m")
    assert [(body.texts, body.tokens) for body in asked] == [(body.texts, body.tokens) for body in own]
    found = json.loads(asked[1].data)
    assert (found["model"], len(found["input"])) == ("m", asked[1].texts)
    assert found["input"] != json.loads(asked[0].data)["input"]
    (first, *_) = prepare_bodies(plan(), None, "short", "embedding", "chat", "m")
    assert json.loads(first.data)["messages"][0]["role"] == "user"
