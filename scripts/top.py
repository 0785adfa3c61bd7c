"""`batchserve top`: a live view of what a running TorchServe does."""

import json
import time
from collections import deque
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.live import Live

from scripts.lib.connection import Connection, connect
from scripts.lib.console import console, err_console
from scripts.lib.errors import UserError
from scripts.lib.top import Activity, Reading, activity, metrics_url, read, unreachable
from scripts.lib.top_view import as_json, view
from scripts.workers import ManagementOption, ServingOption, TokenOption

SPAN_S = 10.0  # that a live view looks back: single seconds jump too much to be read


def top(
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.5)] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look twice, print what happened in between, and end.")] = False,
    as_lines: Annotated[
        bool, typer.Option("--json", help="Print JSON for programs: an object a line, one for each look.")
    ] = False,
    management: ManagementOption = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="Where the server's metrics are; leave it out for a server of serving.yaml or of this directory, or"
            " for port 8082 of the management API's host.",
            metavar="URL",
        ),
    ] = None,
    token: TokenOption = None,
    serving: ServingOption = None,
) -> None:
    """Show rate, latency, batch sizes, queue, padding, devices and workers of a running server, until Ctrl-C.

    Reads the management API and the metrics port, nothing else, so it works from anywhere and for any TorchServe; one
    that does not run batchserve's handlers tells no batch sizes, padding and errors, and counts refused requests, which
    nobody waited for, in its mean latency and wait.
    """
    connection = connect(management, token, serving)
    if connection.warning:
        err_console.print(f"warning: {connection.warning}", markup=False)
    looks = _looks(connection, metrics_url(connection, metrics), interval)
    server = connection.client.url
    try:
        if as_lines:
            for seen in looks:
                typer.echo(json.dumps({"server": server, **as_json(seen)}))
                if once:
                    return
        elif once or not console.is_terminal:
            for seen in looks:
                console.print(view(seen, server))
                if once:
                    return
        else:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                for seen in looks:
                    live.update(view(seen, server), refresh=True)
    except KeyboardInterrupt:
        pass


def _looks(connection: Connection, metrics: str, interval: float) -> Iterator[Activity]:
    """What the server did up to now, again and again; the first time after one interval.

    Raises UserError when the server does not answer at all; later it is shown as a fault.
    """
    kept = deque[Reading]([read(connection.client, metrics)], maxlen=max(2, round(SPAN_S / interval) + 1))
    last: Activity | None = None
    while True:
        time.sleep(interval)
        try:
            now = read(connection.client, metrics)
            last = activity(kept[0], now)
            # Without metrics there is nothing to compare a later reading with
            if kept[0].fault:
                kept.clear()
            if not now.fault or not kept:
                kept.append(now)
        except UserError as error:
            if last is None:
                raise
            last = unreachable(error, last)
        yield last
