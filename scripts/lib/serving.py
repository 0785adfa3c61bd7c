"""`config/serving.yaml`: what a deployment declares, checked before anything else looks at it.

The file is strict. An unknown key, a duplicate one, a value of the wrong kind or out of range is an error that names
the file, the path of the field and what is allowed there; nothing is converted in silence (`version: 1.0` is a number
in YAML and would be looked up by TorchServe as another version than `"1.0"`).
"""

import difflib
import re
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from scripts.lib.errors import UserError
from scripts.lib.names import RESERVED

DEFAULT_SERVING = Path("config/serving.yaml")

#: TorchServe's own default for requests and responses, bytes.
DEFAULT_MESSAGE_SIZE = 6_553_500
#: Ten years in minutes: TorchServe makes new keys at every start, so these live as long as the server does.
DEFAULT_TOKEN_EXPIRATION_MIN = 5_256_000

#: The JVM's argument that names the configuration of TorchServe's logs.
LOG_ARGUMENT = "-Dlog4j.configurationFile="

Port = Annotated[int, Field(ge=1024, le=65535)]
Positive = Annotated[int, Field(ge=1)]
#: Java parses these settings as 32-bit integers.
JavaInt = Annotated[int, Field(ge=1, le=2**31 - 1)]
#: TorchServe's own messages to its workers count too: with a limit of a few bytes no model ever loads.
MessageSize = Annotated[int, Field(ge=1024, le=2**31 - 1)]

PORT_FIELDS = ("inference_port", "management_port", "metrics_port", "grpc_inference_port", "grpc_management_port")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
_HEAP = re.compile(r"[1-9][0-9]*[kKmMgG]")

#: What else config.properties may say (`server.extra`). Everything that this file already declares is left out, and so
#: is what TorchServe reads without effect (batch_size, max_batch_delay).
EXTRA_PROPERTIES = frozenset(
    {
        "async_logging",
        "blacklist_env_vars",
        "certificate_file",
        "cors_allowed_headers",
        "cors_allowed_methods",
        "cors_allowed_origin",
        "cpp_log_config",
        "cpu_launcher_args",
        "cpu_launcher_enable",
        "decode_input_request",
        "default_response_timeout",
        "default_startup_timeout",
        "disable_system_metrics",
        "enable_grpc_ssl",
        "enable_metrics_api",
        "grpc_inference_max_connection_age_grace_ms",
        "grpc_inference_max_connection_age_ms",
        "grpc_management_max_connection_age_grace_ms",
        "grpc_management_max_connection_age_ms",
        "initial_distribution_port",
        "initial_worker_port",
        "io_ratio",
        "ipex_enable",
        "ipex_gpu_enable",
        "keystore",
        "keystore_pass",
        "keystore_type",
        "limit_max_image_pixels",
        "metric_time_interval",
        "model_metrics_auto_detect",
        "netty_client_threads",
        "number_of_netty_threads",
        "prefer_direct_buffer",
        "private_key_file",
        "system_metrics_cmd",
        "ts_header_key_sequence_end",
        "ts_header_key_sequence_id",
        "ts_header_key_sequence_start",
        "unregister_model_timeout",
        "use_native_io",
    }
)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host` (`localhost` or an address of 127.0.0.0/8)."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class Server(_Strict):
    """Where TorchServe listens and what it lets in. Sizes are bytes, times minutes."""

    host: str = "127.0.0.1"
    inference_port: Port = 8080
    management_port: Port = 8081
    metrics_port: Port = 8082
    grpc_inference_port: Port = 7070
    grpc_management_port: Port = 7071
    auth: Literal["token", "none"] = "token"
    token_expiration_min: JavaInt = DEFAULT_TOKEN_EXPIRATION_MIN
    #: Needed by name for a host that others can reach while auth is none.
    allow_remote: bool = False
    #: Registering and unregistering models over the management API. None: only where a token guards it.
    model_api: bool | None = None
    #: Relative to the directory the command is run in, as TorchServe's own --model-store is.
    model_store: Annotated[Path, Field(strict=False)] = Path("model_store")
    max_request_size: MessageSize = DEFAULT_MESSAGE_SIZE
    max_response_size: MessageSize = DEFAULT_MESSAGE_SIZE
    #: At most this many GPUs; None: all that there are.
    gpus: Annotated[int, Field(ge=0)] | None = None
    #: The JVM's -Xmx, such as 2g; None: a quarter of the memory.
    java_heap: str | None = None
    #: The JVM's other arguments; None: `properties.java_args`' choice for this machine.
    java_args: Annotated[tuple[str, ...], Field(strict=False)] | None = None
    #: Lines of text, or a JSON object a line.
    log_format: Literal["text", "json"] = "text"
    #: Further properties of TorchServe, by its own names.
    extra: dict[str, str | int | bool] = Field(default_factory=dict)

    @field_validator("host")
    @classmethod
    def _host(cls, host: str) -> str:
        if not _HOST.fullmatch(host):
            raise ValueError("must be an IPv4 address or a host name (TorchServe cannot parse IPv6 addresses)")
        return host

    @field_validator("model_store", mode="before")
    @classmethod
    def _model_store(cls, value: object) -> object:
        if not isinstance(value, str | Path) or not str(value):
            raise ValueError("must be the path of a directory")
        return value

    @field_validator("java_heap")
    @classmethod
    def _java_heap(cls, value: str | None) -> str | None:
        if value is not None and not _HEAP.fullmatch(value):
            raise ValueError("must be a number and a unit, such as 512m or 2g")
        return value

    @field_validator("java_args")
    @classmethod
    def _java_args(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for argument in value or ():
            if not re.fullmatch(r"-[!-~]+", argument) or "\\" in argument:
                raise ValueError(
                    f"{argument!r}: each must start with - and have neither space, backslash nor non-ASCII character"
                    " (TorchServe's launcher splits them at spaces and undoes no escapes)"
                )
        return value

    @model_validator(mode="after")
    def _one_log_configuration(self) -> Self:
        if self.log_format == "json" and any(argument.startswith(LOG_ARGUMENT) for argument in self.java_args or ()):
            raise ValueError(f"log_format is json, and java_args names another configuration ({LOG_ARGUMENT}…)")
        return self

    @field_validator("extra")
    @classmethod
    def _extra(cls, value: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
        for key in value:
            if key in EXTRA_PROPERTIES:
                continue
            if key in ("batch_size", "max_batch_delay"):
                raise ValueError(f"{key}: TorchServe ignores it here; declare it under the model")
            near = difflib.get_close_matches(key, EXTRA_PROPERTIES, n=1)
            raise ValueError(
                f"{key}: not a property that can be added here" + (f"; did you mean {near[0]}?" if near else "")
            )
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        seen: dict[int, str] = {}
        for name in PORT_FIELDS:
            port = getattr(self, name)
            if port in seen:
                raise ValueError(f"{seen[port]} and {name} are both {port}: each server needs a port of its own")
            seen[port] = name
        if self.auth == "none" and not is_loopback(self.host) and not self.allow_remote:
            raise ValueError(
                f"auth is none and host is {self.host}: anyone who reaches this machine could use the server, and its"
                " management API. Use auth: token, or host: 127.0.0.1, or say allow_remote: true"
            )
        return self

    @property
    def ports(self) -> dict[str, int]:
        """The five ports by the name of their field."""
        return {name: getattr(self, name) for name in PORT_FIELDS}

    @property
    def model_api_enabled(self) -> bool:
        """Whether models can be registered over the management API."""
        return self.auth == "token" if self.model_api is None else self.model_api


class ServedModel(_Strict):
    """One model: which archive, and how its requests are batched. The delay is milliseconds, timeouts are seconds."""

    archive: str
    version: str
    workers: Positive = 1
    batch_size: Positive = 32
    max_batch_delay: Positive = 2
    queue: Positive = 1000
    response_timeout: Positive | None = None
    startup_timeout: Positive | None = None
    #: Let TorchServe run pip for the requirements.txt inside the archive, at every registration.
    install_requirements: bool = False

    @field_validator("archive")
    @classmethod
    def _archive(cls, value: str) -> str:
        if not value.endswith(".mar"):
            raise ValueError("must be the name of a .mar file in the model store")
        if re.search(r"[/\\,=\x00-\x1f]|\.\.", value) or value != value.strip():
            raise ValueError(
                "must be the bare name of a file in the model store, without / \\ , = or .. (TorchServe's load_models"
                " is separated by commas and it refuses relative paths)"
            )
        return value

    @field_validator("version", mode="before")
    @classmethod
    def _version(cls, value: object) -> object:
        if isinstance(value, int | float) and not isinstance(value, bool):
            raise ValueError(f'must be text: write "{value}" in quotation marks, exactly as in the archive')
        return value

    @field_validator("version")
    @classmethod
    def _version_text(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError("must be letters, digits, dots, dashes and underscores, such as 1.0")
        return value

    @field_validator("max_batch_delay", mode="before")
    @classmethod
    def _delay(cls, value: object) -> object:
        if value == 0 and not isinstance(value, bool):
            raise ValueError("must be at least 1 (ms): TorchServe takes 0 for unset, which means 100 ms")
        return value

    @model_validator(mode="after")
    def _queue_holds_the_batches(self) -> Self:
        need = self.batch_size * self.workers
        if self.queue < need:
            raise ValueError(
                f"queue {self.queue} is smaller than batch_size × workers = {need}: the workers could never all have"
                " full batches while requests are already refused with 503"
            )
        return self


class Serving(_Strict):
    """The whole deployment."""

    server: Server = Field(default_factory=Server)
    models: dict[str, ServedModel] = Field(min_length=1)

    @field_validator("models")
    @classmethod
    def _names(cls, value: dict[str, ServedModel]) -> dict[str, ServedModel]:
        for name in value:
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name!r}: a model's name is letters, digits, dots, dashes and underscores")
            if name.startswith(RESERVED):
                raise ValueError(f"{name!r}: TorchServe takes /{RESERVED}… for its token API; give it another name")
        return value

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read and check a serving.yaml.

        Raises:
            UserError: the file is missing, is not YAML, repeats a key or does not fit; every fault is in the message.
        """
        return cls.from_mapping(_read_yaml(path), str(path))

    @classmethod
    def from_mapping(cls, data: object, source: str) -> Self:
        """Check already parsed data; `source` names it in errors. Raises UserError as `load` does."""
        if not isinstance(data, Mapping):
            raise UserError(f"{source}: must hold the sections server and models", hint=_EXAMPLE)
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            faults = [f"{source}: {line}" for line in _faults(error)]
            raise UserError("\n".join(faults), hint="every key is explained in config/serving.yaml") from None


_EXAMPLE = 'for example: models: {minilm: {archive: minilm.mar, version: "1.0", workers: 2}}'


def _read_yaml(path: Path) -> object:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file", hint="name the deployment with --serving FILE, or run where config/serving.yaml is"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    try:
        return YAML(typ="safe", pure=True).load(text)
    except DuplicateKeyError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        what = re.search(r'found duplicate key "(.*?)"', str(error))
        name = what.group(1) if what else "a key"
        raise UserError(
            f"{path}: line {line}: {name} is there twice; the second would silently replace the first"
        ) from None
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise UserError(f"{path}: line {line}: not YAML: {error.problem}") from None
    except YAMLError as error:
        raise UserError(f"{path}: not YAML: {error}") from None


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    """The keys allowed beside the last element of a pydantic error location."""
    parent = location[:-1]
    if not parent:
        return list(Serving.model_fields)
    if parent == ("server",):
        return list(Server.model_fields)
    return list(ServedModel.model_fields)


def _faults(error: ValidationError) -> list[str]:
    """A line for each fault: the path of the field, what is wrong, what is allowed."""
    lines = []
    for fault in error.errors(include_url=False):
        location = fault["loc"]
        where = ".".join(str(part) for part in location)
        lines.append(f"{where}: {_reason(fault, location)}" if where else _reason(fault, location))
    return lines


def _reason(fault: Any, location: tuple[int | str, ...]) -> str:
    kind, given, limits = fault["type"], fault["input"], fault.get("ctx", {})
    if kind == "extra_forbidden":
        known = _known_keys(location)
        near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
        guess = f"; did you mean {near[0]}?" if near else ""
        return f"unknown key{guess} (allowed: {', '.join(known)})"
    if kind == "missing":
        return "missing"
    if kind == "value_error":
        return str(limits["error"])
    if kind in ("greater_than_equal", "less_than_equal"):
        if isinstance(location[-1], str) and location[-1].endswith("_port"):
            return f"must be a port from 1024 to 65535 (below 1024 needs root), not {given}"
        bound = f"at least {limits['ge']}" if "ge" in limits else f"at most {limits['le']}"
        return f"must be {bound}, not {given}"
    if kind == "too_short":
        return "must name at least one model"
    names = {
        "int_type": "a whole number",
        "string_type": "text",
        "bool_type": "true or false",
        "model_type": "a section",
        "model_attributes_type": "a section",
        "dict_type": "a section",
        "literal_error": str(limits.get("expected", "")),
    }
    if kind in names:
        return f"must be {names[kind]}, not {given!r}"
    return str(fault["msg"])
