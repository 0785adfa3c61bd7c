"""A running server under load: what is asked of it, what is read from its counters, and how a load ends."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from aiohttp import web

from scripts.lib.drive import Drive, Driven, during, metrics_url, model_of, shown_url
from scripts.lib.errors import UserError
from scripts.lib.load import LoadResult, OnSample, Sample, Target, run
from scripts.lib.load_plan import Closed, Load, Open, Stretch, plan
from scripts.lib.objective import Objective
from scripts.lib.schedule import Phase, Schedule, steady
from scripts.lib.workloads import Body

BODIES = [Body(f'{{"text": "{number}"}}'.encode(), texts=1, tokens=0) for number in range(3)]
Answer = Callable[[int], Awaitable[web.Response]]


async def good(number: int) -> web.Response:
    return web.json_response([1.0])


class Fake:
    """A server with one model whose batches are of two, which counts as the handlers do."""

    def __init__(self, answer: Answer = good, counts: bool = True) -> None:
        self.answer = answer
        self.counts = counts
        self.seen = 0
        self.others = 0
        self.url = self.base = ""

    async def _predict(self, request: web.Request) -> web.Response:
        await request.read()
        self.seen += 1
        return await self.answer(self.seen)

    async def _metrics(self, request: web.Request) -> web.Response:
        counted = self.seen + self.others
        counters = {
            'requests_total{model_name="m"}': counted,
            'batches_total{model_name="m"}': counted // 2,
            'tokens_total{model_name="m"}': 9 * counted,
            'padding_tokens_total{model_name="m"}': counted,
            'batch_size_bucket{model_name="m",le="1"}': 0,
            'batch_size_bucket{model_name="m",le="2"}': counted // 2,
            'batch_size_bucket{model_name="m",le="+Inf"}': counted // 2,
        }
        prefix = "batchserve" if self.counts else "ts"
        text = "".join(
            f"# TYPE {prefix}_{name.partition('{')[0]} counter\n{prefix}_{name} {value}\n"
            for name, value in counters.items()
        )
        return web.Response(text=text)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Fake"]:
        app = web.Application()
        app.router.add_post("/predictions/m", self._predict)
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        self.base = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
        self.url = f"{self.base}/predictions/m"
        try:
            yield self
        finally:
            await runner.cleanup()


@contextmanager
def unseen(label: str, load: Load) -> Iterator[OnSample]:
    yield lambda sample: None


def drive(fake: Fake, *loads: Load, metrics: bool = True, **options: Any) -> Driven:
    async def scenario() -> Driven:
        async with fake.running():
            asked = Drive(Target(fake.url), BODIES, loads, metrics=fake.base if metrics else None, **options)
            return await asked.run(unseen)

    return run(scenario())


def test_counters_are_of_exactly_the_window() -> None:
    """Neither the first request nor the warm-up of any window is in its figures."""
    fake = Fake()
    driven = drive(fake, Closed(2, None, 20), Open("100/s", 0.2, steady(100, 0.2, "constant")), warmup=6)
    first, second = driven.windows
    assert fake.seen == 1 + (6 + 20) + (6 + 20)
    for window in (first, second):
        assert window.summary.requests == 20
        assert window.batching is not None
        assert window.batching.requests == 20
        assert window.batching.effective_batch_size == pytest.approx(2, abs=0.2)
        assert window.batching.padding_share == pytest.approx(0.1)
        assert sum(window.batching.batch_sizes.values()) == window.batching.batches
        assert sum(second.due for second in window.timeline) == 20
    assert (first.label, first.open_loop, first.clients) == ("2 clients", False, 2)
    assert (second.label, second.open_loop) == ("100/s", True)
    assert second.due_per_s == pytest.approx(100)
    assert not driven.interrupted
    assert all("took at most" in note or "bottleneck" in note for note in driven.notes)


def test_requests_of_others_are_told() -> None:
    fake = Fake()

    async def with_company(number: int) -> web.Response:
        fake.others += number == 5
        return web.json_response([])

    fake.answer = with_company
    assert (
        "3 clients: 1 requests of others reached the model meanwhile" in drive(fake, Closed(3, None, 9), warmup=0).notes
    )


def test_shed_requests_are_no_errors_and_both_are_told() -> None:
    statuses = {3: 503, 4: 429, 5: 500}

    async def answer(number: int) -> web.Response:
        return web.Response(status=statuses.get(number, 200))

    driven = drive(Fake(answer), Closed(1, None, 10), warmup=0, objective=Objective.parse("p95<=10s"))
    (window,) = driven.windows
    assert (window.summary.errors, window.summary.errors_by_status, window.summary.shed) == (1, {500: 1}, 2)
    assert window.goodput is not None
    assert (window.goodput.requests, window.goodput.share, window.goodput.met) == (7, 0.7, False)
    assert "1 client: errors: 500 × 1" in driven.notes
    assert "1 client: the server refused 2 requests as too many (429 or 503)" in driven.notes


@pytest.mark.parametrize("counts", [True, False])
def test_without_counters_the_load_is_measured_all_the_same(counts: bool) -> None:
    """Nothing listens on 8082 of the fake's host, or it has counters of another kind: it says so."""
    driven = drive(Fake(counts=False), Closed(1, None, 3), metrics=counts, warmup=0)
    assert driven.windows[0].batching is None
    assert driven.windows[0].summary.requests == 3
    assert any(note.startswith("no batch sizes and no padding") for note in driven.notes)


def test_metrics_that_are_named_must_be_there() -> None:
    async def scenario() -> None:
        async with Fake().running() as fake:
            asked = Drive(Target(fake.url), BODIES, (Closed(1, None, 3),), metrics="http://127.0.0.1:9/metrics")
            await asked.run(unseen)

    with pytest.raises(UserError, match=r"127\.0\.0\.1:9/metrics can't be read"):
        run(scenario())


@pytest.mark.parametrize(
    ("status", "text", "hint"),
    [
        (404, "", "no such model"),
        (403, "", "--token"),
        (400, '{"code": 400, "type": "InvalidKeyException", "message": "Token Authorization failed."}', "--token"),
    ],
)
def test_a_server_that_lets_nobody_in_is_not_put_under_load(status: int, text: str, hint: str) -> None:
    async def answer(number: int) -> web.Response:
        return web.Response(status=status, text=text)

    fake = Fake(answer)
    with pytest.raises(UserError, match=f"answers {status}") as error:
        drive(fake, Closed(4, None, 100))
    assert hint in error.value.hint
    assert fake.seen == 1


def test_nobody_there_is_said_at_once() -> None:
    asked = Drive(Target("http://127.0.0.1:9/predictions/m"), BODIES, (Closed(1, 60.0),))
    with pytest.raises(UserError, match="does not answer"):
        run(asked.run(unseen))


def test_a_first_request_that_is_bad_is_told_but_measured() -> None:
    async def answer(number: int) -> web.Response:
        return web.Response(status=422)

    driven = drive(Fake(answer), Closed(1, None, 2), warmup=0)
    assert driven.windows[0].summary.errors_by_status == {422: 2}
    assert "the very first request was answered with status 422" in driven.notes


def test_interrupt_ends_it_with_what_was_measured() -> None:
    async def answer(number: int) -> web.Response:
        if number == 12:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        return web.json_response([])

    before = signal.getsignal(signal.SIGINT)
    driven = drive(Fake(answer), Closed(1, None, 5), Closed(1, 60.0), Closed(2, 60.0), warmup=0)
    assert signal.getsignal(signal.SIGINT) == before
    assert driven.interrupted
    assert [window.summary.requests for window in driven.windows] == [5, 5]
    assert driven.windows[1].unanswered == 1
    assert "interrupted: this is what was measured so far" in driven.notes
    assert "1 client: 1 requests were still unanswered when it was stopped" in driven.notes


def test_each_step_is_a_part_of_the_window() -> None:
    (load,) = plan(steps="100x0.2,200x0.2", arrivals="constant")
    whole, slow, fast = drive(Fake(), load, warmup=0).windows
    assert [window.part for window in (whole, slow, fast)] == [False, True, True]
    assert (slow.summary.requests, fast.summary.requests) == (20, 40)
    assert whole.summary.requests == 60
    assert (slow.due_per_s, fast.due_per_s) == (pytest.approx(100), pytest.approx(200))
    assert slow.batching is None
    assert fast.timeline[0].due > 0


def test_a_stretch_lasts_until_its_last_answer() -> None:
    samples = tuple(Sample(at, 3.0, 200, 1, 1, 1) for at in (0.0, 0.999, 1.0, 1.5))
    result = LoadResult(samples, 4, 4.5, 0.1, 0.1, unanswered=2)
    first, second = (during(result, Stretch("", start, start + 1), False) for start in (0, 1))
    assert [sample.due_s for sample in first.samples] == [0.0, 0.999]
    assert [sample.due_s for sample in second.samples] == [0.0, 0.5]
    assert (first.wall_s, second.wall_s) == (pytest.approx(3.999), pytest.approx(3.5))
    cut = LoadResult((), 1, 1.25, 0.1, 0.1)
    assert during(cut, Stretch("", 1, 5), True).wall_s == pytest.approx(0.25)


def test_a_load_that_is_stopped_leaves_out_the_steps_that_it_did_not_reach() -> None:
    load = Open(
        "l", 120, Schedule((Phase(60, 1, 1), Phase(60, 2, 2))), stretches=(Stretch("a", 0, 60), Stretch("b", 60, 120))
    )
    result = LoadResult((Sample(0, 0.1, 200, 1, 1, 1),), 1, 5.0, 0.1, 0.1)
    windows = list(Drive(Target("http://x"), BODIES, (load,))._judged(load, result, None, True))
    assert [window.label for window in windows] == ["l", "a"]
    assert windows[0].due_per_s == pytest.approx(1 / 5)


@pytest.mark.parametrize(
    ("url", "model"),
    [
        ("http://h:8080/predictions/minilm", "minilm"),
        ("http://h:8080/predictions/minilm/1.0/v1/embeddings", "minilm"),
        ("http://h/v2/models/a-b/infer", "a-b"),
        ("http://h/v1/models/ab:predict", "ab"),
        ("http://h/v1/embeddings", None),
    ],
)
def test_the_model_of_a_url(url: str, model: str | None) -> None:
    assert model_of(url) == model


def test_where_metrics_are() -> None:
    assert metrics_url("https://h:8443/predictions/m", None) == "http://h:8082/metrics"
    assert metrics_url("http://[::1]:8080/predictions/m", None) == "http://[::1]:8082/metrics"
    assert metrics_url("http://h", "http://other:9/") == "http://other:9/metrics"
    assert metrics_url("http://h", "http://other:9/m") == "http://other:9/m"


def test_a_url_is_shown_without_its_secrets() -> None:
    assert shown_url("http://user:pw@h:8080/predictions/m?key=s#x") == "http://h:8080/predictions/m"
