"""`batchserve status`, `scale`, `register` and `unregister`: look at a running TorchServe and change it."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.markup import escape
from rich.table import Table

from handlers.cores import cores as count_cores
from scripts.lib import archive, deployment
from scripts.lib.arrivals import Arrivals, arrivals, unknown
from scripts.lib.connection import Connection, connect
from scripts.lib.console import console, err_console, progress
from scripts.lib.decoder import ONE_WORKER
from scripts.lib.effective import Effective, Source, Value, archive_config, differences, effective, health
from scripts.lib.errors import UserError
from scripts.lib.management import Model
from scripts.lib.names import check_model_name
from scripts.lib.scaling import Scaler
from scripts.lib.serving import ServedModel, is_loopback

_QUIET_UNREGISTER = 1.0  # seconds without a request before a model is unregistered
_LEGEND = (
    "archive: its model-config.yaml; config: config.properties, as serving.yaml declares; REST: said at registration"
    " or by scaling; default: TorchServe's"
)

ManagementOption = Annotated[
    str | None,
    typer.Option(
        help="Where the server's management API is; leave it out to take it from serving.yaml or from the server"
        " started in this directory.",
        metavar="URL",
    ),
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        help="The management key; leave it out for a server started in this directory. Others on this machine see it"
        " in ps: better set $BATCHSERVE_MANAGEMENT_TOKEN.",
        envvar="BATCHSERVE_MANAGEMENT_TOKEN",
    ),
]
ServingOption = Annotated[
    Path | None,
    typer.Option(help="The deployment that the server runs (config/serving.yaml where it is).", metavar="FILE"),
]
TimeoutOption = Annotated[float, typer.Option(help="Give up after so many seconds; raise it for large models.")]
VersionOption = Annotated[
    str | None, typer.Option(help="Which version, when there are several (left out: the default version).")
]


def status(
    management: ManagementOption = None,
    token: TokenOption = None,
    serving: ServingOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of a table.")] = False,
) -> None:
    """Show what a server runs, where each value came from, and where that differs from serving.yaml.

    Workers are ready/wanted, the queue is waiting/room. Sources are inferred, for TorchServe tells only values.
    """
    connection = _connect(management, token, serving)
    running = survey(connection)
    warnings = health(running)
    if connection.serving is not None:
        warnings += differences(connection.serving, running)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "management": connection.client.url,
                    "serving": str(connection.source) if connection.source else None,
                    "models": [asdict(one) for one in running],
                    "warnings": warnings,
                },
                indent=2,
            )
        )
        return
    if running:
        console.print(_table(running))
        console.print(_LEGEND, style="dim", markup=False)
    else:
        console.print(f"{connection.client.url} runs no models", markup=False)
    for warning in warnings:
        err_console.print(f"warning: {warning}", markup=False)


def _connect(management: str | None, token: str | None, serving: Path | None) -> Connection:
    """`connect`, its warning shown."""
    connection = connect(management, token, serving)
    if connection.warning:
        err_console.print(f"warning: {connection.warning}", markup=False)
    return connection


def survey(connection: Connection) -> list[Effective]:
    """Every version of every model on the server, by name, the default version first."""
    found = []
    declared = connection.serving.models if connection.serving else {}
    for listed in sorted(connection.client.list_models(), key=lambda model: model.model_name):
        default = connection.client.describe(listed.model_name).model_version
        versions = connection.client.versions(listed.model_name)
        for model in sorted(versions, key=lambda model: (model.model_version != default, model.model_version)):
            config = archive_config(model, connection.store)
            found.append(effective(model, model.model_version == default, declared.get(listed.model_name), config))
    return found


def _table(running: list[Effective]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("model", "version", "workers", "batch size", "delay", "queue"):
        table.add_column(heading, overflow="fold")

    def sourced(text: str, value: Value) -> str:
        return f"{text} [dim]({'config' if value.source is Source.PROPERTIES else value.source})[/dim]"

    for one in running:
        several = sum(other.name == one.name for other in running) > 1
        table.add_row(
            escape(one.name),
            escape(f"{one.version} (default)" if several and one.default else one.version),
            sourced(f"{one.ready}/{one.workers.value} ready", one.workers),
            sourced(str(one.batch_size.value), one.batch_size),
            sourced(f"{one.max_batch_delay.value} ms", one.max_batch_delay),
            sourced(f"{one.pending}/{one.queue.value}", one.queue),
        )
    return table


def scale(
    name: Annotated[str, typer.Argument(help="The model.")],
    workers: Annotated[int, typer.Argument(help="How many workers it shall have.", min=0)],
    version: VersionOption = None,
    now: Annotated[
        bool, typer.Option("--now", help="Kill what is too many at once: clients of a running batch may get 500.")
    ] = False,
    timeout: TimeoutOption = 180.0,
    management: ManagementOption = None,
    token: TokenOption = None,
    serving: ServingOption = None,
) -> None:
    """Change a model's number of workers and wait until they are ready.

    No request fails: before TorchServe kills a worker, the worker finishes what it runs and takes nothing new. A
    handler that is not batchserve's cannot do that; then this waits until no request comes for 2 seconds, and says so.
    """
    connection = _connect(management, token, serving)
    model = connection.client.describe(name, version)
    if model.continuous_batching and workers != 1:
        raise UserError(f"{name} has 1 worker and cannot have {workers}", ONE_WORKER)
    before = len(model.workers)
    _warn_of_extremes(connection, workers)
    scaler = _scaler(connection, name, model.model_version, timeout)
    with progress(f"scaling {name} {model.model_version} from {before} to {_workers(workers)}"):
        model = scaler.to(workers, now=now)
    console.print(f"{name} {model.model_version}: {_ready(model)}", markup=False)
    pending = model.job_queue_status.pending_requests
    if workers == 0 and pending:
        err_console.print(
            f"warning: {pending} requests wait in the queue and are answered when there are workers again",
            markup=False,
        )


def _warn_of_extremes(connection: Connection, workers: int) -> None:
    if workers == 0:
        err_console.print("warning: without a worker every request gets 503", markup=False)
        return
    if workers == 1 or not is_loopback(urlsplit(connection.client.url).hostname or ""):
        return
    cores = count_cores()
    if workers > cores:
        err_console.print(
            f"warning: {workers} workers on {cores} cores: unless they wait for a GPU they only take turns, and each"
            " has its own copy of the model",
            markup=False,
        )


def register(
    path: Annotated[Path, typer.Argument(help="The archive: a .mar file in the model store.", metavar="ARCHIVE")],
    name: Annotated[
        str | None, typer.Option(help="What to call the model (left out: as serving.yaml or the archive does).")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes to start.", min=1)] = None,
    batch_size: Annotated[int | None, typer.Option(help="Requests in a batch at most.", min=1)] = None,
    max_batch_delay: Annotated[
        int | None, typer.Option(help="Milliseconds that the first request of a batch waits for others.", min=1)
    ] = None,
    default: Annotated[
        bool, typer.Option("--default", help="Make it the version that requests without a version go to.")
    ] = False,
    timeout: TimeoutOption = 300.0,
    management: ManagementOption = None,
    token: TokenOption = None,
    serving: ServingOption = None,
) -> None:
    """Add an archive of the model store to a running server and wait until its workers are ready.

    What no option says is taken from the archive's entry in serving.yaml, or is 1 worker, batches of 32, 2 ms.
    """
    connection = _connect(management, token, serving)
    entry_name, entry = _declared(connection, path.name, name)
    given = {"workers": workers, "batch_size": batch_size, "max_batch_delay": max_batch_delay}
    wanted = entry.model_copy(update={key: value for key, value in given.items() if value is not None})
    found = _check_archive(connection, path, wanted, declared=entry_name is not None)
    label = check_model_name(name or entry_name or (found.name if found else "") or path.stem)
    client = connection.client
    with progress(
        f"registering {label} {found.version if found else ''}".rstrip() + f" with {_workers(wanted.workers)}"
    ):
        client.register(
            path.name,
            name=label,
            workers=wanted.workers,
            batch_size=wanted.batch_size,
            max_batch_delay=wanted.max_batch_delay,
            timeout=timeout,
        )
        model = _registered(connection, label, found.version if found else None)
    if default:
        client.set_default(label, model.model_version)
    model = Scaler(client, label, model.model_version, timeout, _say).wait_ready(
        max(model.min_workers, 1), time.monotonic() + timeout
    )
    batches = f"batches of at most {model.batch_size} after {model.max_batch_delay} ms"
    console.print(f"{label} {model.model_version}: {_ready(model)}, {batches}", markup=False)
    for key, value in {
        "workers": model.ready,
        "batch_size": model.batch_size,
        "max_batch_delay": model.max_batch_delay,
    }.items():
        if value != getattr(wanted, key):
            err_console.print(f"warning: {key} is {value}, asked for was {getattr(wanted, key)}", markup=False)


def _declared(connection: Connection, archive_name: str, name: str | None) -> tuple[str | None, ServedModel]:
    """The entry of serving.yaml for an archive, or defaults with no name."""
    for key, entry in (connection.serving.models if connection.serving else {}).items():
        if entry.archive == archive_name and name in (None, key):
            return key, entry
    return None, ServedModel.model_construct(archive=archive_name, version="")


def _check_archive(connection: Connection, path: Path, wanted: ServedModel, declared: bool) -> archive.Archive | None:
    """Look into the archive where the store is readable; None where it is not."""
    store = connection.store
    if path.parent != Path() and (store is None or path.parent.resolve() != store.resolve()):
        raise UserError(
            f"{path} is not in the model store{f' {store}' if store else ''}",
            hint="TorchServe takes archives from there only: copy it there, and name the file alone",
        )
    if path.suffix != ".mar":
        raise UserError(f"{path.name} is no archive's name: it does not end in .mar")
    if store is None or connection.serving is None:
        return None
    found = archive.read(store / path.name)
    if not declared:
        wanted = wanted.model_copy(update={"version": found.version or "1.0"})
    faults = [
        fault
        for fault in deployment.model_faults(connection.serving, wanted, found)
        # A registration's batch size and delay beat the archive's; its queue is not asked for here.
        if not fault.startswith(("batch_size:", "max_batch_delay:", "queue:"))
    ]
    if faults:
        raise UserError("\n".join(f"{path.name}: {fault}" for fault in faults))
    return found


def _registered(connection: Connection, name: str, version: str | None) -> Model:
    if version:
        return connection.client.describe(name, version)
    # Without a look into the archive: the youngest is the one.
    return max(
        connection.client.versions(name),
        key=lambda model: max((worker.start_time for worker in model.workers), default=""),
    )


def unregister(
    name: Annotated[str, typer.Argument(help="The model.")],
    version: Annotated[str | None, typer.Option(help="Which version, when there are several.")] = None,
    now: Annotated[
        bool,
        typer.Option("--now", help="Do not wait for the requests to end: those in the queue would never be answered."),
    ] = False,
    timeout: TimeoutOption = 60.0,
    management: ManagementOption = None,
    token: TokenOption = None,
    serving: ServingOption = None,
) -> None:
    """Take a model off a server and end its workers.

    Stop sending first. TorchServe answers running requests with 500, later ones with 404, and those that wait in the
    queue never: so this waits until none has come for a second.
    """
    connection = _connect(management, token, serving)
    versions = {model.model_version: model for model in connection.client.versions(name)}
    if version is None and len(versions) > 1:
        raise UserError(
            f"{name} has versions {', '.join(sorted(versions))}", hint="say which one to take off: --version VERSION"
        )
    chosen = version if version is not None else next(iter(versions))
    if len(versions) > 1 and connection.client.describe(name).model_version == chosen:
        others = sorted(set(versions) - {chosen})
        raise UserError(
            f"{chosen} is the default version of {name}, which TorchServe does not take off while there are others",
            hint=f"take off {', '.join(others)} first, or register another version with --default",
        )
    with progress(f"unregistering {name} {chosen}"):
        if not now and chosen in versions:
            _scaler(connection, name, chosen, timeout).wait_quiet(time.monotonic() + timeout, _QUIET_UNREGISTER)
        connection.client.unregister(name, chosen)
    console.print(f"{name} {chosen} is unregistered", markup=False)


def _scaler(connection: Connection, name: str, version: str, timeout: float) -> Scaler:
    count: Arrivals = unknown
    if connection.metrics is not None:
        default = connection.client.describe(name).model_version == version
        count = arrivals(connection.metrics, name, version, default)
    return Scaler(connection.client, name, version, timeout, _say, count)


def _workers(count: int) -> str:
    return f"{count} worker" if count == 1 else f"{count} workers"


def _ready(model: Model) -> str:
    return f"{_workers(model.ready)} {'is' if model.ready == 1 else 'are'} ready"


def _say(line: str) -> None:
    err_console.print(f"  {line}", markup=False)
