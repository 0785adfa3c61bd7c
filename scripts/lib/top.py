"""What a running TorchServe does now, read from its management API and its metrics port alone.

Counters are compared at two moments. A server that is not ours has no counters of ours: then its own are all there is.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import requests

from scripts.lib.bounded import body_of
from scripts.lib.connection import Connection
from scripts.lib.errors import UserError
from scripts.lib.management import ManagementClient, Model, Worker
from scripts.lib.scrape import BatchingWindow, Snapshot, grown, window

METRICS_PORT = 8082  # TorchServe's default
TIMEOUT_S = 10.0

_GENERATION = "batchserve_generated_tokens_total"
_TAKEN = "batchserve_requests_total"  # that reached a handler of ours
_LIMIT = "batchserve_batch_size_limit"


@dataclass(frozen=True)
class Reading:
    """A server at one moment.

    Args:
        at: `time.monotonic()`.
        models: every version of every model, by name.
        metrics: its counters and gauges; empty where the metrics port does not tell.
        fault: why it does not tell; "" where it does.
    """

    at: float
    models: Sequence[Model]
    metrics: Snapshot
    fault: str = ""


@dataclass(frozen=True)
class Batching:
    """How a model's batches went, by our handlers' counters.

    Args:
        window: what was counted.
        limit: requests that a batch may hold, None where it is not told.
        worker_ms: quantile → time of a request's batch in the worker, without the queue.
    """

    window: BatchingWindow
    limit: int | None
    worker_ms: Mapping[str, float | None]


@dataclass(frozen=True)
class Generation:
    """How a generation model does. Rates are tokens a second; `cache_used` is a share."""

    running: int
    waiting: int
    cache_used: float
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    first_token_ms: Mapping[str, float | None]
    per_token_ms: Mapping[str, float | None]


@dataclass(frozen=True)
class ModelActivity:
    """What all versions of a model did between two readings.

    Args:
        name, versions: as TorchServe knows it.
        workers: its processes now.
        pending, room: requests that wait now, and that may.
        requests_per_s: requests that came; None where the server does not tell.
        latency_ms, queue_ms: mean time to the answer, and mean wait in the queue, of the requests that a worker took;
            of all that came, refused ones too, where the handler isn't ours and doesn't count those. None without any.
        batching, generation: where its handler counts such.
    """

    name: str
    versions: Sequence[str]
    workers: Sequence[Worker]
    pending: int
    room: int
    requests_per_s: float | None
    latency_ms: float | None
    queue_ms: float | None
    batching: Batching | None
    generation: Generation | None


@dataclass(frozen=True)
class Gpu:
    """A device, in percent; None where TorchServe does not tell."""

    device: str
    busy: float | None
    memory: float | None


@dataclass(frozen=True)
class Activity:
    """What a server did between two readings.

    Args:
        seconds: between them.
        models: by name.
        cpu, memory: percent of the host, read by TorchServe once a minute; None where it does not tell.
        gpus: likewise.
        answers_per_s: `2xx`, `4xx`, `5xx` → answers on all ports; empty where the metrics were not there both times.
        fault: why the metrics, or those to compare them with, are not there; "" where they are.
    """

    seconds: float
    models: Sequence[ModelActivity]
    cpu: float | None
    memory: float | None
    gpus: Sequence[Gpu]
    answers_per_s: Mapping[str, float]
    fault: str


def metrics_url(connection: Connection, said: str | None) -> str:
    """Where the metrics are: as said, as known, or TorchServe's default port on the management API's host."""
    if said is not None:
        url = said if "://" in said else f"http://{said}"
    else:
        host = urlsplit(connection.client.url).hostname or "127.0.0.1"
        url = connection.metrics or f"http://{host}:{METRICS_PORT}"
    url = url.rstrip("/")
    return url if url.endswith("/metrics") else f"{url}/metrics"


def read(client: ManagementClient, url: str) -> Reading:
    """Read a server.

    Args:
        client: its management API.
        url: its metrics.

    Raises:
        UserError: the management API does not answer.
    """
    models = [model for listed in client.list_models() for model in client.versions(listed.model_name)]
    metrics, fault = _metrics(url)
    return Reading(time.monotonic(), sorted(models, key=lambda model: model.model_name), metrics, fault)


def _metrics(url: str) -> tuple[Snapshot, str]:
    try:
        with requests.Session() as session:
            session.trust_env = False  # no proxy, no .netrc
            with session.get(url, timeout=TIMEOUT_S, stream=True) as answer:
                answer.raise_for_status()
                found = Snapshot.parse(body_of(answer, TIMEOUT_S).decode())
    except requests.RequestException as error:
        return Snapshot(), f"no metrics at {url}: {type(error).__name__}; name the address with --metrics URL"
    except ValueError:
        return Snapshot(), f"{url} is not a Prometheus page; name the address with --metrics URL"
    if not found.values:
        return found, f"nothing is published at {url}: set metrics_mode=prometheus in config.properties"
    return found, ""


def activity(before: Reading, after: Reading) -> Activity:
    """What a server did between two readings. Nothing is told of counters that one of them doesn't know."""
    seconds = max(after.at - before.at, 1e-9)
    fault = after.fault or (f"no rates yet; a moment ago: {before.fault}" if before.fault else "")
    names = list(dict.fromkeys(model.model_name for model in after.models))
    devices = sorted({dict(labels)["DeviceId"] for _, labels in after.metrics.values if "DeviceId" in dict(labels)})
    return Activity(
        seconds=seconds,
        models=[_model(name, before, after, seconds, counted=not fault) for name in names],
        cpu=_gauge(after.metrics, "CPUUtilization"),
        memory=_gauge(after.metrics, "MemoryUtilization"),
        gpus=[
            Gpu(
                device,
                _gauge(after.metrics, "GPUUtilization", DeviceId=device),
                _gauge(after.metrics, "GPUMemoryUtilization", DeviceId=device),
            )
            for device in devices
        ],
        answers_per_s={}
        if fault
        else {f"{digit}xx": grown(before.metrics, after.metrics, f"Requests{digit}XX") / seconds for digit in "245"},
        fault=fault,
    )


def _model(name: str, before: Reading, after: Reading, seconds: float, *, counted: bool) -> ModelActivity:
    start, end = (before.metrics, after.metrics) if counted else (Snapshot(), Snapshot())
    versions = [model for model in after.models if model.model_name == name]
    came = grown(start, end, "ts_inference_requests_total", model_name=name)
    # What the queue refused has no latency, and TorchServe counts it among the requests all the same
    ours = any(True for _ in end.series(_TAKEN, name))
    taken = grown(start, end, _TAKEN, model_name=name) if ours else came

    def mean_ms(counter: str) -> float | None:
        return grown(start, end, counter, model_name=name) / taken / 1e3 if taken else None

    generates = any(True for _ in end.series(_GENERATION, name))
    batches = any(True for _ in end.series("batchserve_batches_total", name))
    return ModelActivity(
        name=name,
        versions=[model.model_version for model in versions],
        workers=[worker for model in versions for worker in model.workers],
        pending=sum(model.job_queue_status.pending_requests for model in versions),
        room=sum(model.job_queue_status.capacity for model in versions),
        requests_per_s=came / seconds if counted else None,
        latency_ms=mean_ms("ts_inference_latency_microseconds"),
        queue_ms=mean_ms("ts_queue_latency_microseconds"),
        batching=_batching(name, start, end) if batches else None,
        generation=_generation(name, start, end, seconds) if generates else None,
    )


def _batching(name: str, start: Snapshot, end: Snapshot) -> Batching:
    limit = _gauge(end, _LIMIT, model_name=name)
    return Batching(
        window=window(start, end, name),
        limit=None if limit is None else int(limit),
        worker_ms=_quantiles(start, end, "batchserve_handler_seconds", name),
    )


def _generation(name: str, start: Snapshot, end: Snapshot, seconds: float) -> Generation:
    return Generation(
        running=int(_gauge(end, "batchserve_running", model_name=name) or 0),
        waiting=int(_gauge(end, "batchserve_waiting", model_name=name) or 0),
        cache_used=_gauge(end, "batchserve_cache_used_ratio", model_name=name) or 0.0,
        prompt_tokens_per_s=grown(start, end, "batchserve_prompt_tokens_total", model_name=name) / seconds,
        generated_tokens_per_s=grown(start, end, _GENERATION, model_name=name) / seconds,
        first_token_ms=_quantiles(start, end, "batchserve_time_to_first_token_seconds", name),
        per_token_ms=_quantiles(start, end, "batchserve_time_per_token_seconds", name),
    )


def _matching(snapshot: Snapshot, name: str, labels: Mapping[str, str]) -> list[tuple[dict[str, str], float]]:
    return [
        (found, value)
        for (metric, pairs), value in snapshot.values.items()
        if metric == name and not math.isnan(value) and labels.items() <= (found := dict(pairs)).items()
    ]


def _gauge(snapshot: Snapshot, name: str, **labels: str) -> float | None:
    return max((value for _, value in _matching(snapshot, name, labels)), default=None)


def _quantiles(before: Snapshot, after: Snapshot, name: str, model: str) -> dict[str, float | None]:
    """p50 and p95 of a histogram of seconds, in ms."""
    bounds = {found["le"] for found, _ in _matching(after, f"{name}_bucket", {"model_name": model})}
    counts = {float(le): grown(before, after, f"{name}_bucket", model_name=model, le=le) for le in bounds}
    found = {label: quantile(counts, share) for label, share in (("p50", 0.5), ("p95", 0.95))}
    return {label: None if value is None else value * 1e3 for label, value in found.items()}


def quantile(counts: Mapping[float, float], share: float) -> float | None:
    """A quantile of a histogram, as Prometheus' histogram_quantile gives it: straight lines inside the buckets.

    Args:
        counts: upper bound → values up to it, infinity included.
        share: 0 to 1.

    Returns:
        None without values; the largest finite bound for what lies above it.
    """
    bounds = sorted(counts)
    if len(bounds) < 2 or not math.isinf(bounds[-1]) or not counts[bounds[-1]]:
        return None
    rank, low, below = share * counts[bounds[-1]], 0.0, 0.0
    for bound in bounds[:-1]:
        if counts[bound] >= rank and counts[bound] > below:
            return low + (bound - low) * (rank - below) / (counts[bound] - below)
        low, below = bound, counts[bound]
    return bounds[-2]


def unreachable(error: UserError, last: Activity) -> Activity:
    """The last activity of a server that no longer answers, with the reason."""
    return Activity(**{**vars(last), "fault": str(error)})
