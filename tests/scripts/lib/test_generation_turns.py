"""The rounds of the benchmark of generation, against an HTTP server that streams and sides that the test times."""

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
from aiohttp import web

from scripts.lib import load
from scripts.lib.errors import UserError
from scripts.lib.generation_report import SERVED
from scripts.lib.generation_turns import DECODING, HTTP_ANSWERS, HTTP_REQUESTS, PAIRS, PROBES, Bench, Settings
from scripts.lib.generation_workloads import LONG, SHORT
from scripts.lib.generation_yardstick import ENGINE, STATIC, UNSHARED, VLLM, Generated
from scripts.lib.load import Target
from scripts.lib.openai_api import read_chat

STEP_S = 0.002


class FakeModel:
    """A model that streams a token every STEP_S, on a server of its own."""

    name = "m"
    context = 8192

    def __init__(self) -> None:
        self.running = self.most = 0
        self.asked: list[dict[str, Any]] = []
        self.broken_off = 0
        self.withheld = 0  # tokens that each answer is short of
        self.status = 200
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        if self.status != 200:
            return web.json_response({}, status=self.status)
        self.running += 1
        self.most = max(self.most, self.running)
        count = body["max_tokens"] - self.withheld
        try:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await asyncio.sleep(STEP_S)
            await response.prepare(request)
            for number in range(count):
                finish = "length" if number == count - 1 else None
                event = {"choices": [{"index": 0, "text": "", "finish_reason": finish}]}
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                await asyncio.sleep(STEP_S)
            usage = {"choices": [], "usage": {"completion_tokens": count}}
            await response.write(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")
            return response
        except (asyncio.CancelledError, ConnectionError):
            self.broken_off += 1
            raise
        finally:
            self.running -= 1

    def target(self, reader: load.Reader = read_chat) -> Target:
        return Target(f"http://127.0.0.1:{self.port}/v1/completions", reader=reader)

    def describe(self) -> dict[str, Any]:
        return {"max_model_len": self.context, "stats": {"running": self.running}}


class FakeSide:
    """Answers at once, and says that it took so long."""

    def __init__(self, kind: str, seconds: float, events: list[str], token: int = 0) -> None:
        self.kind, self.seconds, self.events, self.token = kind, seconds, events, token

    def generate(self, requests: Sequence[tuple[Sequence[int], int]], at_once: int) -> Generated:
        self.events.append(f"{self.kind} {len(requests)}")
        each = tuple(self.seconds for _ in requests)
        return Generated(self.seconds, each, each, tuple((self.token,) * new for _, new in requests))


@pytest.fixture
def model() -> Iterator[FakeModel]:
    made = FakeModel()
    yield made
    made.stop()


def bench(model: FakeModel, events: list[str], *workloads: str, **changes: Any) -> Bench:
    settings = Settings(**{"workloads": workloads, "rounds": 1, "threads": 1, "at_once": 16, "requests": 4} | changes)
    seconds = {STATIC: 100.0, UNSHARED: 8.0, VLLM: 1.0}
    sides = {kind: FakeSide(kind, each, events) for kind, each in seconds.items()}

    def side(kind: str) -> AbstractContextManager[FakeSide]:
        return nullcontext(sides[kind])

    engine = FakeSide(ENGINE, 2.0, events)
    return Bench(model, engine, side, "float32", settings, range(10, 90), lambda label: nullcontext())


def test_replies_go_through_every_side_with_the_same_requests(model: FakeModel) -> None:
    events: list[str] = []
    found = bench(model, events, "replies", rounds=2, at_once=4).measure()
    assert events == [f"{STATIC} 4", f"{ENGINE} 4"] * 2
    assert [(run.side, run.round) for run in found.runs] == [
        (side, number) for number in (0, 1) for side in (STATIC, SERVED, ENGINE)
    ]
    for run in found.runs:
        assert (run.requests, run.tokens) == (4, 3 * SHORT + LONG)
        assert run.short_p95_s is not None
    served = found.runs[1]
    assert SHORT * STEP_S < (served.short_p95_s or 0) < served.seconds
    assert served.seconds > LONG * STEP_S
    assert (served.first_p50_s or 9) < (served.short_p95_s or 0)
    assert found.agreement == 1.0
    assert model.most == 4
    prompts = [tuple(body["prompt"]) for body in model.asked]
    assert len(set(prompts)) == len(prompts)  # no round finds another's in the cache


def test_answers_that_differ_are_counted(model: FakeModel) -> None:
    made = bench(model, [], "replies", at_once=4)
    made._engine.token = 1  # type: ignore[attr-defined]
    assert made.measure().agreement == 0.0


def test_sharegpt_and_prefix_have_their_sides(model: FakeModel) -> None:
    events: list[str] = []
    found = bench(model, events, "sharegpt", "prefix").measure()
    assert [(run.workload, run.side) for run in found.runs] == [
        ("sharegpt", STATIC), ("sharegpt", SERVED), ("prefix", UNSHARED), ("prefix", ENGINE),
    ]  # fmt: skip
    assert found.agreement is None
    assert {run.short_p95_s for run in found.runs} == {None}


def test_http_and_the_engine_alone_take_turns(model: FakeModel) -> None:
    events: list[str] = []
    found = bench(model, events, "http", rounds=2).measure()
    assert events == [f"{ENGINE} {HTTP_REQUESTS}"] * 2 * PAIRS
    assert [run.side for run in found.runs] == [ENGINE, SERVED, SERVED, ENGINE] * PAIRS
    assert [run.round for run in found.runs] == [number for number in range(2 * PAIRS) for _ in range(2)]
    assert len({(run.requests, run.tokens) for run in found.runs}) == 1
    answers = [body["max_tokens"] for body in model.asked[-HTTP_REQUESTS:]]
    assert (min(answers), max(answers)) == (HTTP_ANSWERS[0] + 1, HTTP_ANSWERS[1] - 1)
    prompts = [tuple(body["prompt"]) for body in model.asked]
    assert len(set(prompts)) == len(prompts)


def test_vllm_has_its_turn_beside_the_engine_alone(model: FakeModel) -> None:
    events: list[str] = []
    found = bench(model, events, "replies", "sharegpt", vllm=True).measure()
    assert [(run.workload, run.side) for run in found.runs] == [
        (workload, side) for workload in ("replies", "sharegpt") for side in (STATIC, SERVED, ENGINE, VLLM)
    ]
    assert events == [f"{side} 4" for side in (STATIC, ENGINE, VLLM)] * 2
    assert len({run.tokens for run in found.runs if run.workload == "sharegpt"}) == 1


def test_the_first_token_is_timed_while_others_decode(model: FakeModel) -> None:
    found = bench(model, [], "first_token").measure()
    (first,) = found.first_tokens
    assert first.decoding == DECODING
    assert first.prefill_s == 2.0
    assert first.step_s >= STEP_S
    assert first.busy_s >= STEP_S
    assert model.most == DECODING + 1
    assert model.broken_off == DECODING
    assert [body["max_tokens"] for body in model.asked].count(1) == PROBES + 1


def test_what_is_not_comparable_is_no_figure(model: FakeModel) -> None:
    model.context = 615
    with pytest.raises(UserError, match="prefix needs a context of 616"):
        bench(model, [], "prefix").measure()
    model.context = 8192
    with pytest.raises(UserError, match="room for 9 requests"):
        bench(model, [], "first_token", at_once=8).measure()
    model.withheld = 1
    with pytest.raises(UserError, match="as many tokens"):
        bench(model, [], "replies", at_once=4).measure()
    model.status = 503
    with pytest.raises(UserError, match="16 of 16 requests failed: status 503"):
        bench(model, [], "replies").measure()
