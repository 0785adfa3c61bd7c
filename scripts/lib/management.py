"""TorchServe's management API: a typed client that says what is really wrong when a call fails."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlsplit

import requests
from pydantic import AliasGenerator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.alias_generators import to_camel

from scripts.lib.bounded import Answer, ask
from scripts.lib.errors import UserError
from scripts.lib.refusals import token_rejected

DEFAULT_URL = "http://127.0.0.1:8081"
DEFAULT_TIMEOUT = 30.0
_PAGE = 100  # models in one answer of the list
_MOST_PAGES = 10_000

T = TypeVar("T")


class ApiError(UserError):
    """TorchServe refused a call.

    Args:
        status: the HTTP status.
        kind: TorchServe's name for the exception, "" when it gave none.
        reply: its own message.
    """

    def __init__(self, message: str, hint: str = "", *, status: int, kind: str = "", reply: str = "") -> None:
        super().__init__(message, hint)
        self.status = status
        self.kind = kind
        self.reply = reply


class _Outside(BaseModel):
    # Other versions of TorchServe add fields.
    model_config = ConfigDict(
        extra="ignore", frozen=True, populate_by_name=True, alias_generator=AliasGenerator(validation_alias=to_camel)
    )


class ListedModel(_Outside):
    """A model in the list: its name and the archive of its default version."""

    model_name: str
    model_url: str = ""


class _Page(_Outside):
    models: list[ListedModel]  # always there, and what tells a TorchServe from other servers of JSON
    next_page_token: str | None = None


class Worker(_Outside):
    """A worker process. `pid` is -1 (or 0) while it has none; `memory_usage` is bytes."""

    id: str
    status: str
    pid: int = -1
    start_time: str = ""
    memory_usage: int = 0
    gpu: bool = False

    @property
    def ready(self) -> bool:
        """Whether its model is loaded."""
        return self.status == "READY"


class Queue(_Outside):
    """Requests that wait, and how many more may."""

    remaining_capacity: int = 0
    pending_requests: int = 0

    @property
    def capacity(self) -> int:
        """Requests that may wait at once."""
        return self.remaining_capacity + self.pending_requests


class Model(_Outside):
    """One version of a registered model. The delay is milliseconds, timeouts are seconds.

    `workers` are in TorchServe's own order: scaling down removes the last ones.
    """

    model_name: str
    model_version: str
    model_url: str = ""
    min_workers: int = 0
    max_workers: int = 0
    batch_size: int = 1
    max_batch_delay: int = 100
    response_timeout: int = 120
    startup_timeout: int = 120
    continuous_batching: bool = False
    stateful: bool = False
    loaded_at_startup: bool = False
    workers: list[Worker] = Field(default_factory=list)
    job_queue_status: Queue = Field(default_factory=Queue)
    customized_metadata: Any = None

    @property
    def ready(self) -> int:
        """Workers whose model is loaded."""
        return sum(worker.ready for worker in self.workers)


_MODELS = TypeAdapter(list[Model])
_PAGE_ADAPTER = TypeAdapter(_Page)


@dataclass(frozen=True)
class ManagementClient:
    """Calls one server's management API.

    Every call raises UserError when the server cannot be reached or what answers is not TorchServe, and its subclass
    ApiError when TorchServe refuses.

    Args:
        url: where it listens, without a path.
        token: the management key; None when the server uses no tokens.
        timeout: seconds to wait for an answer, unless a call says otherwise.
    """

    url: str = DEFAULT_URL
    token: str | None = None
    timeout: float = DEFAULT_TIMEOUT

    @classmethod
    def at(cls, url: str, token: str | None = None, timeout: float = DEFAULT_TIMEOUT) -> Self:
        """A client for a URL as a person types it. Raises UserError when it is none."""
        if "://" not in url:
            url = f"http://{url}"
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # half an IPv6 address, a port that is no number or too large
            usable = False
        if not usable:
            raise UserError(f"{url}: not an http URL", hint=f"for example --management {DEFAULT_URL}")
        return cls(url.rstrip("/"), token, timeout)

    def list_models(self) -> list[ListedModel]:
        """Every registered model, page by page."""
        return list(self._pages())

    def describe(self, name: str, version: str | None = None) -> Model:
        """One version of a model; without `version` the default one."""
        return self._models("GET", _path(name, version), name)[0]

    def versions(self, name: str) -> list[Model]:
        """All versions of a model, in no particular order."""
        return self._models("GET", _path(name, "all"), name)

    def ask(self, name: str, version: str, headers: Mapping[str, str] | None = None, timeout: float = 60.0) -> Model:
        """Describe a version with what its handler says of itself (`customized_metadata`).

        The request goes through the model's queue to one worker, as a batch of its own, with `headers`; its
        connection is closed afterwards. It waits for the requests before it: `timeout` is seconds.
        """
        headers = {**(headers or {}), "Connection": "close"}
        path = _path(name, version)
        return self._models("GET", path, name, params={"customized": "true"}, headers=headers, timeout=timeout)[0]

    def register(
        self,
        archive: str,
        *,
        batch_size: int,
        max_batch_delay: int,
        workers: int,
        name: str | None = None,
        timeout: float = 300.0,
    ) -> str:
        """Register an archive and wait until its workers are ready.

        Args:
            archive: a file name in the model store, or a URL that the server's allowed_urls admits.
            batch_size, max_batch_delay: always explicit, for what a registration leaves out TorchServe fills in its own
                way (a batch size of 1, a delay of 100 ms).
            workers: processes to start.
            name: what to call the model; None: as its manifest does.
            timeout: seconds to wait for the workers.

        Returns: TorchServe's own words.
        """
        params: dict[str, str | int] = {
            "url": archive,
            "batch_size": batch_size,
            "max_batch_delay": max_batch_delay,
            "initial_workers": workers,
            "synchronous": "true",
        }
        if name is not None:
            params["model_name"] = name
        return self._status("POST", "/models", params=params, timeout=timeout)

    def unregister(self, name: str, version: str | None = None, timeout: float = 120.0) -> str:
        """Unregister a version (without one: the default), killing its workers. What waits in its queue is lost."""
        return self._status("DELETE", _path(name, version), name, timeout=timeout)

    def scale(self, name: str, version: str, workers: int, timeout: float = 120.0) -> str:
        """Ask for exactly `workers` workers and do not wait for new ones; of too many the last are killed at once."""
        params = {"min_worker": workers, "max_worker": workers, "synchronous": "false"}
        return self._status("PUT", _path(name, version), name, params=params, timeout=timeout)

    def set_default(self, name: str, version: str) -> str:
        """Make a version the one that requests without a version go to."""
        return self._status("PUT", _path(name, version) + "/set-default", name)

    def _pages(self) -> Iterator[ListedModel]:
        token: str | None = None
        for _ in range(_MOST_PAGES):
            params: dict[str, str | int] = {"limit": _PAGE}
            if token:
                params["next_page_token"] = token
            page = self._parsed(_PAGE_ADAPTER, self._call("GET", "/models", params=params))
            yield from page.models
            if not page.next_page_token or page.next_page_token == token:
                return
            token = page.next_page_token

    def _models(self, method: str, path: str, name: str, **options: Any) -> list[Model]:
        models = self._parsed(_MODELS, self._call(method, path, name, **options))
        if not models:
            raise UserError(f"{self.url} described {name} with an empty list")
        return models

    def _status(self, method: str, path: str, name: str | None = None, **options: Any) -> str:
        content = _json(self._call(method, path, name, **options))
        return str(content.get("status", "")).strip() if isinstance(content, dict) else ""

    def _parsed(self, adapter: TypeAdapter[T], answer: Answer) -> T:
        try:
            return adapter.validate_json(answer.body)
        except ValidationError as error:
            if _json(answer) is None:
                raise _not_torchserve(self.url, answer) from None
            fault = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in fault["loc"])
            told = f"{where}: {fault['msg']}" if where else fault["msg"]
            raise UserError(f"{self.url} answered in an unknown shape: {told}", hint=_PORT) from None

    def _call(
        self,
        method: str,
        path: str,
        name: str | None = None,
        *,
        params: Mapping[str, str | int] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Answer:
        sent = dict(headers or {})
        if self.token:
            if not (self.token.isascii() and self.token.isprintable()):
                raise UserError("the token holds a character that no key has", hint=_TOKEN)
            sent["Authorization"] = f"Bearer {self.token}"
        wait = self.timeout if timeout is None else timeout
        try:
            with requests.Session() as session:
                session.trust_env = False  # no proxy, no .netrc: the header above is all there is
                answer = ask(session, method, self.url + path, wait, params=params, headers=sent)
        except requests.Timeout:
            raise UserError(
                f"{self.url} did not answer {method} {path} within {wait:g} s",
                hint="the server may be busy starting workers: see batchserve status and the server's log",
            ) from None
        except requests.ConnectionError as error:
            raise UserError(_unreachable(self.url, error), hint=_WHERE) from None
        except (requests.RequestException, ValueError) as error:
            raise UserError(f"{self.url}: {error}", hint=_WHERE) from None
        if answer.status >= 300:
            raise _refusal(self, method, path, name, answer)
        return answer


_PORT = "the management port is 8081 by default; name it with --management URL"
_TOKEN = (
    "get one with: batchserve token management, and set $BATCHSERVE_MANAGEMENT_TOKEN to it (or pass --token); a server"
    " that batchserve did not start keeps it in key_file.json where it was started, for its management address only"
)
_WHERE = "is it running there? name the server with --management URL or --serving FILE"


def _path(name: str, version: str | None = None) -> str:
    path = f"/models/{quote(name, safe='')}"
    return path if version is None else f"{path}/{quote(version, safe='')}"


def _unreachable(url: str, error: Exception) -> str:
    text = str(error)
    for sign, reason in {
        "refused": "nothing listens there",
        "Name or service not known": "no such host",
        "Temporary failure in name resolution": "no such host",
        "nodename nor servname": "no such host",
        "unreachable": "the network does not reach it",
        "timed out": "no answer to the connection",
        "reset by peer": "the connection was reset",
        "SSL": "TLS failed (http or https?)",
        "without response": "the connection was closed without an answer",
        "aborted": "the connection was closed without an answer",
        "broken": "the connection was closed within an answer",
    }.items():
        if sign in text:
            return f"no TorchServe at {url}: {reason}"
    return f"no TorchServe at {url}: {text}"


def _json(answer: Answer) -> Any:
    try:
        return json.loads(answer.body)
    except (ValueError, RecursionError):
        return None


def _not_torchserve(url: str, answer: Answer) -> UserError:
    kind = answer.headers.get("content-type", "no content type")
    start = " ".join(answer.body[:240].decode("utf-8", "replace")[:60].split())
    return UserError(
        f"{url} is not TorchServe's management API: it answered {answer.status} with {kind}: {start!r}",
        hint=_PORT,
    )


def _refusal(client: ManagementClient, method: str, path: str, name: str | None, answer: Answer) -> UserError:
    content = _json(answer)
    if not isinstance(content, dict) or not isinstance(content.get("code"), int) or "message" not in content:
        return _not_torchserve(client.url, answer)
    status, kind = answer.status, str(content.get("type", ""))
    reply = str(content.get("message", "")).strip()
    message, hint = f"TorchServe at {client.url}: {reply} ({status})", ""
    if token_rejected(status, answer.body):
        message = f"{client.url}: missing or wrong token (TorchServe answers {status}, not 401)"
        hint = _TOKEN
    elif status == 405 and method in ("POST", "DELETE"):
        message = f"{client.url}: registering and unregistering is switched off on this server (405)"
        hint = "set model_api: true under server in serving.yaml (enable_model_api in config.properties) and restart it"
    elif status == 404 and kind in ("ModelNotFoundException", "ModelVersionNotFoundException") and name is not None:
        version = path.removeprefix(_path(name)).strip("/").partition("/")[0]
        message = f"{client.url}: no model {name}" if kind == "ModelNotFoundException" else (
            f"{client.url}: model {name} has no version {version or 'that is the default'}"
        )  # fmt: skip
        hint = "what there is: batchserve status"
    elif status == 404 and kind == "ResourceNotFoundException":
        message = f"{client.url} is a TorchServe but not its management API"
        hint = _PORT
    elif status == 409:
        hint = "unregister it first, or build the archive with another version"
    return ApiError(message, hint, status=status, kind=kind, reply=reply)
