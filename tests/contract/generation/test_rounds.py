"""When a call of the worker comes back, and with what."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from handlers.generation.mailbox import ROUND
from tests.contract.frontend import COMPLETIONS, GREEDY, Frontend, text_of
from tests.generation_models import Oracle

TOKENS = 24


@pytest.fixture
def one_by_one(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> Frontend:
    """Its engine brings one token each time it is asked."""
    engine, waiting = frontend.handler.engine, []
    collect = engine.collect

    def one(timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        while not waiting and time.monotonic() < deadline:
            waiting.extend(collect(deadline - time.monotonic()))
        return [waiting.pop(0)] if waiting else []

    monkeypatch.setattr(engine, "collect", one)
    return frontend


def calls(frontend: Frontend) -> Iterator[None]:
    while frontend._open:
        frontend.call()
        yield


@pytest.mark.parametrize(("stream", "least", "most"), [(True, TOKENS, TOKENS + 3), (False, 3, TOKENS // 2 + 3)])
def test_tokens_that_nobody_hears_of_end_no_call(
    one_by_one: Frontend, oracle: Oracle, stream: bool, least: int, most: int
) -> None:
    body = {"prompt": "the cat", "max_tokens": TOKENS, "ignore_eos": True, "stream": stream, **GREEDY}
    id = one_by_one.send(body, COMPLETIONS)
    count = sum(1 for _ in calls(one_by_one))
    assert least <= count <= most
    assert text_of(one_by_one.answers[id]) == oracle.text("the cat", TOKENS, eos_token_id=-1)


def test_a_stream_of_one_piece_ends_at_once(frontend: Frontend) -> None:
    id = frontend.send({"prompt": "the cat", "max_tokens": 1, "stream": True, **GREEDY}, COMPLETIONS)
    while not frontend.pieces[id]:
        frontend.call()
    begun = time.monotonic()
    frontend.run()
    assert time.monotonic() - begun < ROUND / 2
    assert frontend.answers[id].body.endswith(b"data: [DONE]\n\n")


def test_an_admission_that_ends_while_a_call_looks_at_it_harms_nobody(frontend: Frontend, oracle: Oracle) -> None:
    """What runs for a request is known just after the call has seen that nothing does."""
    id = frontend.send({"prompt": "the cat", "max_tokens": 3, **GREEDY}, COMPLETIONS)
    while frontend._open:
        frontend.call()
        if id in frontend.handler._open:
            frontend.handler._open[id].exchange = None
    assert text_of(frontend.answers[id]) == oracle.text("the cat", 3)
