import time
from pathlib import Path
from typing import Any

import yaml

from handlers.generation import metrics as generation
from handlers.metrics import BATCH_SIZE, BUCKETS, ERRORS, UNITS, Metrics


class Cache:
    """Stands where TorchServe's metrics cache stands; the contract tests use the real one."""

    def __init__(self) -> None:
        self.emitted: list[tuple[str, float, list[str]]] = []

    def add_metric_to_cache(self, name: str, unit: str, names: list[str], kind: Any) -> Any:
        outer = self

        class Metric:
            def add_or_update(self, value: float, values: list[str]) -> None:
                assert len(values) == len(names)
                outer.emitted.append((name, value, values))

        return Metric()


def test_sums_are_emitted_once() -> None:
    cache = Cache()
    metrics = Metrics(cache, None, "minilm")
    metrics.batch(3)
    metrics.count("batchserve_tokens_total", 5)
    metrics.count("batchserve_tokens_total", 6)
    metrics.count("batchserve_oom_splits_total", 0)
    metrics.count(ERRORS, 1, "too_long")
    metrics.emit()
    metrics.flush()
    assert ("batchserve_tokens_total", 11, ["minilm"]) in cache.emitted
    assert (ERRORS, 1, ["minilm", "too_long"]) in cache.emitted
    assert not any(name == "batchserve_oom_splits_total" for name, *_ in cache.emitted)
    assert [values[1] for name, _, values in cache.emitted if name == BATCH_SIZE] == [
        "4",
        "8",
        "16",
        "32",
        "64",
        "128",
        "+Inf",
    ]
    cache.emitted.clear()
    metrics.emit()
    metrics.flush()
    assert cache.emitted == []


def test_they_are_handed_over_by_themselves() -> None:
    cache = Cache()
    metrics = Metrics(cache, None, "minilm")
    for _ in range(3):
        metrics.batch(2)
        metrics.emit()
    deadline = time.monotonic() + 10
    while sum(value for name, value, _ in cache.emitted if name == "batchserve_requests_total") < 6:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len([name for name, *_ in cache.emitted if name == "batchserve_requests_total"]) <= 2, "sums, not batches"


def test_outside_torchserve_nothing_breaks() -> None:
    metrics = Metrics(None, None, "minilm")
    metrics.batch(1)
    metrics.emit()
    metrics.flush()


def test_metrics_yaml_lists_the_same_names_and_dimensions() -> None:
    listed = yaml.safe_load((Path(__file__).parents[2] / "config" / "metrics.yaml").read_text(encoding="utf-8"))
    ours = {
        counter["name"]: (counter["unit"], counter["dimensions"])
        for counter in listed["model_metrics"]["counter"]
        if counter["name"].startswith("batchserve_")
    }
    expected = {name: (unit, ["model_name"]) for name, unit in {**UNITS, **generation.UNITS}.items()}
    expected |= {f"{name}_bucket": ("Count", ["model_name", "le"]) for name in generation.BUCKETS}
    expected[BATCH_SIZE] = ("Count", ["model_name", "le"])
    expected[ERRORS] = ("Count", ["model_name", "code"])
    assert ours == expected
    gauges = {gauge["name"]: gauge["dimensions"] for gauge in listed["model_metrics"]["gauge"]}
    assert all(gauges[name] == ["model_name"] for name in generation.GAUGES)
    assert max(BUCKETS) >= 128
