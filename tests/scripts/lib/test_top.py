"""Two readings of a server → what it did, as numbers, tables and JSON."""

import io
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from scripts.lib.connection import Connection
from scripts.lib.management import ManagementClient, Model
from scripts.lib.scrape import Snapshot
from scripts.lib.top import Reading, activity, metrics_url, quantile
from scripts.lib.top_view import as_json, histogram, view

INF = float("inf")
FOREIGN = """\
# TYPE ts_inference_requests_total counter
ts_inference_requests_total{{model_name="m",model_version="default",hostname="h",}} {requests}
ts_inference_requests_total{{model_name="m",model_version="1.0",hostname="h",}} 5.0
# TYPE ts_inference_latency_microseconds counter
ts_inference_latency_microseconds{{model_name="m",model_version="default",hostname="h",}} {latency}
# TYPE ts_queue_latency_microseconds counter
ts_queue_latency_microseconds{{model_name="m",model_version="default",hostname="h",}} {queue}
# TYPE Requests2XX counter
Requests2XX{{Level="Host",Hostname="h",}} {requests}
# TYPE CPUUtilization gauge
CPUUtilization{{Level="Host",Hostname="h",}} 42.0
# TYPE GPUUtilization gauge
GPUUtilization{{Level="Host",DeviceId="1",Hostname="h",}} 75.0
"""
OURS = """\
# TYPE batchserve_batches_total counter
batchserve_batches_total{{model_name="m",Hostname="h",}} {batches}
# TYPE batchserve_requests_total counter
batchserve_requests_total{{model_name="m",Hostname="h",}} {requests}
# TYPE batchserve_tokens_total counter
batchserve_tokens_total{{model_name="m",Hostname="h",}} {tokens}
# TYPE batchserve_padding_tokens_total counter
batchserve_padding_tokens_total{{model_name="m",Hostname="h",}} {padding}
# TYPE batchserve_batch_size_limit gauge
batchserve_batch_size_limit{{model_name="m",Hostname="h",}} 32.0
# TYPE batchserve_batch_size_bucket counter
batchserve_batch_size_bucket{{model_name="m",le="1",Hostname="h",}} {ones}
batchserve_batch_size_bucket{{model_name="m",le="8",Hostname="h",}} {batches}
batchserve_batch_size_bucket{{model_name="m",le="+Inf",Hostname="h",}} {batches}
# TYPE batchserve_handler_seconds_bucket counter
batchserve_handler_seconds_bucket{{model_name="m",le="0.1",Hostname="h",}} {requests}
batchserve_handler_seconds_bucket{{model_name="m",le="+Inf",Hostname="h",}} {requests}
# TYPE batchserve_errors_total counter
batchserve_errors_total{{model_name="m",code="invalid_type",status="400",Hostname="h",}} {ones}
"""
GENERATION = """\
# TYPE batchserve_generated_tokens_total counter
batchserve_generated_tokens_total{{model_name="m",Hostname="h",}} {tokens}
# TYPE batchserve_running gauge
batchserve_running{{model_name="m",Hostname="h",}} 3.0
# TYPE batchserve_cache_used_ratio gauge
batchserve_cache_used_ratio{{model_name="m",Hostname="h",}} 0.5
# TYPE batchserve_time_to_first_token_seconds_bucket counter
batchserve_time_to_first_token_seconds_bucket{{model_name="m",le="0.5",Hostname="h",}} {ones}
batchserve_time_to_first_token_seconds_bucket{{model_name="m",le="+Inf",Hostname="h",}} {ones}
"""
BEFORE = {"requests": 100, "latency": 1e6, "queue": 0, "batches": 40, "tokens": 900, "padding": 100, "ones": 10}
AFTER = {"requests": 300, "latency": 5e6, "queue": 4e5, "batches": 90, "tokens": 1800, "padding": 200, "ones": 30}
MODEL = Model.model_validate(
    {
        "modelName": "m",
        "modelVersion": "1.0",
        "jobQueueStatus": {"remainingCapacity": 97, "pendingRequests": 3},
        "workers": [
            {"id": "9000", "status": "READY", "pid": 77, "memoryUsage": 3 * 2**20, "gpu": False},
            {"id": "9001", "status": "UNLOADING", "pid": -1, "memoryUsage": 0, "gpu": False},
        ],
    }
)


def readings(page: str) -> tuple[Reading, Reading]:
    """A server 10 s apart."""
    first, second = (Snapshot.parse(page.format(**values)) for values in (BEFORE, AFTER))
    return Reading(100.0, [MODEL], first), Reading(110.0, [MODEL], second)


def shown(page: str) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(view(activity(*readings(page)), "http://s"))
    return console.export_text()


def test_a_foreign_server_tells_its_own() -> None:
    seen = activity(*readings(FOREIGN))
    (model,) = seen.models
    assert (model.requests_per_s, model.latency_ms, model.queue_ms) == (20.0, 20.0, 2.0)
    assert (model.pending, model.room, [worker.ready for worker in model.workers]) == (3, 100, [True, False])
    assert (model.batching, model.generation) == (None, None)
    assert (seen.cpu, seen.memory, seen.answers_per_s["2xx"]) == (42.0, None, 20.0)
    assert [(gpu.device, gpu.busy, gpu.memory) for gpu in seen.gpus] == [("1", 75.0, None)]


def test_ours_tells_batches_too() -> None:
    (model,) = activity(*readings(FOREIGN + OURS)).models
    assert model.batching is not None
    window = model.batching.window
    assert (window.effective_batch_size, window.padding_share, model.batching.limit) == (4.0, 0.1, 32)
    assert window.batch_sizes == {1.0: 20, 8.0: 30}
    assert window.errors == {"invalid_type": 20}
    assert model.batching.worker_ms == {"p50": pytest.approx(50), "p95": pytest.approx(95)}
    assert model.generation is None


def test_mean_times_are_of_the_requests_that_a_worker_took() -> None:
    """As many again were refused by the queue."""
    first, second = (
        Snapshot.parse(FOREIGN.format(**{**values, "requests": 2 * values["requests"]}) + OURS.format(**values))
        for values in (BEFORE, AFTER)
    )
    (model,) = activity(Reading(100.0, [MODEL], first), Reading(110.0, [MODEL], second)).models
    assert (model.requests_per_s, model.latency_ms, model.queue_ms) == (40.0, 20.0, 2.0)


def test_a_generation_model() -> None:
    (model,) = activity(*readings(FOREIGN + GENERATION)).models
    told = model.generation
    assert told is not None
    assert (told.running, told.cache_used, told.generated_tokens_per_s) == (3, 0.5, 90.0)
    assert told.first_token_ms == {"p50": pytest.approx(250), "p95": pytest.approx(475)}
    assert told.per_token_ms == {"p50": None, "p95": None}
    text = shown(FOREIGN + GENERATION)
    assert "90 tokens/s" in text
    assert "250 ms, 475 ms" in text


def test_what_a_person_sees() -> None:
    foreign, ours = shown(FOREIGN), shown(FOREIGN + OURS)
    for part in ("m 1.0", "1/2", "20.0/s", "20.0 ms", "3/100", "CPU", "42.0 %", "GPU 1", "UNLOADING", "3 MiB"):
        assert part in foreign, part
        assert part in ours, part
    assert "padding" not in foreign
    for part in ("4.0/32", "10%", "invalid_type 2.0/s", "95.0 ms", "▆  █"):
        assert part in ours, part


def test_json_is_json() -> None:
    told = json.loads(json.dumps(as_json(activity(*readings(FOREIGN + OURS + GENERATION))), allow_nan=False))
    (model,) = told["models"]
    assert model["batching"]["window"]["batch_sizes"] == {"1": 20, "8": 30}
    assert model["batching"]["effective_batch_size"] == 4.0
    assert model["batching"]["padding_share"] == 0.1
    assert model["workers"][0]["status"] == "READY"


def test_a_counter_that_went_down_began_again() -> None:
    before, after = readings(FOREIGN)
    restarted = activity(Reading(90.0, after.models, after.metrics), before)
    assert restarted.models[0].requests_per_s == 10.0, "of its two series one stands still"


@pytest.mark.parametrize(
    ("sizes", "bars"),
    [
        ({}, ""),
        ({1.0: 1}, "█"),
        ({2.0: 8, 1.0: 1}, "▁█"),
        ({128.0: 5, INF: 5}, "       ██"),
        ({4.0: 1000, 1.0: 1}, "▁ █"),
    ],
)
def test_a_histogram(sizes: dict[float, int], bars: str) -> None:
    assert histogram(sizes) == bars


@given(st.lists(st.sampled_from([0.5, 1.5, 3.0, 7.0, 9.0]), min_size=1), st.floats(0.01, 1))
def test_a_quantile_lies_in_the_bucket_of_the_value(values: list[float], share: float) -> None:
    bounds = [1.0, 2.0, 4.0, 8.0, INF]
    counts = {bound: float(sum(value <= bound for value in values)) for bound in bounds}
    exact = sorted(values)[max(0, math.ceil(share * len(values) - 1e-9) - 1)]
    bucket = next(bound for bound in bounds if exact <= bound)
    found = quantile(counts, share)
    assert found is not None
    assert found <= min(bucket, 8.0) + 1e-9
    assert found >= (0.0 if bucket == 1.0 else bounds[bounds.index(bucket) - 1]) - 1e-9


@pytest.mark.parametrize("counts", [{}, {INF: 0.0, 1.0: 0.0}, {1.0: 3.0, 2.0: 3.0}])
def test_no_quantile(counts: dict[float, float]) -> None:
    assert quantile(counts, 0.5) is None


@pytest.mark.parametrize(
    ("management", "known", "said", "expected"),
    [
        ("http://h:8081", None, None, "http://h:8082/metrics"),
        ("http://h:8081", "http://h:9", None, "http://h:9/metrics"),
        ("http://h:8081", "http://h:9", "other:1", "http://other:1/metrics"),
        ("http://h:8081", None, "https://x/metrics/", "https://x/metrics"),
    ],
)
def test_where_the_metrics_are(management: str, known: str | None, said: str | None, expected: str) -> None:
    assert metrics_url(Connection(ManagementClient(management), None, None, known), said) == expected
