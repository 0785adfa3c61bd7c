"""What the server did in a window, read from its Prometheus metrics before and after."""

import asyncio
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from handlers.metrics import INTERVAL

BUCKET = "batchserve_batch_size_bucket"
ERRORS = "batchserve_errors_total"

_DECLARED = re.compile(r"^# TYPE (\S+) counter$", re.MULTILINE)

Labels = tuple[tuple[str, str], ...]

# Counters that have not changed for so long have all come: the hand-over, and its way through the frontend.
REST_S = INTERVAL + 0.3


@dataclass(frozen=True)
class Snapshot:
    """The counters of a server at one moment: (name, sorted labels) → value."""

    values: Mapping[tuple[str, Labels], float] = field(default_factory=dict)

    @classmethod
    def parse(cls, exposition: str) -> "Snapshot":
        """Read the Prometheus text format.

        Raises:
            ValueError: not the Prometheus text format.
        """
        values = {}
        declared = set(_DECLARED.findall(exposition))
        for family in text_string_to_metric_families(exposition):
            for sample in family.samples:
                # The parser gives every counter's name the ending _total, which not all of the server's have.
                short = sample.name.removesuffix("_total")
                name = short if short in declared else sample.name
                values[(name, tuple(sorted(sample.labels.items())))] = float(sample.value)
        return cls(values)

    def total(self, name: str, model: str) -> float:
        """Sum over every series of a name that belongs to a model; 0 where there is none."""
        return sum(value for _, value in self.series(name, model))

    def series(self, name: str, model: str) -> Iterable[tuple[dict[str, str], float]]:
        """The series of a name that belong to a model: labels and value."""
        for (found, labels), value in self.values.items():
            as_dict = dict(labels)
            if found == name and as_dict.get("model_name") == model:
                yield as_dict, value


@dataclass(frozen=True)
class BatchingWindow:
    """How a model's batches went between two snapshots. Counts of the window, not of the server's life.

    Attributes:
        requests: requests that reached the handler.
        items: texts in them.
        tokens: real tokens run.
        padding_tokens: tokens run that were only padding.
        truncated_tokens: tokens cut.
        batches: calls of the handler.
        micro_batches: forward passes.
        batch_sizes: upper bound of a bucket → batches in it (not cumulative).
        errors: HTTP status → requests.
        tokenize_s, forward_s, render_s: seconds spent in each, summed over workers.
    """

    requests: int
    items: int
    tokens: int
    padding_tokens: int
    truncated_tokens: int
    batches: int
    micro_batches: int
    batch_sizes: dict[float, int]
    errors: dict[str, int]
    tokenize_s: float
    forward_s: float
    render_s: float

    @property
    def effective_batch_size(self) -> float | None:
        """Requests per batch; None without batches."""
        return self.requests / self.batches if self.batches else None

    @property
    def padding_share(self) -> float | None:
        """Padding ÷ all tokens run; None where nothing ran."""
        run = self.tokens + self.padding_tokens
        return self.padding_tokens / run if run else None

    @property
    def micro_batches_per_batch(self) -> float | None:
        """Forward passes per batch; None without batches."""
        return self.micro_batches / self.batches if self.batches else None


def growths(before: Snapshot, after: Snapshot, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
    """How much each series of a counter grew.

    One that went down was reset (a server began anew, or another one took the port): its value after is what was seen.

    Args:
        before, after: two moments.
        name: of the counter.
        labels: that a series must have; it may have others too.
    """
    for (found, pairs), end in after.values.items():
        if found == name and labels.items() <= (own := dict(pairs)).items() and not math.isnan(end):
            start = before.values.get((found, pairs), 0.0)
            yield own, end - start if end >= start else end


def grown(before: Snapshot, after: Snapshot, name: str, **labels: str) -> float:
    """How much the series of a counter grew together, as `growths` has them."""
    return sum(growth for _, growth in growths(before, after, name, **labels))


def window(before: Snapshot, after: Snapshot, model: str) -> BatchingWindow:
    """The difference of two snapshots for one model."""

    def count(what: str) -> int:
        return round(grown(before, after, f"batchserve_{what}_total", model_name=model))

    def seconds(what: str) -> float:
        return grown(before, after, f"batchserve_{what}_seconds_total", model_name=model)

    return BatchingWindow(
        requests=count("requests"),
        items=count("items"),
        tokens=count("tokens"),
        padding_tokens=count("padding_tokens"),
        truncated_tokens=count("truncated_tokens"),
        batches=count("batches"),
        micro_batches=count("micro_batches"),
        batch_sizes=_histogram(before, after, model),
        errors=_errors(before, after, model),
        tokenize_s=seconds("tokenize"),
        forward_s=seconds("forward"),
        render_s=seconds("render"),
    )


def _by_label(before: Snapshot, after: Snapshot, model: str, name: str, label: str) -> dict[str, int]:
    """How much each value of a label grew, summed over the other labels."""
    found: dict[str, float] = {}
    for labels, growth in growths(before, after, name, model_name=model):
        key = labels.get(label, "")
        found[key] = found.get(key, 0.0) + growth
    return {key: round(value) for key, value in found.items()}


def _histogram(before: Snapshot, after: Snapshot, model: str) -> dict[float, int]:
    cumulative = _by_label(before, after, model, BUCKET, "le")
    sizes, below = {}, 0
    for bound, total in sorted((float(bound), total) for bound, total in cumulative.items()):
        if total > below:
            sizes[bound] = total - below
        below = max(below, total)
    return sizes


def _errors(before: Snapshot, after: Snapshot, model: str) -> dict[str, int]:
    by_code = _by_label(before, after, model, ERRORS, "code")
    return {code: count for code, count in sorted(by_code.items()) if count > 0}


async def scrape(url: str, timeout_s: float = 10.0) -> Snapshot:
    """Read the metrics at a URL.

    Raises:
        aiohttp.ClientError: no answer, or not a 2xx one.
        ValueError: not the Prometheus text format.
    """
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
        session.get(url, raise_for_status=True) as response,
    ):
        return Snapshot.parse(await response.text())


async def settled(url: str, model: str, requests: float | None = None, patience_s: float = 3.0) -> Snapshot:
    """Read the metrics once they have stopped changing.

    A worker hands its counters over a few times a second, and they travel to the frontend through its log.

    Args:
        url: where the metrics are.
        model: whose counters must be at rest.
        requests: the model's count of requests to wait for, where it is known.
        patience_s: after this many seconds the last reading is taken as it is.
    """
    deadline = time.monotonic() + patience_s
    last = await scrape(url)
    while time.monotonic() < deadline:
        await asyncio.sleep(REST_S)
        now = await scrape(url)
        counted = now.total("batchserve_requests_total", model)
        at_rest = _counters(now, model) == _counters(last, model)
        last = now
        if at_rest and (requests is None or counted >= requests):
            break
    return last


def _counters(snapshot: Snapshot, model: str) -> dict[tuple[str, Labels], float]:
    return {
        key: value
        for key, value in snapshot.values.items()
        if key[0].startswith("batchserve_") and ("model_name", model) in key[1] and not math.isnan(value)
    }


class Counting:
    """Reads a model's counters around a measured window.

    Args:
        url: the server's Prometheus metrics.
        model: whose counters to read.
    """

    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._model = model
        self._start = Snapshot()

    async def before(self) -> None:
        """Read them just before the window opens. Raises what `scrape` raises."""
        self._start = await settled(self._url, self._model)

    async def after(self, answered: int) -> BatchingWindow:
        """Read them once the window's answered requests are all counted; how the batches went in between.

        Raises what `scrape` raises.
        """
        counted = self._start.total("batchserve_requests_total", self._model)
        return window(self._start, await settled(self._url, self._model, counted + answered), self._model)
