"""config.properties: TorchServe's own file, rendered from a declared deployment so that every value takes effect.

Two programs read it. TorchServe reads it as Java properties; its Python launcher reads it line by line and undoes no
escapes. So only what must be escaped is: a path of plain ASCII stands in the file as it is, for both.
"""

import io
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import javaproperties

from handlers.cores import cores
from scripts.lib.errors import UserError
from scripts.lib.serving import LOG_ARGUMENT, Serving

REPOSITORY = Path(__file__).resolve().parents[2]
METRICS_CONFIG = REPOSITORY / "config" / "metrics.yaml"
JSON_LOG_CONFIG = REPOSITORY / "config" / "log4j2-json.xml"
FEW_CORES = 4

_NAMED = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r", "\f": "\\f"}


def dumps(properties: Mapping[str, str], comment: str = "") -> str:
    """Render Java properties as ASCII text, a line each, in the order given.

    Values are escaped no more than java.util.Properties needs: backslashes, line breaks and tabs, leading blanks, and
    everything outside printable ASCII (as UTF-16 \\uXXXX, for Java reads the file as Latin-1).
    """
    lines = [f"# {line}".rstrip().encode("ascii", "backslashreplace").decode() for line in comment.splitlines()]
    lines.extend(f"{_escape(key, key=True)}={_escape(value)}" for key, value in properties.items())
    return "\n".join(lines) + "\n"


def loads(text: str) -> dict[str, str]:
    """Parse Java properties as java.util.Properties does; a later value of a key replaces an earlier one."""
    return dict(javaproperties.load(io.StringIO(text)))


def load(path: Path) -> dict[str, str]:
    """Read a properties file. Raises UserError when it cannot be read or is not valid."""
    try:
        return loads(path.read_text(encoding="latin-1"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file", hint="write it with: batchserve configure") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except javaproperties.InvalidUEscapeError as error:
        raise UserError(f"{path}: not a properties file: {error}") from None


def _escape(text: str, key: bool = False) -> str:
    out = []
    for index, character in enumerate(text):
        if character in _NAMED:
            out.append(_NAMED[character])
        elif key and character in " =:#!":
            out.append("\\" + character)
        elif character == " " and index == 0:
            out.append("\\ ")
        elif " " <= character <= "~":
            out.append(character)
        else:
            units = character.encode("utf-16-be", "surrogatepass")
            out.extend(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
    return "".join(out)


def from_serving(serving: Serving, metrics_config: Path = METRICS_CONFIG) -> dict[str, str]:
    """TorchServe's properties for a deployment, with absolute paths.

    Args:
        serving: the deployment; its model store is taken relative to the current directory.
        metrics_config: the metrics that TorchServe publishes.

    Raises:
        UserError: a value that TorchServe would misread in a properties file.
    """
    server = serving.server
    store = server.model_store.absolute()
    properties = {
        "inference_address": f"http://{server.host}:{server.inference_port}",
        "management_address": f"http://{server.host}:{server.management_port}",
        "metrics_address": f"http://{server.host}:{server.metrics_port}",
        "grpc_inference_address": server.host,
        "grpc_management_address": server.host,
        "grpc_inference_port": str(server.grpc_inference_port),
        "grpc_management_port": str(server.grpc_management_port),
        "disable_token_authorization": _bool(server.auth == "none"),
        "token_expiration_min": str(server.token_expiration_min),
        "enable_model_api": _bool(server.model_api_enabled),
        "enable_envvars_config": "false",
        "allowed_urls": allowed_urls(store),
        "install_py_dep_per_model": _bool(any(model.install_requirements for model in serving.models.values())),
        "max_request_size": str(server.max_request_size),
        "max_response_size": str(server.max_response_size),
        "metrics_mode": "prometheus",
        "metrics_config": str(metrics_config),
        "job_queue_size": str(queue_size(serving)),
    }
    if server.gpus is not None:
        properties["number_of_gpu"] = str(server.gpus)
    chosen = java_args(cores()) if server.java_args is None else server.java_args
    vm_args = ([f"-Xmx{server.java_heap}"] if server.java_heap else []) + list(chosen)
    if server.log_format == "json":
        vm_args.append(LOG_ARGUMENT + JSON_LOG_CONFIG.as_uri())
    if vm_args:
        properties["vmargs"] = " ".join(vm_args)
    for key, value in server.extra.items():
        properties[key] = _bool(value) if isinstance(value, bool) else str(value)
    properties["model_store"] = str(store)
    properties["load_models"] = ",".join(f"{name}={model.archive}" for name, model in serving.models.items())
    properties["models"] = json.dumps(
        {name: {model.version: _model(serving, name)} for name, model in serving.models.items()}, separators=(",", ":")
    )
    for key, value in properties.items():
        if re.search(r"\$\$[^$]+\$\$", value):
            raise UserError(f"{key}: {value!r} has $$…$$ in it, which TorchServe replaces by an environment variable")
    return properties


def java_args(count: int) -> tuple[str, ...]:
    """The JVM's arguments for a machine of `count` cores.

    On few cores the JVM's own choice, G1 and the optimising compiler, takes work from the workers for a frontend that
    has little to do: measured with MiniLM on 2 cores, 0.12 instead of 0.23 cores and 4 % more requests a second.
    """
    return ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1") if count <= FEW_CORES else ()


def queue_size(serving: Serving) -> int:
    """The one queue length that config.properties can hold, for all models of the deployment.

    TorchServe takes a model's own length from nowhere but the archive's model-config.yaml (`jobQueueSize`): the one in
    the `models` JSON is ignored. Raises UserError when two models declare different lengths.
    """
    sizes = {name: model.queue for name, model in serving.models.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise UserError(
            f"the models' queues differ ({listed}), and TorchServe has one job_queue_size for all of them",
            hint="declare the same queue for every model, or serve them by two servers",
        )
    return next(iter(sizes.values()))


def allowed_urls(store: Path) -> str:
    """The regular expression (Java's) for the URLs that models may be registered from: files of the model store.

    A comma would end the expression, since TorchServe splits the list there; it is matched by a dot.
    """
    pattern = "".join("." if character in ",\\" else _regex_escape(character) for character in str(store))
    return f"file://{pattern}/[^/]+"


def _regex_escape(character: str) -> str:
    return f"[{character}]" if character in ".*+?()|{}$" else "." if character in "[]^" else character


def render(
    serving: Serving,
    source: str = "config/serving.yaml",
    *,
    path: Path = Path("config/config.properties"),
    verb: str = "configure",
) -> str:
    """The text of config.properties for a deployment.

    Args:
        serving: the deployment.
        source: what it was read from.
        path: where the text will be.
        verb: the verb of the command that writes it.
    """
    comment = (
        f"Written by batchserve {verb} from {source}: change that, not this file.\n"
        "The paths are absolute: write it again when the repository moves.\n"
        f"{torchserve_command(serving, path)}"
    )
    return dumps(from_serving(serving), comment)


def torchserve_command(serving: Serving, path: Path) -> str:
    """A command to paste that starts TorchServe without us on a written file."""
    store = str(serving.server.model_store)
    return shlex.join(["torchserve", "--start", "--ncs", "--ts-config", str(path), "--model-store", store])


def models(properties: Mapping[str, str]) -> dict[str, dict[str, dict[str, Any]]]:
    """The `models` JSON of parsed properties: name → version → settings. Empty when there is none."""
    parsed: dict[str, dict[str, dict[str, Any]]] = json.loads(properties.get("models", "{}"))
    return parsed


def _model(serving: Serving, name: str) -> dict[str, object]:
    model = serving.models[name]
    settings: dict[str, object] = {
        "defaultVersion": True,
        "marName": model.archive,
        "minWorkers": model.workers,
        "maxWorkers": model.workers,
        "batchSize": model.batch_size,
        "maxBatchDelay": model.max_batch_delay,
    }
    if model.response_timeout is not None:
        settings["responseTimeout"] = model.response_timeout
    if model.startup_timeout is not None:
        settings["startupTimeout"] = model.startup_timeout
    return settings


def _bool(value: bool) -> str:
    return "true" if value else "false"
