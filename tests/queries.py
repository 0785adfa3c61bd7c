"""Every query of config/prometheus and config/grafana, and what each one names."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CONFIG = Path(__file__).parents[1] / "config"
PROMETHEUS = CONFIG / "prometheus" / "prometheus.yml"
RULES = CONFIG / "prometheus" / "batchserve.rules.yml"
DASHBOARD = CONFIG / "grafana" / "batchserve.json"

_GROUPING = re.compile(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"(?<![\w:])([a-zA-Z_:][\w:]*)\s*(\{[^}]*\})?\s*(\(?)")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
_COMPARISON = re.compile(r" (>|<|==) ")


@dataclass(frozen=True)
class Query:
    """A query and where it stands."""

    where: str
    expr: str
    record: str = ""
    alert: bool = False

    @property
    def value(self) -> str:
        """The query with comparisons that say 0 or 1 instead of leaving a series out."""
        return _COMPARISON.sub(r" \1 bool ", self.expr) if self.alert else self.expr


@dataclass(frozen=True)
class Selector:
    """A metric in a query, with the labels that it is asked for by."""

    name: str
    labels: tuple[str, ...]
    text: str


def rules() -> list[Query]:
    """Those of the recording and alerting rules."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [
        Query(rule.get("alert") or rule["record"], rule["expr"], rule.get("record", ""), "alert" in rule)
        for group in groups
        for rule in group["rules"]
    ]


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels without its rows."""
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def dashboard(interval: str = "1m") -> list[Query]:
    """Those of the dashboard, its variables filled in: all models, and `interval` for rates."""
    return [
        Query(panel["title"], target["expr"].replace("$model", ".*").replace("$__rate_interval", interval))
        for panel in panels()
        for target in panel["targets"]
    ]


def selectors(expr: str) -> Iterator[Selector]:
    """The metrics that a query names."""
    text = re.sub(r"\[[^\]]*\]", " ", _GROUPING.sub(" ", expr))
    for name, matchers, call in _SELECTOR.findall(text):
        if not call and name not in ("and", "or", "unless", "bool"):
            yield Selector(name, tuple(_MATCHER.findall(matchers)), name + matchers)


def grouping(expr: str) -> set[str]:
    """The labels that a query groups or joins by."""
    return {label.strip() for group in _GROUPING.findall(expr) for label in group.split(",") if label.strip()}


def published() -> dict[str, set[str]]:
    """Every metric that there is → its labels: metrics.yaml, what rules record, and what Prometheus adds."""
    listed = yaml.safe_load((CONFIG / "metrics.yaml").read_text(encoding="utf-8"))
    found = {
        metric["name"]: {*metric["dimensions"], "instance", "job"}
        for part in ("ts_metrics", "model_metrics")
        for metrics in listed[part].values()
        for metric in metrics
    }
    return {**found, **{rule.record: {"model_name"} for rule in rules() if rule.record}, "up": {"instance", "job"}}
