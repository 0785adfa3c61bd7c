"""The one list of metric names, and how they are emitted.

config/metrics.yaml must list the same names and dimensions, or TorchServe's frontend leaves them out. A histogram is
counters (`_bucket` with the dimension `le`, `_sum`, `_count`), because TorchServe's own histograms have fixed buckets.
"""

import logging
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

INTERVAL = 0.5  # seconds between two hand-overs

STARTS = "batchserve_worker_starts_total"
ERRORS = "batchserve_errors_total"
BATCH_SIZE = "batchserve_batch_size"
HANDLER_TIME = "batchserve_handler_seconds"
BATCH_SIZE_LIMIT = "batchserve_batch_size_limit"

# Counters and gauges with the dimension `model_name` alone → their units
COUNTERS: Mapping[str, str] = {
    STARTS: "Count",
    "batchserve_requests_total": "Count",
    "batchserve_items_total": "Count",
    "batchserve_tokens_total": "Count",
    "batchserve_padding_tokens_total": "Count",
    "batchserve_truncated_tokens_total": "Count",
    "batchserve_batches_total": "Count",
    "batchserve_micro_batches_total": "Count",
    "batchserve_oom_splits_total": "Count",
    "batchserve_fp32_retries_total": "Count",
    "batchserve_tokenize_seconds_total": "Seconds",
    "batchserve_forward_seconds_total": "Seconds",
    "batchserve_render_seconds_total": "Seconds",
}
GAUGES: Mapping[str, str] = {BATCH_SIZE_LIMIT: "Count"}
# Histograms → the upper bounds of their buckets
HISTOGRAMS: Mapping[str, Sequence[float]] = {
    BATCH_SIZE: (1, 2, 4, 8, 16, 32, 64, 128),
    HANDLER_TIME: (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30),
}


def counters(plain: Mapping[str, str], histograms: Mapping[str, Sequence[float]]) -> dict[str, tuple[str, list[str]]]:
    """Every counter → its unit and dimensions: the plain ones, those that make up the histograms, and ERRORS."""
    found = {name: (unit, ["model_name"]) for name, unit in plain.items()}
    for name in histograms:
        found[f"{name}_sum"] = ("Seconds" if name.endswith("_seconds") else "Count", ["model_name"])
        found[f"{name}_count"] = ("Count", ["model_name"])
        found[f"{name}_bucket"] = ("Count", ["model_name", "le"])
    found[ERRORS] = ("Count", ["model_name", "code", "status"])
    return found


class Metrics:
    """Adds up what happens in batches and hands the sums to TorchServe, off the requests' path.

    Every metric is a line on the worker's standard output that the frontend parses: a dozen lines between a small batch
    and its answer are felt, and a busy worker need not write them for every batch.

    Args:
        cache: the context's metrics; None (outside TorchServe) counts but emits nothing.
        types: TorchServe's metric types.
        model_name: the name the model is served under.
        plain, gauges: names with the dimension `model_name` alone → their units.
        histograms: names → the upper bounds of their buckets.
    """

    def __init__(
        self,
        cache: Any,
        types: Any,
        model_name: str,
        *,
        plain: Mapping[str, str] = COUNTERS,
        gauges: Mapping[str, str] = GAUGES,
        histograms: Mapping[str, Sequence[float]] = HISTOGRAMS,
    ) -> None:
        self._model = model_name
        self._histograms = histograms
        self._labels = {name: [*(f"{bound:g}" for bound in bounds), "+Inf"] for name, bounds in histograms.items()}
        self._batch: Counter[tuple[str, ...]] = Counter()
        self._sums: Counter[tuple[str, ...]] = Counter()
        self._known: dict[str, Any] = {}
        self._gauges: dict[str, Any] = {}
        self._shown: dict[str, float] = {}
        self._lock = threading.Lock()
        self._due = threading.Event()
        if cache is None:
            return
        for name, (unit, dimensions) in counters(plain, histograms).items():
            self._known[name] = cache.add_metric_to_cache(name, unit, dimensions, types.COUNTER)
        for name, unit in gauges.items():
            self._gauges[name] = cache.add_metric_to_cache(name, unit, ["model_name"], types.GAUGE)
        self._begin()
        threading.Thread(target=self._flush_for_ever, name="metrics", daemon=True).start()

    def count(self, name: str, value: float = 1, *labels: str) -> None:
        """Add to a counter of this batch; `labels` are the values of its dimensions after the first."""
        with self._lock:  # threads of all kinds count
            self._batch[name, *labels] += value  # type: ignore[assignment]

    def observe(self, name: str, value: float, times: int = 1) -> None:
        """Add a value to a histogram, `times` times."""
        self.count(f"{name}_sum", value * times)
        self.count(f"{name}_count", times)
        self.count(f"{name}_bucket", times, self._labels[name][bisect_left(self._histograms[name], value)])

    def batch(self, size: int) -> None:
        """Count a batch of `size` requests."""
        self.count("batchserve_batches_total")
        self.count("batchserve_requests_total", size)
        self.observe(BATCH_SIZE, size)

    def error(self, code: str, status: int) -> None:
        """Count a request that is answered with an error."""
        self.count(ERRORS, 1, code, str(status))

    def gauge(self, name: str, value: float) -> None:
        """Show a gauge's value, if it is another than last time."""
        if name in self._gauges and self._shown.get(name) != value:
            self._shown[name] = value
            self._gauges[name].add_or_update(value, [self._model])

    def emit(self) -> None:
        """End the batch: what was counted will be handed over within about INTERVAL seconds."""
        with self._lock:
            self._sums.update(self._batch)
            self._batch.clear()
        self._due.set()

    def flush(self) -> None:
        """Hand over now what ended batches have counted."""
        with self._lock:
            sums, self._sums = self._sums, Counter()
        for name, labels in self._labels.items():
            below = 0  # a bucket counts what the smaller ones do
            for label in labels:
                below += sums.pop((f"{name}_bucket", label), 0)
                sums[f"{name}_bucket", label] = below
        for (name, *labels), value in sums.items():
            if value and name in self._known:
                self._known[name].add_or_update(round(value, 6), [self._model, *labels])

    def _begin(self) -> None:
        """Count this start, and show every counter as 0: a rate cannot see how a series grew that was not there."""
        for name, metric in self._known.items():
            if name == ERRORS:
                continue
            if name.endswith("_bucket"):
                for label in self._labels[name.removesuffix("_bucket")]:
                    metric.add_or_update(0, [self._model, label])
            else:
                metric.add_or_update(int(name == STARTS), [self._model])

    def _flush_for_ever(self) -> None:
        while True:
            self._due.wait()
            self._due.clear()
            time.sleep(INTERVAL)
            try:
                self.flush()
            except Exception as error:  # noqa: BLE001 - the next ones are handed over all the same
                logger.error("Metrics could not be handed over: %s", type(error).__name__)
