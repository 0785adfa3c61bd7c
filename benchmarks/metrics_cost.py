"""What the handlers' metrics cost: `python -m benchmarks.metrics_cost` (a minute; nothing is asserted).

A batch counts in the worker; twice a second what was counted goes to TorchServe, a line for each counter that grew,
which the worker writes and the frontend reads. Processor time is measured, so that a busy machine does not matter.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests

from handlers.metrics import HANDLER_TIME, INTERVAL, Metrics
from scripts.lib import properties
from scripts.lib.addresses import free_ports
from scripts.lib.server import TorchServe
from scripts.lib.serving import PORT_FIELDS, Serving
from tests.e2e.archives import write_archive

BATCHES, CALLS, LINES = 20_000, 10, 3_000
COUNTED = ("items", "tokens", "padding_tokens", "truncated_tokens", "micro_batches", "oom_splits", "fp32_retries")
TIMED = ("tokenize", "forward", "render")
# Writes as many metrics as it is asked for
HANDLER = """
from ts.metrics.metric_type_enum import MetricTypes

class Writer:
    def __init__(self):
        self.initialized = False

    def initialize(self, context):
        self.metric = context.metrics.add_metric_to_cache(
            "batchserve_tokens_total", "Count", ["model_name"], MetricTypes.COUNTER)
        self.initialized = True

    def handle(self, rows, context):
        asked = rows[0].get("body")
        for _ in range(asked if isinstance(asked, int) else 0):
            self.metric.add_or_update(1, ["m"])
        return [b"done" for _ in rows]
"""


def count(metrics: Metrics, size: int = 32) -> None:
    """What base.py counts for a batch."""
    metrics.batch(size)
    for name in COUNTED:
        metrics.count(f"batchserve_{name}_total", size)
    for name in TIMED:
        metrics.count(f"batchserve_{name}_seconds_total", 0.01)
    metrics.observe(HANDLER_TIME, 0.03, size)
    metrics.emit()


class Lines:
    """Stands for TorchServe's cache and counts the lines."""

    written = 0

    def add_metric_to_cache(self, *_: Any) -> "Lines":
        return self

    def add_or_update(self, *_: Any) -> None:
        Lines.written += 1


def seconds(work: Callable[[], Any], times: int) -> float:
    """Processor time of this thread for one call."""
    begun = time.thread_time()
    for _ in range(times):
        work()
    return (time.thread_time() - begun) / times


def line_cost(directory: Path) -> tuple[float, float]:
    """Processor time of a line, seconds in the worker and in the frontend."""
    store = directory / "store"
    store.mkdir()
    write_archive(store / "writer.mar", name="writer", source=HANDLER)
    server = {**dict(zip(PORT_FIELDS, free_ports(), strict=True)), "model_store": str(store)}
    models = {"writer": {"archive": "writer.mar", "version": "1.0"}}
    config = directory / "config.properties"
    config.write_text(properties.render(Serving.from_mapping({"server": server, "models": models}, "here")))
    with TorchServe(config, work_dir=directory / "state") as running:
        tree = running.processes()
        frontend = next(process for process in tree if process.name() == "java")
        worker = next(process for process in tree if any("model_service_worker" in part for part in process.cmdline()))

        def spent(lines: int) -> tuple[float, float]:
            before = [sum(process.cpu_times()[:2]) for process in (worker, frontend)]
            for _ in range(CALLS):
                url = f"{running.urls.inference}/predictions/writer"
                requests.post(url, json=lines, headers=running.headers(), timeout=60).raise_for_status()
            time.sleep(2)  # the frontend is still reading
            after = [sum(process.cpu_times()[:2]) for process in (worker, frontend)]
            return after[0] - before[0], after[1] - before[1]

        spent(LINES)  # Java warms up
        idle, busy = spent(0), spent(LINES)
    return (busy[0] - idle[0]) / CALLS / LINES, (busy[1] - idle[1]) / CALLS / LINES


def main() -> None:
    """Measure and print."""
    metrics = Metrics(None, None, "m")
    batch = seconds(lambda: count(metrics), BATCHES)
    kinds = type("Types", (), {"COUNTER": 0, "GAUGE": 1})
    metrics = Metrics(Lines(), kinds, "m")
    Lines.written = 0
    count(metrics)
    metrics.flush()
    with tempfile.TemporaryDirectory() as directory:
        worker, frontend = line_cost(Path(directory))
    share = Lines.written * (worker + frontend) / INTERVAL
    print(f"counting a batch: {batch * 1e6:.0f} µs, {batch / 0.02:.2%} of a batch of 20 ms")
    print(f"a line: {worker * 1e6:.0f} µs in the worker, {frontend * 1e6:.0f} µs in the frontend")
    print(f"{Lines.written} lines each {INTERVAL} s: {share:.2%} of a core for each busy worker")


if __name__ == "__main__":
    main()
