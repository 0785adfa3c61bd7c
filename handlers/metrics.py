"""The one list of metric names, and how they are emitted.

All are counters with the dimension `model_name`; config/metrics.yaml must list the same names and dimensions, or
TorchServe's frontend leaves them out. Histogram buckets are counters with the dimension `le`, because TorchServe's own
histogram type has fixed buckets meant for seconds.
"""

import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

INTERVAL = 0.2  # seconds between two hand-overs
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)

UNITS: Mapping[str, str] = {
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
BATCH_SIZE = "batchserve_batch_size_bucket"
ERRORS = "batchserve_errors_total"
DIMENSIONS: Mapping[str, list[str]] = {
    **{name: ["model_name"] for name in UNITS},
    BATCH_SIZE: ["model_name", "le"],
    ERRORS: ["model_name", "code"],
}


class Metrics:
    """Adds up what happens in batches and hands the sums to TorchServe, off the requests' path.

    Every metric is a line on the worker's standard output that the frontend parses: a dozen lines between a small batch
    and its answer are felt, and a busy worker need not write them for every batch.

    Args:
        cache: the context's metrics; None (outside TorchServe) counts but emits nothing.
        counter_type: TorchServe's type for counters.
        model_name: the name the model is served under.
        units: counters with the dimension `model_name` → their units.
        dimensions: all counters → their dimensions.
    """

    def __init__(
        self,
        cache: Any,
        counter_type: Any,
        model_name: str,
        *,
        units: Mapping[str, str] = UNITS,
        dimensions: Mapping[str, list[str]] = DIMENSIONS,
    ) -> None:
        self._model = model_name
        self._batch: Counter[tuple[str, str]] = Counter()
        self._sums: Counter[tuple[str, str]] = Counter()
        self._known: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._due = threading.Event()
        if cache is None:
            return
        for name, names in dimensions.items():
            unit = units.get(name, "Count")
            self._known[name] = cache.add_metric_to_cache(name, unit, names, counter_type)
        threading.Thread(target=self._flush_for_ever, name="metrics", daemon=True).start()

    def count(self, name: str, value: float = 1, label: str = "") -> None:
        """Add to a counter of this batch; `label` is its second dimension's value."""
        self._batch[name, label] += value  # type: ignore[assignment]

    def batch(self, size: int) -> None:
        """Count a batch of `size` requests."""
        self.count("batchserve_batches_total")
        self.count("batchserve_requests_total", size)
        for bound in BUCKETS:
            if size <= bound:
                self.count(BATCH_SIZE, 1, str(bound))
        self.count(BATCH_SIZE, 1, "+Inf")

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
        for (name, label), value in sums.items():
            if value and name in self._known:
                value = round(value, 6)  # seconds
                self._known[name].add_or_update(value, [self._model, *([label] if label else [])])

    def _flush_for_ever(self) -> None:
        while True:
            self._due.wait()
            self._due.clear()
            time.sleep(INTERVAL)
            self.flush()
