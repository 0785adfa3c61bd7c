"""What a generation worker counts and shows; config/metrics.yaml must list the same names and dimensions.

They are handed over as those of the other handlers are.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from handlers import metrics
from handlers.generation.engine import Stats
from handlers.metrics import STARTS, Metrics

COUNTERS: Mapping[str, str] = {
    STARTS: "Count",
    "batchserve_requests_total": "Count",
    "batchserve_prompt_tokens_total": "Count",
    "batchserve_generated_tokens_total": "Count",
    "batchserve_prefix_tokens_total": "Count",
    "batchserve_preemptions_total": "Count",
    "batchserve_cancelled_total": "Count",
    "batchserve_engine_rebuilds_total": "Count",
}
HISTOGRAMS: Mapping[str, Sequence[float]] = {
    "batchserve_time_to_first_token_seconds": (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
    "batchserve_time_per_token_seconds": (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1),
}
SECONDS = 1.0  # between two looks at the gauges
SEEN = ("batchserve_running", "batchserve_waiting", "batchserve_cache_used_ratio")
GAUGES: Mapping[str, str] = {**metrics.GAUGES, **dict.fromkeys(SEEN, "Count")}


class GenerationMetrics(Metrics):
    """Adds up what happens and hands it to TorchServe, off the requests' path.

    Args:
        cache: the context's metrics; None (outside TorchServe) counts but emits nothing.
        types: TorchServe's metric types.
        model_name: the name the model is served under.
    """

    def __init__(self, cache: Any, types: Any, model_name: str) -> None:
        self._next = 0.0
        self._before = Stats()
        super().__init__(cache, types, model_name, plain=COUNTERS, gauges=GAUGES, histograms=HISTOGRAMS)

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
        for name, value in zip(SEEN, (stats.running, stats.waiting, round(used, 4)), strict=True):
            self.gauge(name, value)
