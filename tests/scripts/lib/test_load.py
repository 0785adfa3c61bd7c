"""The load generator against a server that we control: what it counts, how it ends, what it says of itself."""

import asyncio
import dataclasses
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from scripts.lib.interrupts import stop_on_signals
from scripts.lib.load import NO_ANSWER, Due, LoadResult, Sample, Target, closed_loop, open_loop, run
from scripts.lib.stats import summarize
from scripts.lib.workloads import Body

BODIES = [Body(f'{{"text": "{number}"}}'.encode(), texts=1, tokens=3) for number in range(5)]


class Fake:
    """A server that counts what reaches it."""

    def __init__(self, delay_s: float = 0.0, status: Callable[[int], int] = lambda number: 200) -> None:
        self.delay_s = delay_s
        self.status = status
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.connections: set[Any] = set()
        self.open = 0
        self.most_open = 0
        self.url = ""

    async def _answer(self, request: web.Request) -> web.Response:
        number = len(self.bodies)
        self.connections.add(request.transport)
        self.bodies.append(await request.read())
        self.headers.append(dict(request.headers))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self.open -= 1
        status = self.status(number)
        if status == NO_ANSWER and request.transport is not None:
            request.transport.abort()
        return web.Response(body=b"12345678", status=status or 500)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Fake"]:
        app = web.Application()
        app.router.add_post("/predictions/m", self._answer)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{port}/predictions/m"
        try:
            yield self
        finally:
            await runner.cleanup()


def drive(fake: Fake, **options: Any) -> LoadResult:
    async def scenario() -> LoadResult:
        async with fake.running():
            target = Target(fake.url, {"Authorization": "Bearer t"}, timeout_s=options.pop("timeout_s", 10))
            return await closed_loop(target, BODIES, **options)

    return asyncio.run(scenario())


def test_the_count_is_kept_and_the_bodies_cycle() -> None:
    fake = Fake()
    seen: list[Sample] = []
    result = drive(fake, clients=1, requests=12, on_sample=seen.append)
    assert len(result.samples) == 12
    assert tuple(seen) == result.samples
    assert fake.bodies == [BODIES[number % 5].data for number in range(12)]
    assert {(sample.status, sample.received, sample.texts, sample.tokens) for sample in seen} == {(200, 8, 1, 3)}


def test_headers_are_sent_and_connections_are_kept() -> None:
    fake = Fake(delay_s=0.002)
    drive(fake, clients=4, requests=40, warmup=8)
    assert {headers["Authorization"] for headers in fake.headers} == {"Bearer t"}
    assert {headers["Content-Type"] for headers in fake.headers} == {"application/json"}
    assert len(fake.connections) == 4


def test_all_clients_send_at_once_and_never_more() -> None:
    fake = Fake(delay_s=0.02)
    drive(fake, clients=8, requests=40)
    assert fake.most_open == 8


def test_the_warm_up_is_over_before_the_window_and_is_not_counted() -> None:
    fake = Fake(delay_s=0.005)
    seen_before: list[tuple[int, int]] = []

    async def before() -> None:
        seen_before.append((len(fake.bodies), fake.open))

    result = drive(fake, clients=3, requests=5, warmup=7, before=before)
    assert seen_before == [(7, 0)]
    assert len(result.samples) == 5
    assert fake.bodies[7] == BODIES[0].data


def test_a_duration_ends_the_window_and_the_last_answers_count() -> None:
    result = drive(Fake(delay_s=0.02), clients=2, duration_s=0.3)
    assert 10 <= len(result.samples) <= 32
    assert 0.3 <= result.wall_s < 1.0
    assert all(sample.ok and sample.due_s < 0.3 for sample in result.samples)


def test_latencies_are_the_servers_delay() -> None:
    summary = summarize(drive(Fake(delay_s=0.05), clients=2, requests=10, warmup=2))
    assert summary.p50_ms is not None
    assert 50 <= summary.p50_ms < 150


def test_errors_are_counted_by_status_and_do_not_stop_the_load() -> None:
    statuses = {0: 503, 3: 400, 4: NO_ANSWER}
    result = drive(Fake(status=lambda number: statuses.get(number, 200)), clients=1, requests=10)
    assert len(result.samples) == 10
    assert Counter(sample.status for sample in result.samples) == {200: 7, 503: 1, 400: 1, NO_ANSWER: 1}
    (lost,) = [sample for sample in result.samples if sample.status == NO_ANSWER]
    assert "Disconnected" in lost.error or "Reset" in lost.error


def test_a_request_past_its_time_has_no_answer() -> None:
    result = drive(Fake(delay_s=5), clients=2, requests=2, timeout_s=0.1)
    assert [sample.status for sample in result.samples] == [NO_ANSWER] * 2
    assert all("Timeout" in sample.error and sample.latency_s < 2 for sample in result.samples)


def test_nobody_there_is_errors_not_a_crash() -> None:
    async def scenario() -> LoadResult:
        return await closed_loop(Target("http://127.0.0.1:9/x"), BODIES, clients=2, requests=4)

    assert [sample.status for sample in asyncio.run(scenario()).samples] == [NO_ANSWER] * 4


def test_a_cancel_ends_every_client() -> None:
    async def scenario() -> tuple[int, int]:
        async with Fake(delay_s=0.05).running() as fake:
            task = asyncio.create_task(closed_loop(Target(fake.url), BODIES, clients=6, duration_s=60))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            sent = len(fake.bodies)
            await asyncio.sleep(0.2)
            return len(fake.bodies) - sent, len(asyncio.all_tasks()) - 1

    sent_afterwards, tasks_left = asyncio.run(scenario())
    assert sent_afterwards == 0
    assert tasks_left <= 1  # the fake's own housekeeping


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_load_and_then_does_what_it_is_meant_to(number: int) -> None:
    async def scenario() -> None:
        async with Fake().running() as fake:
            asyncio.get_running_loop().call_later(0.3, os.kill, os.getpid(), number)
            await closed_loop(Target(fake.url), BODIES, clients=6, duration_s=60)

    with stop_on_signals():
        handler = signal.getsignal(number)
        with pytest.raises(SystemExit) as ended:
            run(scenario())
        assert ended.value.code == 128 + number
        assert signal.getsignal(number) == handler


def test_without_a_signal_run_is_asyncio_run() -> None:
    async def scenario(fail: bool) -> int:
        if fail:
            raise RuntimeError("no")
        return 5

    assert run(scenario(False)) == 5
    with pytest.raises(RuntimeError, match="no"):
        run(scenario(True))


def test_a_failure_in_the_callback_is_not_swallowed() -> None:
    def fail(sample: Sample) -> None:
        raise RuntimeError("no room")

    with pytest.raises(ExceptionGroup) as failure:
        drive(Fake(), clients=2, requests=4, on_sample=fail)
    assert failure.group_contains(RuntimeError, match="no room")


def test_it_knows_its_own_share() -> None:
    result = drive(Fake(delay_s=0.05), clients=1, requests=4)
    assert 0 < result.loop_share < 0.8
    assert not result.was_bottleneck
    assert dataclasses.replace(result, loop_share=0.95).was_bottleneck


@pytest.mark.parametrize("options", [{}, {"requests": 1, "duration_s": 1.0}])
def test_a_load_needs_exactly_one_end(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="either requests or duration_s"):
        drive(Fake(), clients=1, **options)


@pytest.mark.parametrize(("clients", "bodies"), [(0, BODIES), (1, [])])
def test_a_load_needs_clients_and_bodies(clients: int, bodies: list[Body]) -> None:
    run: Callable[[], Awaitable[LoadResult]] = lambda: closed_loop(  # noqa: E731
        Target("http://127.0.0.1:9"), bodies, clients=clients, requests=1
    )
    with pytest.raises(ValueError, match="at least one client"):
        asyncio.run(run())  # type: ignore[arg-type]


def in_the_open(fake: Fake, dues: list[Due], **options: Any) -> LoadResult:
    async def scenario() -> LoadResult:
        async with fake.running():
            return await open_loop(Target(fake.url), dues, **options)

    return run(scenario())


def test_an_open_loop_sends_by_the_clock_and_counts_from_it() -> None:
    """A server that takes 0.3 s a request sees the next ones come all the same."""
    fake = Fake(delay_s=0.3)
    dues = [Due(number * 0.05, BODIES[number], {"X-Number": str(number)}) for number in range(5)]
    result = in_the_open(fake, dues)
    assert fake.most_open >= 4
    assert result.clients >= 4
    assert sorted(fake.bodies) == [body.data for body in BODIES]
    assert {headers["X-Number"] for headers in fake.headers} == set("01234")
    assert sorted(sample.due_s for sample in result.samples) == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    assert all(sample.latency_s >= 0.29 for sample in result.samples)


def test_latency_counts_from_when_a_request_was_due() -> None:
    """Requests that the generator itself sends late are not excused."""
    result = in_the_open(Fake(), [Due(-1.0, BODIES[0])])
    assert result.samples[0].latency_s > 1
    assert result.late_s > 1
    assert result.was_bottleneck


def test_an_open_loops_warm_up_is_not_measured() -> None:
    fake = Fake()
    result = in_the_open(fake, [Due(0, BODIES[0])], warmup=BODIES)
    assert (len(result.samples), len(fake.bodies)) == (1, 6)
