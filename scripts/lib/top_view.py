"""A server's activity as tables for a terminal, and as JSON."""

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from scripts.lib.top import Activity, Batching

BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 20  # characters of a bar of 100 %


def as_json(activity: Activity) -> dict[str, Any]:
    """The activity as JSON values: rates a second, times in ms, shares from 0 to 1."""
    found = asdict(activity)
    for told, model in zip(found["models"], activity.models, strict=True):
        told["workers"] = [worker.model_dump() for worker in model.workers]
        if model.batching is not None:
            sizes = told["batching"]["window"].pop("batch_sizes")
            told["batching"]["window"]["batch_sizes"] = {_bound(bound): count for bound, count in sizes.items()}
            told["batching"]["effective_batch_size"] = model.batching.window.effective_batch_size
            told["batching"]["padding_share"] = model.batching.window.padding_share
    return found


def view(activity: Activity, server: str) -> RenderableType:
    """The activity as a person sees it.

    Args:
        activity: to show.
        server: what it is of.
    """
    parts: list[RenderableType] = [_head(activity, server)]
    if activity.fault:
        parts.append(Text(activity.fault, style="red"))
    parts.append(_models(activity))
    if any(model.generation for model in activity.models):
        parts.append(_generation(activity))
    parts.append(_workers(activity))
    return Group(*(each for part in parts for each in (part, "")))


def _head(activity: Activity, server: str) -> Text:
    told = [("CPU", activity.cpu), ("memory", activity.memory)]
    for gpu in activity.gpus:
        told += [(f"GPU {gpu.device}", gpu.busy), (f"GPU {gpu.device} memory", gpu.memory)]
    answers = "  ".join(f"{status} {rate:.1f}/s" for status, rate in activity.answers_per_s.items())
    lines = [f"{server}   the last {activity.seconds:.0f} s   {answers}"]
    lines += [f"{label:<14} {_bar(percent)} {percent:5.1f} %" for label, percent in told if percent is not None]
    return Text("\n".join(lines))


def _bar(percent: float) -> str:
    full = round(min(max(percent, 0.0), 100.0) / 100 * _WIDTH)
    return "█" * full + "░" * (_WIDTH - full)


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _models(activity: Activity) -> Table:
    ours = any(model.batching for model in activity.models)
    table = _table(
        "model", "workers", "requests", "latency", "queue", "waiting",
        *(("in worker p95", "batch size", "1 2 4 8 …", "padding", "errors") if ours else ()),
    )  # fmt: skip
    for model in activity.models:
        cells = [
            escape(f"{model.name} {', '.join(model.versions)}"),
            f"{sum(worker.ready for worker in model.workers)}/{len(model.workers)}",
            "–" if model.requests_per_s is None else f"{model.requests_per_s:.1f}/s",
            _ms(model.latency_ms),
            _ms(model.queue_ms),
            f"{model.pending}/{model.room}",
        ]
        table.add_row(*cells, *(_batching(model.batching, activity.seconds) if ours else ()))
    return table


def _batching(batching: Batching | None, seconds: float) -> list[str]:
    if batching is None:
        return ["–"] * 5
    window = batching.window
    size, padding = window.effective_batch_size, window.padding_share
    errors = ", ".join(f"{code} {count / seconds:.1f}/s" for code, count in window.errors.items())
    return [
        _ms(batching.worker_ms["p95"]),
        ("–" if size is None else f"{size:.1f}") + ("" if batching.limit is None else f"/{batching.limit}"),
        histogram(window.batch_sizes),
        "–" if padding is None else f"{padding:.0%}",
        escape(errors) or "0",
    ]


def histogram(sizes: dict[float, int]) -> str:
    """Batches by their size, a bar for each bucket from 1 up to the largest there is; "" without batches."""
    if not sizes:
        return ""
    most, bounds = max(sizes.values()), [2.0**power for power in range(8)] + [float("inf")]
    last = max(at for at, bound in enumerate(bounds) if bound in sizes) if set(sizes) & set(bounds) else -1
    counts = [sizes.get(bound, 0) for bound in bounds[: last + 1]]
    return "".join(BARS[-(-count * len(BARS) // most) - 1] if count else " " for count in counts)


def _generation(activity: Activity) -> Table:
    table = _table(
        "generation", "running", "waiting", "cache", "in", "out", "first token p50, p95", "per token p50, p95"
    )
    for model in activity.models:
        if model.generation is None:
            continue
        told = model.generation
        table.add_row(
            escape(model.name),
            str(told.running),
            str(told.waiting),
            f"{told.cache_used:.0%}",
            f"{told.prompt_tokens_per_s:.0f} tokens/s",
            f"{told.generated_tokens_per_s:.0f} tokens/s",
            ", ".join(_ms(value) for value in told.first_token_ms.values()),
            ", ".join(_ms(value) for value in told.per_token_ms.values()),
        )
    return table


def _workers(activity: Activity) -> Table:
    table = _table("worker", "model", "state", "process", "memory")
    for model in activity.models:
        for worker in model.workers:
            style = "" if worker.ready else "yellow"
            pid = str(worker.pid) if worker.pid > 0 else "–"
            memory = f"{worker.memory_usage / 2**20:.0f} MiB" if worker.memory_usage > 0 else "–"
            place = worker.status + (" GPU" if worker.gpu else "")
            table.add_row(escape(worker.id), escape(model.name), escape(place), pid, memory, style=style)
    return table


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"


def _bound(bound: float) -> str:
    return "+Inf" if bound == float("inf") else f"{bound:g}"
