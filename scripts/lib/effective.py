"""What a server really runs with, where each value came from, and where that is not what serving.yaml says.

TorchServe tells values and not their sources; they are inferred by its order of precedence (the first that is there
wins), from the archive and serving.yaml:

- batch size, delay: REST registration, archive, `models` JSON in config.properties, default;
- workers: archive (when it has both keys), REST registration or `models` JSON, and whatever PUT /models said since;
- queue: archive, `job_queue_size` in config.properties, default;
- timeouts: archive (when it has a model-config.yaml at all), `models` JSON, REST registration, default.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from scripts.lib import archive
from scripts.lib.errors import UserError
from scripts.lib.management import Model
from scripts.lib.serving import ServedModel, Serving

DEFAULT_BATCH_SIZE, DEFAULT_DELAY, DEFAULT_QUEUE = 1, 100, 100
DEFAULT_TIMEOUT = 120  # seconds


class Source(StrEnum):
    """Where an effective value came from."""

    REST = "REST"
    ARCHIVE = "archive"
    PROPERTIES = "config.properties"
    DEFAULT = "default"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Value:
    """An effective value and its source."""

    value: int
    source: Source


@dataclass(frozen=True)
class Effective:
    """One version of a model as the server runs it.

    The delay is milliseconds, timeouts are seconds, the queue counts requests. `workers` are the fewest that it keeps;
    `at_startup` is false of a model that was registered by REST or restored from a snapshot.
    """

    name: str
    version: str
    archive: str
    default: bool
    ready: int
    workers: Value
    batch_size: Value
    max_batch_delay: Value
    queue: Value
    pending: int
    max_workers: int
    response_timeout: Value
    startup_timeout: Value
    continuous: bool
    at_startup: bool


def effective(model: Model, default: bool, declared: ServedModel | None, config: Mapping[str, Any] | None) -> Effective:
    """Infer the sources of a version's values.

    Args:
        model: the server's description.
        default: whether requests without a version go to it.
        declared: its entry in serving.yaml, None without one; that counts as config.properties, which is written from
            it, when its version is this one.
        config: the archive's model-config.yaml, None when the archive cannot be read here.
    """
    if declared is not None and declared.version != model.model_version:
        declared = None  # TorchServe looks settings up by the exact version
    least, most = packed(config, "minWorkers"), packed(config, "maxWorkers")
    workers = max(model.min_workers, 0)
    return Effective(
        name=model.model_name,
        version=model.model_version,
        archive=model.model_url,
        default=default,
        ready=model.ready,
        workers=Value(
            workers,
            _workers_source(model, workers, least if least and most else None, declared),
        ),
        batch_size=_batching(
            model, model.batch_size, config, "batchSize", declared.batch_size if declared else None, DEFAULT_BATCH_SIZE
        ),
        max_batch_delay=_batching(
            model,
            model.max_batch_delay,
            config,
            "maxBatchDelay",
            declared.max_batch_delay if declared else None,
            DEFAULT_DELAY,
        ),
        queue=_queue(model.job_queue_status.capacity, config, declared),
        pending=model.job_queue_status.pending_requests,
        max_workers=max(model.max_workers, workers),
        response_timeout=_timeout(
            model, model.response_timeout, config, declared.response_timeout if declared else None
        ),
        startup_timeout=_timeout(model, model.startup_timeout, config, declared.startup_timeout if declared else None),
        continuous=model.continuous_batching,
        at_startup=model.loaded_at_startup,
    )


def packed(config: Mapping[str, Any] | None, key: str) -> int | None:
    """What TorchServe takes from model-config.yaml: whole numbers above 0, nothing else."""
    value = (config or {}).get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _batching(
    model: Model, value: int, config: Mapping[str, Any] | None, key: str, declared: int | None, default: int
) -> Value:
    in_archive = packed(config, key)
    if in_archive is not None and in_archive == value:
        return Value(value, Source.ARCHIVE)
    if not model.loaded_at_startup:
        # Registered by REST, whose values come first; equal ones cannot be told apart.
        return Value(value, Source.REST if value != default else Source.DEFAULT)
    if in_archive is None and declared == value:
        return Value(value, Source.PROPERTIES)
    # Neither: the archive was changed since, or config.properties is another one than serving.yaml's.
    return Value(value, Source.DEFAULT if in_archive is None and value == default else Source.UNKNOWN)


def _workers_source(model: Model, workers: int, packed: int | None, declared: ServedModel | None) -> Source:
    if packed is not None and workers == packed:
        return Source.ARCHIVE
    if declared is not None and model.loaded_at_startup and workers == declared.workers:
        return Source.PROPERTIES
    if not model.loaded_at_startup or declared is not None or packed is not None:
        return Source.REST  # at registration, or by PUT since
    return Source.UNKNOWN


def _queue(value: int, config: Mapping[str, Any] | None, declared: ServedModel | None) -> Value:
    if packed(config, "jobQueueSize") == value:
        return Value(value, Source.ARCHIVE)
    if declared is not None and declared.queue == value:
        return Value(value, Source.PROPERTIES)
    return Value(value, Source.DEFAULT if value == DEFAULT_QUEUE else Source.UNKNOWN)


def _timeout(model: Model, value: int, config: Mapping[str, Any] | None, declared: int | None) -> Value:
    if config:
        return Value(value, Source.ARCHIVE)
    if model.loaded_at_startup and declared == value:
        return Value(value, Source.PROPERTIES)
    if value == DEFAULT_TIMEOUT:
        return Value(value, Source.DEFAULT)
    return Value(value, Source.UNKNOWN if model.loaded_at_startup else Source.REST)


def archive_config(model: Model, store: Path | None) -> Mapping[str, Any] | None:
    """The model-config.yaml of a version's archive, None where the archive cannot be read."""
    name = model.model_url.rpartition("/")[2]
    if store is None or not name:
        return None
    try:
        found = archive.read(store / name)
    except UserError:
        return None
    return found.config if found.version in ("", model.model_version) else None


def differences(serving: Serving, running: Sequence[Effective]) -> list[str]:
    """Where the server is not what serving.yaml declares, a line each."""
    lines = []
    for name, declared in serving.models.items():
        versions = {one.version: one for one in running if one.name == name}
        one = versions.get(declared.version)
        if one is None:
            found = f" (it serves {', '.join(sorted(versions))})" if versions else ""
            lines.append(f"{name} {declared.version} is declared and not on the server{found}")
            continue
        if not one.default:
            lines.append(f"{name}: requests without a version go to another version than {declared.version}")
        if one.archive.rpartition("/")[2] != declared.archive:
            lines.append(f"{name}: the server runs {one.archive}, declared is {declared.archive}")
        for field, value in {
            "workers": one.workers,
            "batch_size": one.batch_size,
            "max_batch_delay": one.max_batch_delay,
            "queue": one.queue,
        }.items():
            wanted = getattr(declared, field)
            if value.value != wanted:
                lines.append(f"{name}: {field} is {value.value} ({value.source}), declared is {wanted}")
    for one in running:
        entry = serving.models.get(one.name)
        if entry is None or entry.version != one.version:
            lines.append(f"{one.name} {one.version} is on the server and not declared")
    return lines


def health(running: Sequence[Effective]) -> list[str]:
    """What keeps a model from serving as it should, a line each."""
    lines = []
    for one in running:
        if one.workers.value == 0:
            lines.append(f"{one.name} {one.version} has no worker: every request gets 503")
        elif one.ready < one.workers.value:
            lines.append(f"{one.name} {one.version}: {one.ready} of {one.workers.value} workers are ready")
        if one.pending and one.pending >= one.queue.value:
            lines.append(f"{one.name} {one.version}: the queue is full; further requests get 503")
    return lines
