"""GenerationHandler when clients leave, engines fail and requests crowd. Oracle: transformers' generate, alone."""

import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from handlers.generation import mailbox
from tests.contract.frontend import COMPLETIONS, GREEDY, Frontend, events, text_of
from tests.contract.generation.conftest import Start
from tests.contract.generation.crowd import mixed_requests_a_third_of_which_leave
from tests.generation_models import Oracle


def test_a_client_that_leaves_frees_its_blocks(frontend: Frontend) -> None:
    left = [frontend.send({"prompt": "a b c", "ignore_eos": True, "n": 2}, COMPLETIONS) for _ in range(3)]
    stays = frontend.send({"prompt": "the", "max_tokens": 60, "ignore_eos": True}, COMPLETIONS)
    for _ in range(3):
        frontend.call()
    assert frontend.handler.engine.stats().running > 1
    for id in left:
        frontend.leave(id)
    frontend.run()
    assert frontend.answers[stays].status == 200
    assert frontend.at_rest()


def test_what_no_call_renews_is_dropped_and_told_so(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = frontend.handler.engine._choose

    def slowly(logits: torch.Tensor, ids: list[str]) -> list[int]:
        time.sleep(0.02)
        return choose(logits, ids)

    monkeypatch.setattr(frontend.handler.engine._manager, "_choose", slowly)
    id = frontend.send({"prompt": "a", "ignore_eos": True}, COMPLETIONS)
    while not frontend.handler.engine.stats().running:
        frontend.call()
    assert frontend.at_rest(seconds=2)
    frontend.run()
    assert frontend.answers[id].status == 503
    assert frontend.answers[id].json()["error"]["code"] == "dropped"


def test_requests_are_watched_over_whatever_fails_beside(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise RuntimeError("secret text")

    monkeypatch.setattr(frontend.handler, "look", fails)
    id = frontend.send({"prompt": "a", "ignore_eos": True}, COMPLETIONS)
    while not frontend.handler.engine.stats().running:
        frontend.call()
    time.sleep(mailbox.LEASE / 2)
    assert "Watching over requests failed: RuntimeError" in caplog.text
    assert "secret" not in caplog.text
    assert frontend.at_rest(seconds=2)
    frontend.run()
    assert id in frontend.answers


class Panic(BaseException):
    """As Rust's reach Python."""


def test_an_admission_that_panics_is_answered(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = frontend.handler.prompts.encode

    def panics(generation: Any) -> Any:
        if generation.prompts == ("panic",):
            raise Panic
        return encode(generation)

    monkeypatch.setattr(frontend.handler.prompts, "encode", panics)
    bodies = ({"prompt": "panic"}, {"prompt": "the cat", "max_tokens": 2})
    failed, good = frontend.ask(*bodies, route=COMPLETIONS)
    assert (failed.status, failed.json()["error"]["code"]) == (500, "handler_failure")
    assert good.status == 200


def test_schemas_that_are_tried_leave_slots_and_wait_for_a_while_only(
    start: Start, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontend = start(directory)
    grammars, begun, go_on, tried = frontend.handler.grammars, threading.Event(), threading.Event(), []
    compiled = grammars.compile

    def held(rules: str) -> Any:
        tried.append(rules)
        begun.set()
        assert go_on.wait(60)
        return compiled(rules)

    def ask(number: int) -> str:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [number]}}}
        return frontend.send({"prompt": "a", "response_format": form, **GREEDY}, COMPLETIONS)

    monkeypatch.setattr(grammars, "compile", held)
    half = frontend.handler.slots // 2
    waiting = [ask(number) for number in range(half)]
    while not begun.is_set():
        frontend.call()
    refused, plain = ask(half), frontend.send({"prompt": "a", "max_tokens": 2}, COMPLETIONS)
    while not {refused, plain} <= frontend.answers.keys():
        frontend.call()
    assert frontend.answers[plain].status == 200
    assert (frontend.answers[refused].status, frontend.answers[refused].headers["Retry-After"]) == (503, "1")
    assert not frontend.answers.keys() & set(waiting)
    for id in waiting[1:-1]:
        frontend.leave(id)
    frontend.call()
    go_on.set()
    frontend.run()
    assert [text_of(frontend.answers[id]) for id in (waiting[0], waiting[-1])] == ["0", str(half - 1)]
    assert len(tried) == 2  # those of clients that left cost nothing
    again = ask(0)  # known: it need not wait
    monkeypatch.setattr(frontend.handler, "_postpone", None)
    frontend.run()
    assert text_of(frontend.answers[again]) == "0"
    monkeypatch.undo()
    monkeypatch.setattr(mailbox, "LATE", 0.0)
    late = ask(half + 1)
    frontend.run()
    assert frontend.answers[late].status == 503
    assert frontend.at_rest()


def test_a_failed_engine_is_told_and_replaced(
    start: Start, directory: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontend = start(directory)
    counted: list[str] = []
    monkeypatch.setattr(frontend.handler.metrics, "error", lambda code, status: counted.append(code))
    body = {"prompt": "the cat", "max_tokens": 480, "ignore_eos": True, **GREEDY}
    engine = frontend.handler.engine

    def broken(*_: Any) -> Any:
        raise RuntimeError("secret text")

    open_ones = [frontend.send(body, COMPLETIONS) for _ in range(2)]
    streamed = frontend.send({**body, "stream": True}, COMPLETIONS)
    while len(frontend.pieces[streamed]) < 2:
        frontend.call()
    engine._manager._choose = broken
    cache, begin, freed = weakref.ref(engine._manager.batch_processor.cache.cache_tensor), engine._start, []

    def started() -> Any:
        freed.append(cache() is None)
        return begin()

    monkeypatch.setattr(engine, "_start", started)
    frontend.run()
    for id in open_ones:
        assert frontend.answers[id].status == 503
        assert frontend.answers[id].json()["error"]["code"] == "engine_failure"
        assert frontend.answers[id].headers["Retry-After"] == "1"
    assert events(frontend.answers[streamed])[-1]["error"]["code"] == "engine_failure"
    assert counted == ["engine_failure"] * 3  # the stream's too
    again = {"prompt": "the cat", "max_tokens": 8, **GREEDY}
    assert text_of(frontend.ask(again, route=COMPLETIONS)[0]) == oracle.text("the cat", 8)
    assert engine.stats().rebuilds == 1
    assert freed == [True]  # there may be no room for two
    assert frontend.at_rest()


def test_logits_that_are_not_finite_fail_their_request_alone(
    start: Start, directory: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontend = start(directory)
    engine = frontend.handler.engine
    choose = engine._choose

    def poisoned(logits: torch.Tensor, ids: list[str]) -> list[int]:
        for row, id in enumerate(ids):
            if len(engine._chains[id].sequence.prompt) == 7:
                logits[row] = float("nan")
        return choose(logits, ids)

    monkeypatch.setattr(engine._manager, "_choose", poisoned)
    bad = frontend.send({"prompt": [5] * 7}, COMPLETIONS)
    good = frontend.send({"prompt": "the cat", "max_tokens": 12, **GREEDY}, COMPLETIONS)
    frontend.run()
    assert frontend.answers[bad].status == 500
    assert text_of(frontend.answers[good]) == oracle.text("the cat", 12)
    assert frontend.at_rest()


def test_a_lower_priority_number_goes_first(start: Start, directory: Path) -> None:
    frontend = start(directory, num_blocks=4, max_model_len=64)  # one at a time
    running = frontend.send({"prompt": [5] * 4, "max_tokens": 58, "ignore_eos": True}, COMPLETIONS)
    while not frontend.handler.engine.stats().running:
        frontend.call()
    body = {"prompt": [6] * 50, "max_tokens": 10, "ignore_eos": True}
    late, soon = (frontend.send({**body, "priority": priority}, COMPLETIONS) for priority in (5, -5))
    done: list[str] = []
    while len(done) < 3:
        frontend.call()
        done += [id for id in frontend.answers if id not in done]
    assert done.index(soon) < done.index(late)
    assert running in done


def test_mixed_requests_a_third_of_which_leave(start: Start, directory: Path, oracle: Oracle) -> None:
    frontend = start(directory, num_blocks=24, max_model_len=128)
    mixed_requests_a_third_of_which_leave(frontend, oracle)
    assert not frontend.handler.engine._chains


def test_a_new_request_gets_its_first_token_while_eight_go_on(
    start: Start, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in steps: one may be under way, and the prompt is read in pieces that leave the eight their tokens."""
    frontend = start(directory, num_blocks=280)  # a step has 48 tokens: eight of those that run, 40 of a prompt
    engine = frontend.handler.engine
    manager, steps, handed = engine._manager, [], {}
    choose, submit = manager._choose, manager.submit

    def watched(logits: torch.Tensor, ids: list[str]) -> list[int]:
        steps.append(set(ids))
        time.sleep(0.01)  # so that those who run are still there when the others come
        return choose(logits, ids)

    def noted(sequence: Any) -> None:
        handed[sequence.id] = len(steps)
        submit(sequence)

    monkeypatch.setattr(manager, "_choose", watched)
    monkeypatch.setattr(manager, "submit", noted)
    eight = [frontend.send({"prompt": [5] * 4, "ignore_eos": True}, COMPLETIONS) for _ in range(8)]
    while engine.stats().running < 8:
        frontend.call()
    for length in (300, 4):
        id = frontend.send({"prompt": [6] * length, "max_tokens": 1}, COMPLETIONS)
        while id not in frontend.answers:
            frontend.call()
        begun = handed[f"{id}/0"]
        first = next(number for number, ids in enumerate(steps) if f"{id}/0" in ids)
        assert first - begun <= -(-length // 40) + 2
        assert all({f"{other}/0" for other in eight} <= ids for ids in steps[begun + 1 : first + 1])
    for id in eight:
        frontend.leave(id)
    frontend.call()
    assert frontend.at_rest()
