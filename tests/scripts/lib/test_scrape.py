"""Counters before and after a window → what the server did in it."""

import asyncio

import pytest
from aiohttp import web

from scripts.lib.scrape import Snapshot, grown, scrape, settled, window


def exposition(model: str = "minilm", requests: float = 0, batches: float = 0, **more: float) -> str:
    """What TorchServe's metrics port says in Prometheus mode, its own metrics and ours."""
    labels = f'model_name="{model}",Hostname="h",'
    lines = [
        "# HELP ts_inference_requests_total Total number of inference requests.",
        "# TYPE ts_inference_requests_total counter",
        f'ts_inference_requests_total{{model_name="{model}",model_version="default",hostname="h",}} {requests}',
        "# HELP CPUUtilization Torchserve prometheus gauge metric with unit: Percent",
        "# TYPE CPUUtilization gauge",
        'CPUUtilization{Level="Host",Hostname="h",} 50.0',
        "# TYPE batchserve_requests_total counter",
        f"batchserve_requests_total{{{labels}}} {requests}",
        "# TYPE batchserve_batches_total counter",
        f"batchserve_batches_total{{{labels}}} {batches}",
        "# TYPE batchserve_batch_size_bucket counter",
    ]
    for name, value in more.items():
        kind, _, label = name.partition("__")
        if kind == "bucket":
            bound = label.replace("inf", "+Inf")
            lines.append(f'batchserve_batch_size_bucket{{{labels}le="{bound}",}} {value}')
        elif kind == "errors":
            lines.append(f'batchserve_errors_total{{{labels}code="{label}",}} {value}')
        else:
            lines.append(f"batchserve_{kind}_total{{{labels}}} {value}")
    return "\n".join(lines) + "\n"


def test_a_window_is_the_difference() -> None:
    before = Snapshot.parse(exposition(requests=100, batches=50, tokens=1000, padding_tokens=10, items=100))
    after = Snapshot.parse(
        exposition(requests=740, batches=70, tokens=10900, padding_tokens=110, items=740, micro_batches=60)
    )
    seen = window(before, after, "minilm")
    assert (seen.requests, seen.batches, seen.items, seen.tokens) == (640, 20, 640, 9900)
    assert seen.effective_batch_size == 32
    assert seen.padding_share == pytest.approx(100 / 10000)
    assert seen.micro_batches_per_batch == 3


def test_buckets_come_apart() -> None:
    before = Snapshot.parse(exposition(bucket__1=5, bucket__2=5, bucket__32=5, bucket__inf=5))
    after = Snapshot.parse(exposition(bucket__1=7, bucket__2=7, bucket__32=17, bucket__inf=18))
    assert window(before, after, "minilm").batch_sizes == {1.0: 2, 32.0: 10, float("inf"): 1}


def test_errors_are_the_new_ones() -> None:
    before = Snapshot.parse(exposition(errors__400=3, errors__413=1))
    after = Snapshot.parse(exposition(errors__400=5, errors__413=1, errors__507=1))
    assert window(before, after, "minilm").errors == {"400": 2, "507": 1}


def test_other_models_do_not_count() -> None:
    text = exposition(requests=5, batches=5)
    other = exposition(model="other", requests=70, batches=1)
    after = Snapshot.parse(text + other)
    assert window(Snapshot(), after, "minilm").requests == 5
    assert window(Snapshot(), after, "other").effective_batch_size == 70


def test_an_idle_window_has_no_averages() -> None:
    same = Snapshot.parse(exposition(requests=5, batches=5))
    seen = window(same, same, "minilm")
    assert (seen.requests, seen.effective_batch_size, seen.padding_share) == (0, None, None)
    assert seen.micro_batches_per_batch is None
    assert seen.batch_sizes == {}


def test_a_reset_counter_starts_again() -> None:
    before = Snapshot.parse(exposition(requests=500, batches=50))
    after = Snapshot.parse(exposition(requests=30, batches=10))
    assert window(before, after, "minilm").requests == 30


def test_each_series_starts_again_by_itself() -> None:
    before = Snapshot.parse(exposition(errors__400=3, errors__413=10, bucket__1=9, bucket__8=10, bucket__inf=10))
    after = Snapshot.parse(exposition(errors__400=50, errors__413=1, bucket__1=2, bucket__8=5, bucket__inf=5))
    seen = window(before, after, "minilm")
    assert seen.errors == {"400": 47, "413": 1}
    assert seen.batch_sizes == {1.0: 2, 8.0: 3}
    gone = Snapshot.parse(exposition(requests=500).replace('Hostname="h"', 'Hostname="old"'))
    assert window(gone, after, "minilm").requests == 0
    assert grown(before, after, "batchserve_errors_total", model_name="minilm", code="400") == 47


def test_not_prometheus_is_an_error() -> None:
    with pytest.raises(ValueError):
        Snapshot.parse("<html>not here</html>")


def test_settled_waits_for_the_counters_that_lag_behind() -> None:
    answers = [exposition(requests=1), exposition(requests=1), exposition(requests=1), exposition(requests=8)]

    async def scenario() -> tuple[float, float]:
        async def metrics(request: web.Request) -> web.Response:
            return web.Response(text=answers.pop(0) if len(answers) > 1 else answers[0])

        app = web.Application()
        app.router.add_get("/metrics", metrics)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/metrics"  # type: ignore[attr-defined]
        try:
            first = (await scrape(url)).total("batchserve_requests_total", "minilm")
            last = (await settled(url, "minilm", requests=8)).total("batchserve_requests_total", "minilm")
        finally:
            await runner.cleanup()
        return first, last

    assert asyncio.run(scenario()) == (1, 8)
