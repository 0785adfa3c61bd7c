"""`batchserve serve` and `batchserve token`: TorchServe in the foreground, and the keys to it."""

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from scripts.lib import deployment
from scripts.lib.addresses import check_ports
from scripts.lib.console import console, err_console, progress
from scripts.lib.errors import UserError
from scripts.lib.inference import PROBE
from scripts.lib.interrupts import stop_on_signals
from scripts.lib.properties import from_serving
from scripts.lib.server import StartError, TorchServe
from scripts.lib.serving import DEFAULT_SERVING, Serving
from scripts.lib.state import KEY_FILE, STATE_ROOT, make_directory, read_key, running


class KeyKind(StrEnum):
    """Which of TorchServe's keys."""

    INFERENCE = "inference"
    MANAGEMENT = "management"


def serve(
    serving: Annotated[Path, typer.Option(help="The deployment to serve.", metavar="FILE")] = DEFAULT_SERVING,
    timeout: Annotated[
        float,
        typer.Option(help="Give up when the models are not ready after so many seconds; raise it for large ones."),
    ] = 180.0,
    probe: Annotated[
        bool, typer.Option(help="Ask each model one request before saying ready; leave it out for models without text.")
    ] = True,
) -> None:
    """Start TorchServe, wait until it is ready, and serve until Ctrl-C.

    Logs and keys are in .batchserve/server-PORT. Ctrl-C, TERM and HUP end the server and all its workers.
    """
    declared = Serving.load(serving)
    deployment.check(declared)
    state = STATE_ROOT / f"server-{declared.server.inference_port}"
    # Before anything is written: a server that runs there keeps its file.
    check_ports(from_serving(declared))
    make_directory(state)
    config = state / "config.properties"
    deployment.write(declared, config, str(serving), "serve")
    with stop_on_signals():
        server = TorchServe(config, work_dir=state)
        try:
            with progress("starting TorchServe"):
                server.start()
                server.wait_ready(timeout, PROBE if probe else None, _workers_loaded)
            for line in ready_lines(declared, server):
                console.print(line, markup=False)
            status = server.wait()
            raise StartError(f"TorchServe ended by itself (status {status})", hint=f"see {state / 'logs'}")
        except KeyboardInterrupt:
            pass
        finally:
            if server.running:
                console.print("stopping", markup=False)
            server.stop(graceful=server.running)


def _workers_loaded(loaded: int, wanted: int) -> None:
    err_console.print(f"{loaded} of {wanted} workers have loaded their model", markup=False)


def ready_lines(serving: Serving, server: TorchServe) -> list[str]:
    """What a person needs to use a server that is ready."""
    urls = server.urls
    lines = [f"ready: {line}" for line in deployment.describe(serving)]
    lines += [f"inference   {urls.inference}", f"management  {urls.management}", f"metrics     {urls.metrics}/metrics"]
    lines += [f"logs        {server.work_dir / 'logs'}", "try it:"]
    lines += [f"  {curl(server, name)}" for name in serving.models]
    lines.append("stop with Ctrl-C")
    return lines


def curl(server: TorchServe, model: str) -> str:
    """A command to paste that sends one text to a model."""
    words = ["curl", "-sS"]
    for header, value in {**server.headers(), "Content-Type": "application/json"}.items():
        words += ["-H", f"{header}: {value}"]
    words += ["-d", '{"text": "Hello, world"}', f"{server.urls.inference}/predictions/{model}"]
    return shlex.join(words)


def token(
    kind: Annotated[KeyKind, typer.Argument(help="Which key to print.")] = KeyKind.INFERENCE,
    serving: Annotated[
        Path | None,
        typer.Option(help="The deployment whose server is meant, when several run here.", metavar="FILE"),
    ] = None,
) -> None:
    """Print the current key of the server that was started in this directory."""
    typer.echo(current_key(kind, serving))


def current_key(kind: KeyKind, serving: Path | None = None) -> str:
    """The key of the server that runs from this directory, started by `serve` or by plain torchserve.

    Raises:
        UserError: none runs, several do, it uses no tokens, or the key has expired.
    """
    servers = running()
    if serving is not None:
        wanted = STATE_ROOT / f"server-{Serving.load(serving).server.inference_port}"
        servers = {directory: state for directory, state in servers.items() if directory == wanted}
        if not servers:
            raise UserError(f"no server of {serving} runs from this directory", hint="start it: batchserve serve")
    if len(servers) > 1:
        raise UserError(
            "several servers run from this directory: " + ", ".join(state.inference for state in servers.values()),
            hint="say which: --serving FILE",
        )
    for directory, state in servers.items():
        if state.auth == "none":
            raise UserError(f"the server at {state.inference} uses no tokens (auth: none)")
        return read_key(directory / KEY_FILE, kind.value)
    plain = Path(KEY_FILE)
    if plain.exists():
        return read_key(plain, kind.value)
    raise UserError(
        "no server runs from this directory", hint="start one with batchserve serve, or go where it was started"
    )
