"""The effective value of every setting, and the place it came from, by TorchServe 0.12's order of precedence.

Read out of the server's jar and tried: what comes first in each function is what wins there.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from scripts.lib.diagnosis import gson
from scripts.lib.diagnosis.deployment import Deployment, StoredArchive
from scripts.lib.diagnosis.properties_file import Entry
from scripts.lib.effective import DEFAULT_BATCH_SIZE, DEFAULT_DELAY, DEFAULT_QUEUE, DEFAULT_TIMEOUT, packed
from scripts.lib.serving import DEFAULT_MESSAGE_SIZE, EXTRA_PROPERTIES

DEFAULT_TOKEN_EXPIRATION = 60  # minutes
#: Every property that TorchServe or its launcher reads.
PROPERTIES = EXTRA_PROPERTIES | frozenset(
    {"allowed_urls", "debug", "default_service_handler", "default_workers_per_model", "disable_token_authorization",
     "enable_envvars_config", "enable_model_api", "grpc_inference_address", "grpc_inference_port",
     "grpc_management_address", "grpc_management_port", "inference_address", "install_py_dep_per_model",
     "job_queue_size", "load_models", "management_address", "max_request_size", "max_response_size", "metrics_address",
     "metrics_config", "metrics_mode", "model_server_home", "model_snapshot", "model_store", "models", "number_of_gpu",
     "plugins_path", "python", "service_envelope", "token_expiration_min", "ts_open_inference_protocol",
     "tsConfigFile", "use_env_allowed_urls", "version", "vmargs", "workflow_store"}
)  # fmt: skip
#: What TorchServe takes for a property that nobody sets, where that matters to a deployment.
DEFAULTS = {
    "inference_address": "http://127.0.0.1:8080",
    "management_address": "http://127.0.0.1:8081",
    "metrics_address": "http://127.0.0.1:8082",
    "grpc_inference_port": "7070",
    "grpc_management_port": "7071",
    "disable_token_authorization": "false",
    "token_expiration_min": str(DEFAULT_TOKEN_EXPIRATION),
    "enable_model_api": "false",
    "allowed_urls": "file://.*|http(s)?://.*",
    "enable_envvars_config": "false",
    "install_py_dep_per_model": "false",
    "job_queue_size": str(DEFAULT_QUEUE),
    "max_request_size": str(DEFAULT_MESSAGE_SIZE),
    "max_response_size": str(DEFAULT_MESSAGE_SIZE),
    "default_response_timeout": str(DEFAULT_TIMEOUT),
    "default_startup_timeout": str(DEFAULT_TIMEOUT),
    "metrics_mode": "log",
}
#: Read from the file alone, whatever the environment says.
_FILE_ONLY = frozenset(
    {"enable_envvars_config", "io_ratio", "metric_time_interval", "model_snapshot", "models", "plugins_path", "python",
     "system_metrics_cmd", "tsConfigFile", "use_env_allowed_urls", "use_native_io", "version", "vmargs"}
)  # fmt: skip
#: Variables that are not TS_ and the property's name.
_ODD_VARIABLES = {"token_expiration_min": "TS_TOKEN_EXPIRATION_TIME_MIN"}
#: Parsed by Integer.parseInt, which takes no blank.
INTEGERS = frozenset(
    {"default_response_timeout", "default_startup_timeout", "default_workers_per_model", "grpc_inference_port",
     "grpc_management_port", "initial_distribution_port", "initial_worker_port", "io_ratio", "job_queue_size",
     "max_request_size", "max_response_size", "metric_time_interval", "netty_client_threads", "number_of_gpu",
     "number_of_netty_threads", "unregister_model_timeout"}
)  # fmt: skip
#: "true", in any case and without a blank, or else false.
BOOLEANS = frozenset(
    {"async_logging", "cpu_launcher_enable", "debug", "disable_system_metrics", "disable_token_authorization",
     "enable_envvars_config", "enable_grpc_ssl", "enable_metrics_api", "enable_model_api", "install_py_dep_per_model",
     "ipex_enable", "ipex_gpu_enable", "model_metrics_auto_detect", "prefer_direct_buffer",
     "ts_open_inference_protocol", "use_native_io"}
)  # fmt: skip
#: What TorchServe reads of a version in the `models` JSON.
MODEL_KEYS = (
    "defaultVersion", "marName", "minWorkers", "maxWorkers", "batchSize", "maxBatchDelay", "responseTimeout",
    "startupTimeout", "runtimeType", "parallelLevel",
)  # fmt: skip
COUNTS = ("minWorkers", "maxWorkers", "batchSize", "maxBatchDelay", "responseTimeout", "startupTimeout")

_VARIABLE = re.compile(r"\$\$([^$]+[^$])\$\$")
_DEFAULT = "TorchServe's default"


@dataclass(frozen=True)
class Setting:
    """An effective value and the place it came from, for people; `given` when somebody gave it."""

    value: Any
    place: str
    given: bool = True


@dataclass(frozen=True)
class Served:
    """A model that TorchServe registers at its start (or would, by `--models all`).

    Args:
        name: what it is registered as.
        stored: its archive.
        settings: by TorchServe's camelCase names.
        entry: its settings in the `models` JSON, {} where its name and version have none.
    """

    name: str
    stored: StoredArchive
    settings: Mapping[str, Setting]
    entry: Mapping[str, Any]

    @property
    def version(self) -> str:
        """The version that it is registered as."""
        return self.stored.version

    @property
    def title(self) -> str:
        """Name and version, for people."""
        return f"{self.name} {self.version}"

    def count(self, key: str) -> int:
        """A setting that is a whole number."""
        return int(self.settings[key].value)


def variable(key: str) -> str | None:
    """The environment variable of a property, None where there is none."""
    if key in _FILE_ONLY or key not in PROPERTIES:
        return None
    upper = key.upper()
    return _ODD_VARIABLES.get(key, upper if upper.startswith("TS_") else f"TS_{upper}")


def properties(deployment: Deployment) -> dict[str, Setting]:
    """Every property that somebody set, as TorchServe has it once it runs."""
    found: dict[str, Setting] = {}
    file = deployment.file
    for entry in file.entries if file else []:
        value = _VARIABLE.sub(lambda match: deployment.environment.get(match[1], match[0]), entry.value)
        found[entry.key] = Setting(value, file.where(entry) if file else "")
    if deployment.store_argument is not None:
        found["model_store"] = Setting(str(deployment.store_argument), "--model-store")
    if is_true(found, "enable_envvars_config"):
        for key in PROPERTIES:
            name = variable(key)
            if name is None or name not in deployment.environment:
                continue
            if key == "allowed_urls" and found.get("use_env_allowed_urls", Setting("", "")).value.lower() != "true":
                continue
            found[key] = Setting(deployment.environment[name], f"${name}")
    return found


def every_property(deployment: Deployment) -> dict[str, Setting]:
    """`properties`, and TorchServe's default of what matters and nobody set; without what is no property at all."""
    file = deployment.file
    if file is None:
        return properties(deployment)
    junk = {entry.key for entry in file.entries} - {entry.key for entry in file.own}
    given = {key: setting for key, setting in properties(deployment).items() if key not in junk}
    defaults = {key: Setting(value, _DEFAULT, given=False) for key, value in DEFAULTS.items()}
    return {**defaults, **given}


def unresolved(deployment: Deployment) -> list[tuple[Entry, str]]:
    """Entries with a `$$VARIABLE$$` that the environment doesn't have."""
    return [
        (entry, name)
        for entry in (deployment.file.entries if deployment.file else [])
        for name in _VARIABLE.findall(entry.value)
        if name not in deployment.environment
    ]


def is_true(found: Mapping[str, Setting], key: str) -> bool:
    """A boolean property as Java's parseBoolean reads it; absent is false."""
    return key in found and str(found[key].value).lower() == "true"


def integer(found: Mapping[str, Setting], key: str, default: int) -> Setting:
    """An integer property; one that Java cannot parse counts as its default here, for a rule of its own names it."""
    setting = found.get(key)
    if setting is None or not re.fullmatch(r"[+-]?[0-9]{1,9}", setting.value, re.ASCII):
        return Setting(default, _DEFAULT, given=False)
    return Setting(int(setting.value), setting.place)


@lru_cache(maxsize=8)
def _models(value: str) -> gson.Models | str:
    try:
        return gson.models(value)
    except gson.GsonError as error:
        return str(error)


def models(deployment: Deployment) -> gson.Models:
    """The `models` JSON; {} where there is none or it cannot be read. Not to be changed."""
    text = properties(deployment).get("models")
    found = _models(text.value) if text else {}
    return found if isinstance(found, dict) else {}


def models_fault(deployment: Deployment) -> str:
    """Why the `models` JSON ends TorchServe's start, "" when it doesn't."""
    text = properties(deployment).get("models")
    found = _models(text.value) if text else {}
    return found if isinstance(found, str) else ""


def load_list(deployment: Deployment) -> list[tuple[str, str]] | None:
    """`load_models`: (name or "", archive) as TorchServe splits it, blanks and all; None for ALL and for nothing."""
    text = properties(deployment).get("load_models")
    if text is None or not text.value or text.value.lower() == "all":
        return None
    found = []
    for item in text.value.split(","):
        name, separator, url = item.partition("=")
        found.append((name, url) if separator else ("", item))
    return [(name, url) for name, url in found if url]


def served(deployment: Deployment) -> list[Served]:
    """The models that the store and `load_models` make, in order. Without `load_models`: the whole store."""
    archives = deployment.archives or {}
    if "model_snapshot" in properties(deployment):
        return _restored(deployment)
    wanted = load_list(deployment)
    pairs = [("", file) for file in archives] if wanted is None else wanted
    found, seen = [], set()
    for name, file in pairs:
        stored = archives.get(file)
        if stored is None:
            continue
        registered = name or stored.archive.name or default_name(file)
        if (registered, stored.version) not in seen:
            seen.add((registered, stored.version))
            found.append(_served(deployment, registered, stored))
    return found


def _restored(deployment: Deployment) -> list[Served]:
    """The models of a snapshot, which holds every value itself: neither archive nor `models` counts."""
    snapshot = properties(deployment)["model_snapshot"]
    try:
        saved = gson.models(json.dumps(json.loads(snapshot.value)["models"]))
    except (ValueError, LookupError, TypeError, RecursionError):
        return []
    found = []
    for name, versions in saved.items():
        for entry in versions.values():
            stored = (deployment.archives or {}).get(str(entry.get("marName")))
            if stored is None:
                continue
            place = f"{snapshot.place} model_snapshot"
            settings = {key: _in_json(entry, key, place) or Setting(0, place) for key in COUNTS}
            settings["jobQueueSize"] = integer(properties(deployment), "job_queue_size", DEFAULT_QUEUE)
            found.append(Served(name, stored, settings, entry))
    return found


def default_name(file: str) -> str:
    """What TorchServe calls a model whose manifest has no name."""
    stem = file.rpartition("/")[2]
    if ".model" in stem or ".mar" in stem:
        stem = stem.rpartition(".")[0]
    return re.sub(r"\W|^_", "_", stem, flags=re.ASCII)


def _served(deployment: Deployment, name: str, stored: StoredArchive) -> Served:
    found, config = properties(deployment), stored.archive.config
    entry = models(deployment).get(name, {}).get(stored.version, {})
    text = found.get("models")
    json_place = f"{text.place if text else ''} models"
    yaml_place = f"{stored.file}: model-config.yaml"

    def first(key: str, default: Setting) -> Setting:
        in_archive = packed(config, key)
        if in_archive is not None:
            return Setting(in_archive, yaml_place)
        return _in_json(entry, key, json_place) or default

    workers = default_workers(deployment)
    least, most = packed(config, "minWorkers"), packed(config, "maxWorkers")
    if least is not None and most is not None and most >= least:
        bounds = Setting(least, yaml_place), Setting(most, yaml_place)
    else:
        bounds = (
            _in_json(entry, "minWorkers", json_place) or workers,
            _in_json(entry, "maxWorkers", json_place) or workers,
        )
    settings = {
        "minWorkers": bounds[0],
        "maxWorkers": bounds[1],
        "batchSize": first("batchSize", Setting(DEFAULT_BATCH_SIZE, _DEFAULT, given=False)),
        "maxBatchDelay": first("maxBatchDelay", Setting(DEFAULT_DELAY, _DEFAULT, given=False)),
        "jobQueueSize": Setting(config["jobQueueSize"], yaml_place)
        if packed(config, "jobQueueSize")
        else integer(found, "job_queue_size", DEFAULT_QUEUE),
    }
    for key, general in (
        ("responseTimeout", "default_response_timeout"),
        ("startupTimeout", "default_startup_timeout"),
    ):
        if config:  # any model-config.yaml decides, even without the key
            given = packed(config, key)
            settings[key] = Setting(given or DEFAULT_TIMEOUT, yaml_place, given=given is not None)
        else:
            settings[key] = _in_json(entry, key, json_place) or integer(found, general, DEFAULT_TIMEOUT)
    for key in ("continuousBatching", "asyncCommunication"):
        if config.get(key) is True:
            settings[key] = Setting(True, yaml_place)
    return Served(name, stored, settings, entry)


def _in_json(entry: Mapping[str, Any], key: str, place: str) -> Setting | None:
    if key not in entry:
        return None
    try:
        value = gson.as_int(entry[key])
    except gson.GsonError:
        return None
    return Setting(value, place) if value is not None and value > 0 else None


def default_workers(deployment: Deployment) -> Setting:
    """Workers of a model that nothing sets them for; 0 when the machine isn't known."""
    found = properties(deployment)
    if is_true(found, "debug"):
        return Setting(1, found["debug"].place)
    given = integer(found, "default_workers_per_model", 0)
    if given.value:
        return given
    host = deployment.host
    gpus = integer(found, "number_of_gpu", 2**31 - 1).value
    count = (min(len(host.gpus), gpus) or host.cores) if host else 0
    what = "GPU" if host and min(len(host.gpus), gpus) else "CPU"
    return Setting(count, f"{_DEFAULT}: one per {what}", given=False)
