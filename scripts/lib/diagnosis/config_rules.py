"""What is wrong with config.properties itself: what TorchServe ignores, misreads or stops at."""

import difflib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.lib.diagnosis import gson
from scripts.lib.diagnosis.deployment import Deployment
from scripts.lib.diagnosis.finding import Finding, Severity
from scripts.lib.diagnosis.properties_file import Entry
from scripts.lib.diagnosis.settings import (
    BOOLEANS,
    COUNTS,
    INTEGERS,
    MODEL_KEYS,
    PROPERTIES,
    load_list,
    models,
    models_fault,
    properties,
    served,
    unresolved,
    variable,
)

#: Global keys that many write and TorchServe ignores, and the keys of a model in the `models` JSON that they mean.
PER_MODEL = {
    "batch_size": ("batchSize",),
    "max_batch_delay": ("maxBatchDelay",),
    "batch_delay": ("maxBatchDelay",),
    "min_workers": ("minWorkers",),
    "max_workers": ("maxWorkers",),
    "initial_workers": ("minWorkers", "maxWorkers"),
    "response_timeout": ("responseTimeout",),
    "startup_timeout": ("startupTimeout",),
}


def plain(name: str) -> str:
    """A key without what people write differently: case, blanks, `_`, `-` and `.`."""
    return re.sub(r"[\W_]", "", name).lower()


_PER_MODEL = {plain(name): keys for name, keys in PER_MODEL.items()}
_PROPERTIES = {plain(name): name for name in PROPERTIES}
_MODEL_KEYS = {plain(name): name for name in MODEL_KEYS}


def per_model(key: str) -> tuple[str, ...]:
    """What an ignored global key means in the `models` JSON; () when it isn't one."""
    return () if key in PROPERTIES else _PER_MODEL.get(plain(key), ())


def spelling(key: str) -> str | None:
    """The property that differs from `key` in nothing but case and signs between the words."""
    return None if key in PROPERTIES or per_model(key) else _PROPERTIES.get(plain(key))


def model_key(key: str) -> str | None:
    """The key of a model in the `models` JSON that is meant by another spelling."""
    return None if key in MODEL_KEYS else _MODEL_KEYS.get(plain(key))


def ignored_key(deployment: Deployment) -> Iterator[Finding]:
    """Global batch and worker settings."""
    file = deployment.file
    if file is None:
        return
    for entry in file.own:
        if meant := per_model(entry.key):
            what = " and ".join(f'"{key}": {entry.value.strip()}' for key in meant)
            yield Finding(
                "ignored-key", Severity.ERROR, file.where(entry),
                f"{entry.key}={entry.value.strip()} stands for itself",
                "TorchServe ignores it and says nothing: batches and workers are set per model",
                f"put {what} under the model's name and version in the models property",
            )  # fmt: skip


def unknown_key(deployment: Deployment) -> Iterator[Finding]:
    """Keys that nothing reads."""
    file = deployment.file
    if file is None:
        return
    for entry in file.own:
        if entry.key in PROPERTIES or per_model(entry.key):
            continue
        near = difflib.get_close_matches(entry.key, sorted(PROPERTIES), n=1, cutoff=0.8)
        meant = spelling(entry.key) or (near[0] if near else None)
        yield Finding(
            "unknown-key", Severity.WARNING, file.where(entry),
            f"{entry.key[:80]!r} is no property of TorchServe 0.12",
            "it is ignored (unless a plugin reads it)",
            f"did you mean {meant}?" if meant else "remove it, or correct its name",
        )  # fmt: skip


def repeated_key(deployment: Deployment) -> Iterator[Finding]:
    """A key that is there twice, with different values."""
    file = deployment.file
    if file is None:
        return
    before: dict[str, Entry] = {}
    for entry in file.own:
        first = before.setdefault(entry.key, entry)
        if first.value != entry.value:
            yield Finding(
                "repeated-key", Severity.WARNING, file.where(entry),
                f"{entry.key} is set again (first on line {first.line})",
                "the last one wins in silence",
                "keep one of them",
            )  # fmt: skip


def trailing_blank(deployment: Deployment) -> Iterator[Finding]:
    """A blank behind a number, a boolean, or the backslash that should continue a line."""
    file = deployment.file
    if file is None:
        return
    for entry in file.own:
        if entry.key in INTEGERS | BOOLEANS and entry.value != entry.value.rstrip():
            number = entry.key in INTEGERS
            yield Finding(
                "trailing-blank", Severity.ERROR, file.where(entry),
                f"{entry.key}={entry.value.strip()} has a blank at its end",
                f"Java keeps it: {'the number cannot be read, TorchServe stops' if number else 'it counts as false'}",
                "remove the blank",
            )  # fmt: skip
        elif re.search(r"(?<!\\)(\\\\)*\\[ \t]+[\r\n]*$", entry.source):
            yield Finding(
                "blank-after-backslash", Severity.ERROR, file.where(entry),
                f"a backslash at the end of a line of {entry.key[:80]} has a blank behind it",
                "it continues nothing: the value ends there and the next line is a key of its own",
                "remove the blank behind the backslash",
            )  # fmt: skip


def bad_number(deployment: Deployment) -> Iterator[Finding]:
    """A number that Java cannot read."""
    for key, setting in properties(deployment).items():
        value = str(setting.value)
        if key in INTEGERS and not _java_int(value.rstrip()):
            yield Finding(
                "bad-number", Severity.ERROR, setting.place,
                f"{key}={value[:40]} is no whole number",
                "TorchServe stops when it reads it",
                "write digits only",
            )  # fmt: skip


def _java_int(value: str) -> bool:
    return bool(re.fullmatch(r"[+-]?[0-9]{1,10}", value, re.ASCII)) and -(2**31) <= int(value) < 2**31


def models_json(deployment: Deployment) -> Iterator[Finding]:
    """A `models` property that cannot be read."""
    fault, file = models_fault(deployment), deployment.file
    if not fault:
        return
    where = properties(deployment)["models"].place
    if file is not None and file.rejoined is not None:
        yield Finding(
            "models-cut", Severity.ERROR, where,
            f"the models JSON runs to line {file.rejoined.last} and its lines don't all end with a backslash",
            "its value ends at the first line without one, and TorchServe does not start",
            "end every line but the last with a backslash, nothing behind it, and no comments between",
        )  # fmt: skip
        return
    yield Finding(
        "models-json", Severity.ERROR, where, f"models is not JSON: {fault}", "TorchServe does not start",
        "correct it: one object of names, in each an object of versions, in each an object of settings",
    )  # fmt: skip


def models_value(deployment: Deployment) -> Iterator[Finding]:
    """Settings in the `models` JSON that are misspelt or no numbers."""
    where = _models_place(deployment)
    for name, version, settings in _versions(deployment):
        for key, value in settings.items():
            place = f"{where}, {name} {version}"
            if key not in MODEL_KEYS:
                meant = model_key(key) or next(iter(difflib.get_close_matches(key, MODEL_KEYS, n=1, cutoff=0.8)), None)
                queue = plain(key) in ("jobqueuesize", "queuesize", "queue")
                yield Finding(
                    "models-key", Severity.ERROR if meant or queue else Severity.WARNING, place,
                    f"{key[:80]!r} is no setting of a model",
                    "TorchServe ignores it and says nothing",
                    f"write {meant}" if meant else "set job_queue_size, which is one for all models" if queue
                    else f"known are {', '.join(MODEL_KEYS)}",
                )  # fmt: skip
            elif key in COUNTS:
                yield from _count(place, key, value)


def _count(place: str, key: str, value: Any) -> Iterator[Finding]:
    try:
        number = gson.as_int(value)
    except gson.GsonError:
        yield Finding(
            "models-number", Severity.ERROR, place, f"{key} is {json.dumps(value)[:40]}, no number",
            "TorchServe stops at it when it loads the model", "write a whole number above 0",
        )  # fmt: skip
        return
    if key == "maxBatchDelay" and number == 0:
        yield Finding(
            "delay-zero", Severity.ERROR, place, "maxBatchDelay is 0",
            "TorchServe takes 0 for unset, which is 100 ms", "write 1: the least that it takes",
        )  # fmt: skip
    elif number is None or number <= 0:
        yield Finding(
            "models-number", Severity.ERROR, place, f"{key} is {json.dumps(value)[:40]}",
            "TorchServe takes it for unset", "write a whole number above 0",
        )  # fmt: skip


def models_match(deployment: Deployment) -> Iterator[Finding]:
    """Names and versions in the `models` JSON that no model has."""
    if deployment.archives is None or "model_snapshot" in properties(deployment):
        return
    where = _models_place(deployment)
    loaded: dict[str, list[str]] = {}
    for model in served(deployment):
        loaded.setdefault(model.name, []).append(model.stored.version)
    named = load_list(deployment) is not None or "load_models" in properties(deployment)
    for name, versions in models(deployment).items():
        if name not in loaded:
            near = difflib.get_close_matches(name, loaded, n=1, cutoff=0.6)
            guess = f"it is registered as {near[0]!r}" if near else f"registered are: {', '.join(loaded) or 'none'}"
            yield Finding(
                "models-name", Severity.ERROR if named else Severity.WARNING, f"{where}, {name}",
                f"no model is registered as {name!r}",
                "its settings are never looked up: batches of 1, a delay of 100 ms, default workers",
                f"write the name that load_models gives, or else the archive's own ({guess})",
            )  # fmt: skip
            continue
        for version in versions:
            if version not in loaded[name]:
                have = ", ".join(f'"{one}"' for one in loaded[name])
                yield Finding(
                    "models-version", Severity.ERROR, f"{where}, {name}",
                    f'version "{version}" is set and the archive is {have}',
                    "TorchServe looks settings up by the exact text: batches of 1, a delay of 100 ms, default workers",
                    f"write {have}",
                )  # fmt: skip


def load_models(deployment: Deployment) -> Iterator[Finding]:
    """What `load_models` cannot find."""
    text = properties(deployment).get("load_models")
    for name, file in load_list(deployment) or []:
        if name != name.strip() or file != file.strip():
            yield Finding(
                "load-models-blank", Severity.ERROR, text.place if text else "",
                f"load_models has a blank around {file.strip()!r}",
                "TorchServe takes the blank for a part of the name: the file isn't found, or the model is called by it",
                "remove the blanks",
            )  # fmt: skip
        elif deployment.archives is not None and "://" not in file and file not in deployment.archives:
            if file in deployment.passed_over or any(one.path.name == file for one in deployment.unreadable):
                continue
            near = difflib.get_close_matches(file, deployment.archives, n=1, cutoff=0.5)
            yield Finding(
                "load-models-missing", Severity.ERROR, text.place if text else "",
                f"load_models names {file}, which the model store doesn't have",
                "TorchServe logs a warning and starts without the model",
                f"did you mean {near[0]}?" if near else "put it there, or take it out of load_models",
            )  # fmt: skip


def environment(deployment: Deployment) -> Iterator[Finding]:
    """Environment variables that win, are ignored, or are missing."""
    file = deployment.file
    if file is None:
        return
    for entry, name in unresolved(deployment):
        yield Finding(
            "environment-missing", Severity.ERROR, file.where(entry), f"{entry.key} asks for ${name}, which isn't set",
            "TorchServe does not start without it", f"set {name} where the server starts",
        )  # fmt: skip
    found = properties(deployment)
    for key in sorted(PROPERTIES):
        name_or_none, given = variable(key), file.get(key)
        value = deployment.environment.get(name_or_none or "")
        if name_or_none is None or value is None or key == "model_server_home":
            continue
        if found.get(key) is None or found[key].value != value:
            yield Finding(
                "environment-ignored", Severity.WARNING, f"${name_or_none}", f"{name_or_none} is set",
                f"TorchServe ignores it unless {_switch(key)}=true",
                f"write {key} into {file.path.name}, or switch the variables on there",
            )  # fmt: skip
        elif given is not None and given.value != value:
            yield Finding(
                "environment-wins", Severity.WARNING, f"${name_or_none}",
                f"{name_or_none} is set, and so is {key} on line {given.line} of {file.path.name}",
                "the variable wins: edits of the file have no effect", "keep one of them",
            )  # fmt: skip
    other = deployment.environment.get("TS_CONFIG_FILE")
    if other is not None and file.path.absolute() != Path(other).absolute():
        yield Finding(
            "config-file-environment", Severity.WARNING, "$TS_CONFIG_FILE", f"TS_CONFIG_FILE is {other}",
            "it wins over --ts-config: where the server has it too, this file is not read",
            "unset it, or edit that file",
        )  # fmt: skip


def _switch(key: str) -> str:
    return "use_env_allowed_urls" if key == "allowed_urls" else "enable_envvars_config"


def _models_place(deployment: Deployment) -> str:
    text = properties(deployment).get("models")
    return f"{text.place} models" if text else ""


def _versions(deployment: Deployment) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for name, versions in models(deployment).items():
        for version, settings in versions.items():
            yield name, version, settings


RULES = (
    ignored_key, unknown_key, repeated_key, trailing_blank, bad_number, models_json, models_value, models_match,
    load_models, environment,
)  # fmt: skip
