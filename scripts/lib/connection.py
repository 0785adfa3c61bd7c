"""Which server a command talks to, and with which key: from what the person said, serving.yaml, or what runs here."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from scripts.lib.errors import UserError
from scripts.lib.management import DEFAULT_URL, ManagementClient
from scripts.lib.serving import DEFAULT_SERVING, Serving, is_loopback
from scripts.lib.state import KEY_FILE, State, read_key, running


@dataclass(frozen=True)
class Connection:
    """A server's management API, and what this directory knows of that server.

    Args:
        client: calls it.
        serving: the deployment it should be, None when there is no serving.yaml or another server was named.
        source: the file of `serving`.
        metrics: its metrics URL, None where nothing here tells.
        warning: what the person should know of how it was found; "" for nothing.
    """

    client: ManagementClient
    serving: Serving | None
    source: Path | None
    metrics: str | None = None
    warning: str = ""

    @property
    def store(self) -> Path | None:
        """The model store, where this machine has it."""
        if self.serving is None or not self.serving.server.model_store.is_dir():
            return None
        return self.serving.server.model_store


def connect(management: str | None = None, token: str | None = None, serving: Path | None = None) -> Connection:
    """Find the server that is meant.

    Args:
        management: its management URL; None: the one of `serving`, or of the server started in this directory.
        token: its management key; None: the one of the server started in this directory, when the URL is that one's.
        serving: a serving.yaml; None: config/serving.yaml where it is.

    Raises:
        UserError: a serving.yaml that is named, or that is to name the server, cannot be read; several servers run from
            here; or the key has expired.
    """
    source = serving if serving is not None else DEFAULT_SERVING if DEFAULT_SERVING.is_file() else None
    declared, warning = None, ""
    try:
        declared = Serving.load(source) if source is not None else None
    except UserError as error:
        if serving is not None or management is None:
            raise
        # The server is named, and the file is one that nobody asked for.
        source, warning = None, f"nothing is compared with {source}, which cannot be used: {error}"
    servers = running()
    if management is not None:
        client = ManagementClient.at(management)
    elif declared is not None and (serving is not None or not servers or _declared_runs(declared, servers)):
        client = ManagementClient.at(_declared_url(declared))
    elif len(servers) > 1:
        raise UserError(
            "several servers run from this directory: " + ", ".join(state.management for state in servers.values()),
            hint="say which: --management URL or --serving FILE",
        )
    else:
        client = ManagementClient.at(next(iter(servers.values())).management if servers else DEFAULT_URL)
    if serving is None and declared is not None and not _same(client.url, _declared_url(declared)):
        source = declared = None
    key = token if token is not None else _local_key(client.url, servers)
    return Connection(
        ManagementClient(client.url, key), declared, source, _metrics(client.url, declared, servers), warning
    )


def _declared_url(declared: Serving, port: int | None = None) -> str:
    host = declared.server.host
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port or declared.server.management_port}"


def _metrics(url: str, declared: Serving | None, servers: dict[Path, State]) -> str | None:
    for state in servers.values():
        if _same(state.management, url):
            return state.metrics
    if declared is not None and _same(url, _declared_url(declared)):
        return _declared_url(declared, declared.server.metrics_port)
    return None


def _declared_runs(declared: Serving, servers: dict[Path, State]) -> bool:
    return any(_same(state.management, _declared_url(declared)) for state in servers.values())


def _local_key(url: str, servers: dict[Path, State]) -> str | None:
    """The key that lies here for the server at `url`; one server's key is never sent to another."""
    for directory, state in servers.items():
        if _same(state.management, url):
            return read_key(directory / KEY_FILE, "management") if state.auth == "token" else None
    plain = Path(KEY_FILE)  # of a torchserve started in this directory without batchserve
    if plain.is_file() and is_loopback(urlsplit(url).hostname or ""):
        return read_key(plain, "management")
    return None


def _same(one: str, other: str) -> bool:
    def place(url: str) -> tuple[str, int | None]:
        parts = urlsplit(url)
        host = parts.hostname or ""
        return "loopback" if is_loopback(host) else host, parts.port

    return place(one) == place(other)
