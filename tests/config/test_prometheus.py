"""The rules and the dashboard ask for what there is, and the alerts are raised when they should be, and only then."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import queries
from tests.queries import DASHBOARD, PROMETHEUS, RULES, Selector

QUERIES = [*queries.rules(), *queries.dashboard()]
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian package prometheus) is not installed")


def promtool(*words: str | Path) -> str:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *map(str, words)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_a_query_names() -> None:
    query = 'a:b{x=~"1|m(2)", y!="z"} / on (x, w) sum by (w) (rate(c_total[5m])) > 1e6 and deriv(d[1h]) or 0 * e'
    assert list(queries.selectors(query)) == [
        Selector("a:b", ("x", "y"), 'a:b{x=~"1|m(2)", y!="z"}'),
        Selector("c_total", (), "c_total"),
        Selector("d", (), "d"),
        Selector("e", (), "e"),
    ]
    assert queries.grouping(query) == {"x", "w"}


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.where)
def test_a_query_asks_for_metrics_and_labels_that_there_are(query: queries.Query) -> None:
    published = queries.published()
    found = list(queries.selectors(query.expr))
    assert found
    for selector in found:
        assert selector.name in published, selector
        assert set(selector.labels) <= published[selector.name], selector
    for label in queries.grouping(query.expr):
        assert any(label in published[selector.name] for selector in found), label


def test_thresholds_are_buckets() -> None:
    from handlers.generation.metrics import HISTOGRAMS as GENERATION
    from handlers.metrics import HISTOGRAMS

    bounds = {f"{name}_bucket": {f"{b:g}" for b in bounds} for name, bounds in {**HISTOGRAMS, **GENERATION}.items()}
    asked = {(s.name, s.text.split('le="')[1].split('"')[0]) for q in QUERIES for s in queries.selectors(q.expr)
             if "le" in s.labels}  # fmt: skip
    assert len(asked) == 2
    assert all(bound in bounds[name] for name, bound in asked)


def test_every_metric_of_ours_is_looked_at() -> None:
    asked = {selector.name for query in QUERIES for selector in queries.selectors(query.expr)}
    ours = {name for name in queries.published() if name.startswith("batchserve_")}
    assert {name for name in ours - asked if not name.endswith(("_sum", "_count"))} == set()


def test_what_is_recorded_is_used() -> None:
    asked = {selector.name for query in QUERIES for selector in queries.selectors(query.expr)}
    assert {rule.record for rule in queries.rules() if rule.record} <= asked


def test_the_dashboard_is_whole() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert x < 24
                assert taken.setdefault((x, y), panel["title"]) == panel["title"], panel["title"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    rows = [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"]
    assert rows == ["Traffic", "Latency", "Batching", "Queue and workers", "Host and GPU", "Generation"]
    datasource, model = dashboard["templating"]["list"]
    assert datasource["type"] == "datasource"
    name, label = model["query"]["query"].removeprefix("label_values(").rstrip(")").split(", ")
    assert label in queries.published()[name]
    for panel in queries.panels():
        assert panel["datasource"]["uid"] == "${datasource}"
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        for target in panel["targets"]:
            for field in target["legendFormat"].split("{{")[1:]:  # a series is told apart by what it is grouped by
                assert field.split("}}")[0] in queries.grouping(target["expr"]) | {"model_name"}, panel["title"]


@needs_promtool
def test_promtool_finds_no_fault() -> None:
    promtool("check", "config", PROMETHEUS)
    assert f"{len(queries.rules())} rules found" in promtool("check", "rules", RULES)


# A minute of a healthy model: 10 requests a second, 20 ms each, 2 ms of it in the queue, batches of 8 of at most 16;
# and of a healthy generation model.
HEALTHY = {
    'up{job="batchserve",instance="i"}': "1x200",
    'ts_inference_requests_total{model_name="m"}': "0+600x200",
    'ts_inference_latency_microseconds{model_name="m"}': "0+12000000x200",
    'ts_queue_latency_microseconds{model_name="m"}': "0+1200000x200",
    'batchserve_requests_total{model_name="m"}': "0+600x200",
    'batchserve_handler_seconds_bucket{model_name="m",le="0.5"}': "0+600x200",
    'batchserve_handler_seconds_count{model_name="m"}': "0+600x200",
    'batchserve_errors_total{model_name="m",code="invalid_type",status="400"}': "0+60x200",
    'batchserve_batch_size_sum{model_name="m"}': "0+600x200",
    'batchserve_batch_size_count{model_name="m"}': "0+75x200",
    'batchserve_batch_size_limit{model_name="m"}': "16x200",
    'batchserve_tokens_total{model_name="m"}': "0+6000x200",
    'batchserve_padding_tokens_total{model_name="m"}': "0+60x200",
    'batchserve_worker_starts_total{model_name="m"}': "2x200",
    'batchserve_oom_splits_total{model_name="m"}': "0x200",
    'ts_inference_requests_total{model_name="g"}': "0+60x200",
    'ts_inference_latency_microseconds{model_name="g"}': "0+24000000x200",
    'ts_queue_latency_microseconds{model_name="g"}': "0+600000x200",
    'batchserve_requests_total{model_name="g"}': "0+60x200",
    'batchserve_batch_size_limit{model_name="g"}': "16x200",
    'batchserve_waiting{model_name="g"}': "0x200",
    'batchserve_cache_used_ratio{model_name="g"}': "0.98x200",
    'batchserve_time_to_first_token_seconds_bucket{model_name="g",le="2.5"}': "0+59x200",
    'batchserve_time_to_first_token_seconds_count{model_name="g"}': "0+60x200",
    'batchserve_preemptions_total{model_name="g"}': "0+1x200",
    'batchserve_engine_rebuilds_total{model_name="g"}': "0x200",
}  # fmt: skip
FAST, SLOW = "BatchserveObjectiveBurnsFast", "BatchserveObjectiveBurnsSlowly"
# What goes wrong → the alerts that are raised two hours later
SCENARIOS: list[tuple[dict[str, str], list[str]]] = [
    ({}, []),
    ({'up{job="batchserve",instance="i"}': "0x200"}, ["BatchserveDown"]),
    ({'batchserve_handler_seconds_bucket{model_name="m",le="0.5"}': "0+450x200"}, [FAST, SLOW]),
    ({'batchserve_handler_seconds_bucket{model_name="m",le="0.5"}': "0+540x200"}, [SLOW]),
    # a tenth fails, quickly or slowly: that is a tenth of the objective missed, not a fifth
    ({'batchserve_handler_seconds_bucket{model_name="m",le="0.5"}': "0+540x200",
      'batchserve_handler_seconds_count{model_name="m"}': "0+540x200",
      'batchserve_errors_total{model_name="m",code="out_of_memory",status="507"}': "0+60x200"}, [SLOW]),
    ({'ts_inference_latency_microseconds{model_name="m"}': "0+600000000x200"}, ["BatchserveLatencyHigh"]),
    # a second of waiting is no alert of its own where it does not grow; here it grows to 0.2 s
    ({'ts_queue_latency_microseconds{model_name="m"}': "0+120000000x200"}, []),
    ({'ts_queue_latency_microseconds{model_name="m"}': "_x60 " + " ".join(str(1_000_000 * n * n) for n in range(140))},
     ["BatchserveQueueGrowing"]),
    # the same after an idle time, in which 0 is divided by 0
    ({name: values for counter in ("ts_inference_requests_total", "batchserve_requests_total")
      for name, values in {f'{counter}{{model_name="m"}}': "0x99 0+600x40"}.items()}
     | {'ts_queue_latency_microseconds{model_name="m"}':
        "0x99 " + " ".join(str(10_000_000 * n * n) for n in range(40))}, ["BatchserveQueueGrowing"]),
    # half of the requests are refused at once, and the others take long
    ({'ts_inference_requests_total{model_name="m"}': "0+1200x200",
      'ts_inference_latency_microseconds{model_name="m"}': "0+400000000x200"},
     [FAST, SLOW, "BatchserveLatencyHigh", "BatchserveRequestsRefused"]),
    ({'ts_queue_latency_microseconds{model_name="m"}': "0+60000000x200",
      'batchserve_batch_size_count{model_name="m"}': "0+200x200"}, ["BatchserveBatchesNotFilling"]),
    ({'batchserve_requests_total{model_name="m"}': "0+590x200"}, ["BatchserveRequestsRefused"]),
    ({'batchserve_padding_tokens_total{model_name="m"}': "0+2000x200"}, ["BatchservePaddingHigh"]),
    ({'batchserve_worker_starts_total{model_name="m"}': "0+1x200"}, ["BatchserveWorkersRestarting"]),
    ({'batchserve_worker_starts_total{model_name="m"}': "2x115 9x0 12x0 13x82"}, ["BatchserveWorkersRestarting"]),
    # five more workers, asked for at once, ten minutes before we look
    ({'batchserve_worker_starts_total{model_name="m"}': "2x110 7x89"}, []),
    ({'batchserve_oom_splits_total{model_name="m"}': "0x115 3x84"}, ["BatchserveOutOfMemorySplits"]),
    ({'batchserve_waiting{model_name="g"}': "3x200"}, ["BatchserveCacheFull"]),
    ({'batchserve_time_to_first_token_seconds_bucket{model_name="g",le="2.5"}': "0+50x200"},
     ["BatchserveFirstTokenSlow"]),
    ({'batchserve_preemptions_total{model_name="g"}': "0+10x200"}, ["BatchservePreemptions"]),
    ({'batchserve_engine_rebuilds_total{model_name="g"}': "0x115 1x84"}, ["BatchserveEngineRebuilt"]),
]  # fmt: skip


def scenario(name: str, series: dict[str, str], raised: dict[str, list[str]], interval: str = "1m") -> dict[str, Any]:
    """A test of promtool: series, a value each interval → the alerts that are raised at some times, and only they."""
    return {
        "interval": interval,
        "name": name,
        "input_series": [{"series": each, "values": values} for each, values in series.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": time,
                "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in alerts],
            }
            for time, alerts in raised.items()
        ],
    }


def hold(tests: list[dict[str, Any]], path: Path, evaluated: str = "1m") -> None:
    """Have promtool run tests."""
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": evaluated, "tests": tests}))
    promtool("test", "rules", path)


@needs_promtool
def test_alerts_are_raised_when_they_should_be_and_only_then(tmp_path: Path) -> None:
    hold(
        [
            scenario(" ".join(raised) or f"{number}: none", {**HEALTHY, **changed}, {"2h": raised})
            for number, (changed, raised) in enumerate(SCENARIOS)
        ],
        tmp_path / "tests.yml",
    )


@needs_promtool
@pytest.mark.parametrize("loading_s", [0, 4, 15])
def test_a_worker_that_fails_to_start_is_told_before_torchserve_gives_it_up(tmp_path: Path, loading_s: int) -> None:
    starts = [120.0]
    for pause in (1, 1, 2, 3, 5, 8, 13, 21, 34, 55):  # TorchServe's own
        starts.append(starts[-1] + loading_s + pause)
    values = " ".join(str(1 + sum(start <= 15 * n for start in starts)) for n in range(80))
    given_up = f"{round(starts[-1])}s"
    series = {'batchserve_worker_starts_total{model_name="m"}': values}
    raised: dict[str, list[str]] = {"2m": [], given_up: ["BatchserveWorkersRestarting"], "19m": []}
    hold([scenario("back-off", series, raised, "15s")], tmp_path / "tests.yml", "15s")


def test_every_alert_has_a_scenario() -> None:
    raised = {name for _, names in SCENARIOS for name in names}
    assert raised == {rule.where for rule in queries.rules() if rule.alert}
