"""What a generation worker counts and shows; config/metrics.yaml must list the same names and dimensions.

Counters are handed over as those of the other handlers are. Gauges say how things stand. The buckets of a histogram are
counters with the dimension `le`, as for the other handlers.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from handlers.generation.engine import Stats
from handlers.metrics import ERRORS, Metrics

UNITS: Mapping[str, str] = {
    "batchserve_requests_total": "Count",
    "batchserve_prompt_tokens_total": "Count",
    "batchserve_generated_tokens_total": "Count",
    "batchserve_prefix_tokens_total": "Count",
    "batchserve_preemptions_total": "Count",
    "batchserve_cancelled_total": "Count",
    "batchserve_engine_rebuilds_total": "Count",
    "batchserve_time_to_first_token_seconds_sum": "Seconds",
    "batchserve_time_to_first_token_seconds_count": "Count",
    "batchserve_time_per_token_seconds_sum": "Seconds",
    "batchserve_time_per_token_seconds_count": "Count",
}
BUCKETS: Mapping[str, Sequence[float]] = {
    "batchserve_time_to_first_token_seconds": (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
    "batchserve_time_per_token_seconds": (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1),
}
SECONDS = 1.0  # between two looks at the gauges
GAUGES = ("batchserve_running", "batchserve_waiting", "batchserve_cache_used_ratio")


class GenerationMetrics(Metrics):
    """Adds up what happens and hands it to TorchServe, off the requests' path.

    Args:
        cache: the context's metrics; None (outside TorchServe) counts but emits nothing.
        types: TorchServe's metric types.
        model_name: the name the model is served under.
    """

    def __init__(self, cache: Any, types: Any, model_name: str) -> None:
        dimensions = {name: ["model_name"] for name in UNITS}
        dimensions |= {f"{name}_bucket": ["model_name", "le"] for name in BUCKETS} | {ERRORS: ["model_name", "code"]}
        super().__init__(cache, types.COUNTER, model_name, units=UNITS, dimensions=dimensions)
        self._gauges = {
            name: cache.add_metric_to_cache(name, "Count", ["model_name"], types.GAUGE)
            for name in GAUGES
            if cache is not None
        }
        self._shown: dict[str, float] = {}
        self._next = 0.0
        self._before = Stats()

    def error(self, code: str) -> None:
        """Count a request that was answered with an error."""
        self.count(ERRORS, 1, code)

    def observe(self, name: str, seconds: float) -> None:
        """Add to a histogram of BUCKETS."""
        self.count(f"{name}_sum", seconds)
        self.count(f"{name}_count")
        for bound in BUCKETS[name]:
            if seconds <= bound:
                self.count(f"{name}_bucket", 1, f"{bound:g}")
        self.count(f"{name}_bucket", 1, "+Inf")

    def show(self, stats: Stats) -> None:
        """Take over what the engine says of itself."""
        before, self._before = self._before, stats
        self.count("batchserve_prefix_tokens_total", stats.prefix_tokens - before.prefix_tokens)
        self.count("batchserve_preemptions_total", stats.preemptions - before.preemptions)
        self.count("batchserve_engine_rebuilds_total", stats.rebuilds - before.rebuilds)
        used = stats.used_blocks / stats.blocks if stats.blocks else 0.0
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + SECONDS
        values = (stats.running, stats.waiting, round(used, 4))
        for name, value in zip(GAUGES, values, strict=True):
            if self._shown.get(name) != value and name in self._gauges:
                self._shown[name] = value
                self._gauges[name].add_or_update(value, [self._model])
