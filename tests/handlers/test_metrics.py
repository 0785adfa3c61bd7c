import re
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from handlers.generation import metrics as generation
from handlers.metrics import (
    BATCH_SIZE,
    COUNTERS,
    ERRORS,
    GAUGES,
    HANDLER_TIME,
    HISTOGRAMS,
    STARTS,
    Metrics,
    counters,
)

CONFIG = Path(__file__).parents[2] / "config" / "metrics.yaml"
TYPES = SimpleNamespace(COUNTER="counter", GAUGE="gauge")


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
    metrics = Metrics(cache, TYPES, "minilm")
    cache.emitted.clear()
    metrics.batch(3)
    metrics.count("batchserve_tokens_total", 5)
    metrics.count("batchserve_tokens_total", 6)
    metrics.count("batchserve_oom_splits_total", 0)
    metrics.error("too_long", 400)
    metrics.emit()
    metrics.flush()
    assert ("batchserve_tokens_total", 11, ["minilm"]) in cache.emitted
    assert (ERRORS, 1, ["minilm", "too_long", "400"]) in cache.emitted
    assert not any(name == "batchserve_oom_splits_total" for name, *_ in cache.emitted)
    assert [values[1] for name, _, values in cache.emitted if name == f"{BATCH_SIZE}_bucket"] == [
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
    metrics = Metrics(cache, TYPES, "minilm")
    for _ in range(3):
        metrics.batch(2)
        metrics.emit()
    deadline = time.monotonic() + 10
    while sum(value for name, value, _ in cache.emitted if name == "batchserve_requests_total") < 6:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    handed = [value for name, value, _ in cache.emitted if name == "batchserve_requests_total" and value]
    assert len(handed) <= 2, "sums, not batches"


def test_nothing_is_lost_between_a_batchs_end_and_what_other_threads_count() -> None:
    """One that counts while a batch ends waits for it: its counts are not emptied with the batch's."""
    cache = Cache()
    metrics = Metrics(cache, TYPES, "minilm")
    cache.emitted.clear()
    counted: list[threading.Thread] = []

    class Sums(Counter[tuple[str, ...]]):
        def update(self, *args: Any, **kwargs: Any) -> None:
            if args[0]:  # none when it is made
                counted.append(threading.Thread(target=metrics.count, args=("batchserve_tokens_total", 2)))
                counted[-1].start()
                counted[-1].join(0.1)
            super().update(*args, **kwargs)

    metrics._sums = Sums()
    metrics.count("batchserve_tokens_total", 5)
    metrics.emit()
    counted[-1].join()
    metrics.flush()
    metrics.emit()
    metrics.flush()
    handed = [value for name, value, _ in cache.emitted if name == "batchserve_tokens_total"]
    assert handed == [5, 2]


def test_what_cannot_be_handed_over_does_not_end_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handlers.metrics.INTERVAL", 0.01)
    cache = Cache()
    metrics = Metrics(cache, TYPES, "minilm")
    flush, failed = metrics.flush, threading.Event()

    def fails_once() -> None:
        if not failed.is_set():
            failed.set()
            raise OSError("the pipe is full")
        flush()

    monkeypatch.setattr(metrics, "flush", fails_once)
    metrics.batch(1)
    metrics.emit()
    assert failed.wait(10)
    deadline = time.monotonic() + 10
    while not any(name == "batchserve_batches_total" and value for name, value, _ in cache.emitted):
        assert time.monotonic() < deadline
        metrics.emit()
        time.sleep(0.01)


def test_outside_torchserve_nothing_breaks() -> None:
    metrics = Metrics(None, None, "minilm")
    metrics.batch(1)
    metrics.emit()
    metrics.flush()


def test_every_counter_begins_at_0_and_a_start_is_counted() -> None:
    cache = Cache()
    Metrics(cache, TYPES, "minilm")
    begun = {(name, *values): value for name, value, values in cache.emitted}
    assert begun.pop((STARTS, "minilm")) == 1
    assert set(begun.values()) == {0}
    assert {name for name, *_ in begun} == set(counters(COUNTERS, HISTOGRAMS)) - {ERRORS, STARTS}
    assert (f"{BATCH_SIZE}_bucket", "minilm", "128") in begun
    assert (f"{HANDLER_TIME}_bucket", "minilm", "0.005") in begun
    assert (f"{HANDLER_TIME}_bucket", "minilm", "+Inf") in begun


def test_a_gauge_is_shown_when_it_changes() -> None:
    cache = Cache()
    metrics = Metrics(cache, TYPES, "minilm")
    cache.emitted.clear()
    (name,) = GAUGES
    for value in (8, 8, 16):
        metrics.gauge(name, value)
    assert cache.emitted == [(name, 8, ["minilm"]), (name, 16, ["minilm"])]


def test_a_histogram_counts_a_value_as_often_as_said() -> None:
    cache = Cache()
    metrics = Metrics(cache, TYPES, "minilm")
    cache.emitted.clear()
    metrics.observe(HANDLER_TIME, 0.75, 3)
    metrics.observe(HANDLER_TIME, 100)
    metrics.emit()
    metrics.flush()
    found = {(name, *values[1:]): value for name, value, values in cache.emitted}
    assert found[f"{HANDLER_TIME}_sum",] == 102.25
    assert found[f"{HANDLER_TIME}_count",] == 4
    assert found[f"{HANDLER_TIME}_bucket", "1"] == found[f"{HANDLER_TIME}_bucket", "30"] == 3
    assert found[f"{HANDLER_TIME}_bucket", "+Inf"] == 4
    assert (f"{HANDLER_TIME}_bucket", "0.5") not in found


def test_metrics_yaml_lists_the_same_names_and_dimensions() -> None:
    listed = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["model_metrics"]
    ours = {
        kind: {m["name"]: (m["unit"], m["dimensions"]) for m in listed[kind] if m["name"].startswith("batchserve_")}
        for kind in ("counter", "gauge")
    }
    assert ours["counter"] == {
        **counters(COUNTERS, HISTOGRAMS),
        **counters(generation.COUNTERS, generation.HISTOGRAMS),
    }
    assert ours["gauge"] == {name: (unit, ["model_name"]) for name, unit in {**GAUGES, **generation.GAUGES}.items()}


def test_every_metric_is_described() -> None:
    text = CONFIG.read_text(encoding="utf-8")
    lines, listed = text.splitlines(), yaml.safe_load(text)
    named = [at for at, line in enumerate(lines) if line.startswith("    - name:")]
    assert len(named) == sum(len(s) for part in ("ts_metrics", "model_metrics") for s in listed[part].values())
    for at in named:
        assert re.fullmatch(r" {4}# .{15,}\.", lines[at - 1]), lines[at]


def test_names_follow_prometheus_conventions() -> None:
    """What `promtool check metrics` would say, but for histograms, which it takes for counters of odd names."""
    listed = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["model_metrics"]
    for metric in listed["counter"]:
        name = metric["name"]
        assert re.fullmatch(r"batchserve(_[a-z0-9]+)+", name), name
        assert name.endswith(("_total", "_bucket", "_sum", "_count")), name
        assert (metric["unit"] == "Seconds") == bool(re.search(r"_seconds_(total|sum)$", name)), name
    for metric in listed["gauge"]:
        assert not metric["name"].endswith(("_total", "_bucket", "_sum", "_count")), metric["name"]
