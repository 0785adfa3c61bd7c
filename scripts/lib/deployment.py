"""A declared deployment against the archives it names: what TorchServe would ignore, misread or trip over."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.lib import archive, properties
from scripts.lib.archive import Archive
from scripts.lib.decoder import ONE_WORKER
from scripts.lib.errors import UserError
from scripts.lib.serving import DEFAULT_MESSAGE_SIZE, ServedModel, Serving

#: Keys of an archive's model-config.yaml that beat what a deployment says, and the field of serving.yaml they beat.
_ARCHIVE_WINS = {
    "batchSize": "batch_size",
    "maxBatchDelay": "max_batch_delay",
    "jobQueueSize": "queue",
    "responseTimeout": "response_timeout",
    "startupTimeout": "startup_timeout",
}
#: With any model-config.yaml these are taken from it, or are this default (seconds), whatever a deployment says.
_TIMEOUTS = ("responseTimeout", "startupTimeout")
_DEFAULT_TIMEOUT = 120


def check(serving: Serving) -> dict[str, Archive]:
    """Hold a deployment against its archives.

    Returns: the archives by model name.

    Raises:
        UserError: anything declared would not take effect, or could not work; every fault is in the message.
    """
    store = serving.server.model_store
    if not store.is_dir():
        raise UserError(f"model store {store}: no such directory", hint="build an archive: batchserve build --help")
    archives, faults = {}, []
    for name, model in serving.models.items():
        try:
            found = archive.read(store / model.archive)
        except UserError as error:
            faults.append(f"models.{name}.archive: {error}" + (f" ({error.hint})" if error.hint else ""))
            continue
        archives[name] = found
        faults.extend(f"models.{name}.{fault}" for fault in model_faults(serving, model, found))
    try:
        properties.queue_size(serving)
    except UserError as error:
        faults.append(f"{error}: {error.hint}")
    if faults:
        raise UserError("\n".join(faults))
    return archives


def model_faults(serving: Serving, model: ServedModel, found: Archive) -> Iterator[str]:
    """What is wrong with one model, a line each that starts with the field of serving.yaml."""
    version = found.version or "1.0"
    if model.version != version:
        yield (
            f'version: "{model.version}" is declared and {model.archive} is "{version}": TorchServe would serve it with'
            " batches of 1"
        )
    yield from _overruled(model, found.config)
    if found.config.get("continuousBatching") is True and model.workers != 1:
        yield f"workers: must be 1: {ONE_WORKER}"
    if isinstance(found.config.get("handler"), dict):
        needed = found.settings.get("max_response_bytes", DEFAULT_MESSAGE_SIZE)
        if isinstance(needed, int) and serving.server.max_response_size < needed:
            yield (
                f"archive: its handler may answer with {needed} bytes (max_response_bytes) and server.max_response_size"
                f" is {serving.server.max_response_size}: a longer answer would kill the worker"
            )
    if found.has_requirements and not model.install_requirements:
        yield (
            "install_requirements: the archive has a requirements.txt, which would be ignored; say true to let"
            " TorchServe run pip for it"
        )


def _overruled(model: ServedModel, config: dict[str, Any]) -> Iterator[str]:
    for key, field in _ARCHIVE_WINS.items():
        declared, packed = getattr(model, field), config.get(key)
        if config and key in _TIMEOUTS:
            packed = packed if _takes_effect(packed) else _DEFAULT_TIMEOUT
        elif not _takes_effect(packed):
            continue
        if declared is not None and declared != packed:
            yield (
                f"{field}: {declared} is declared, but the archive's model-config.yaml has {key}: {packed}, which wins;"
                f" declare {packed}, or build the archive without it"
            )
    least, most = config.get("minWorkers"), config.get("maxWorkers")
    continuous = config.get("continuousBatching") is True  # said above, with the reason
    if (
        not continuous
        and _takes_effect(least)
        and _takes_effect(most)
        and (least, most) != (model.workers, model.workers)
    ):
        yield (
            f"workers: {model.workers} is declared, but the archive's model-config.yaml has minWorkers: {least} and"
            f" maxWorkers: {most}, which win; build the archive without them"
        )


def _takes_effect(value: object) -> bool:
    # TorchServe takes whole numbers above 0; it logs other kinds and goes on without.
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def describe(serving: Serving) -> list[str]:
    """A line for each model, for people."""
    return [
        f"{name} {model.version}: {model.archive}, {model.workers} worker{'s' if model.workers > 1 else ''},"
        f" batches of at most {model.batch_size} after {model.max_batch_delay} ms, queue {model.queue}"
        for name, model in serving.models.items()
    ]


def write(serving: Serving, output: Path, source: str, verb: str) -> None:
    """Write config.properties for a deployment, whole or not at all.

    Only its owner may read it when `server.extra` is in it, which may hold passwords (of a key store).

    Args:
        serving: the deployment.
        output: the file.
        source, verb: what it was made from, and by which verb; the file says so.

    Raises:
        UserError: the file cannot be written.
    """
    text = properties.render(serving, source, path=output, verb=verb)
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        mode = 0o600 if serving.server.extra else 0o666  # less the umask
        with os.fdopen(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "w", encoding="ascii") as file:
            file.write(text)
        partial.replace(output)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise UserError(f"{output}: cannot be written: {error.strerror}") from None
