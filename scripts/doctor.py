"""`batchserve doctor`: what is wrong with a TorchServe deployment, and the effective value of every setting."""

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.table import Table
from rich.text import Text

from scripts.lib.connection import Connection, connect
from scripts.lib.console import console, err_console
from scripts.lib.diagnosis import properties_file
from scripts.lib.diagnosis.deployment import Deployment
from scripts.lib.diagnosis.diagnose import diagnose
from scripts.lib.diagnosis.finding import Finding, Severity
from scripts.lib.diagnosis.gather import USUAL_PLACES, gather
from scripts.lib.diagnosis.repair import repair
from scripts.lib.diagnosis.running import running
from scripts.lib.diagnosis.settings import Setting, every_property, properties, served
from scripts.lib.errors import UserError
from scripts.lib.serving import ServedModel, Server, Serving, is_loopback
from scripts.workers import TokenOption, survey

CLEAN, FINDINGS, UNREADABLE = 0, 1, 2
_COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}
_SECRETS = frozenset({"keystore_pass"})
_PER_MODEL = dict.fromkeys(("models", "model_snapshot"), "(see each model)")


def doctor(
    ts_config: Annotated[
        Path | None,
        typer.Option(
            help="The config.properties; where nothing else is named either, config/config.properties or"
            " config.properties.",
            metavar="FILE",
        ),
    ] = None,
    model_store: Annotated[
        Path | None,
        typer.Option(help="The directory of archives; left out: the one that the file names.", metavar="DIR"),
    ] = None,
    management: Annotated[
        str | None, typer.Option(help="The running server's management API, to look at as well.", metavar="URL")
    ] = None,
    token: TokenOption = None,
    log: Annotated[
        Path | None, typer.Option(help="The server's log (logs/ts_log.log), to read as well.", metavar="FILE")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="Put right in config.properties what is certain; comments and order stay.")
    ] = False,
) -> None:
    """Find what is wrong with a TorchServe 0.12 deployment, ours or not, and what each setting really is.

    Reads only, but for --fix; a server is never changed. The environment of this shell is taken for the server's.
    Exits 0 when nothing is wrong, 1 with findings, 2 when something cannot be read.
    """
    try:
        deployment = _read(ts_config, model_store, management, token, log)
        deployment, changes = repair(deployment) if fix else (deployment, [])
        if changes and deployment.file is not None:
            properties_file.write(deployment.file)
    except UserError as error:
        if as_json:
            typer.echo(json.dumps({"unreadable": str(error), "hint": error.hint}, indent=2))
        else:
            err_console.print(Text.assemble(("error: ", "red"), _shown(str(error))))
            if error.hint:
                err_console.print(f"  {_shown(error.hint)}", markup=False)
        raise typer.Exit(UNREADABLE) from None
    findings = diagnose(deployment)
    if as_json:
        typer.echo(json.dumps(as_mapping(deployment, findings, changes), indent=2))
    else:
        _print(deployment, findings, changes)
    raise typer.Exit(UNREADABLE if deployment.unreadable else FINDINGS if findings else CLEAN)


def _read(
    ts_config: Path | None, model_store: Path | None, management: str | None, token: str | None, log: Path | None
) -> Deployment:
    if ts_config is None and model_store is None and management is None and log is None:
        ts_config = next((path for path in USUAL_PLACES if path.is_file()), None)
        if ts_config is None:
            raise UserError(
                "there is nothing to look at: no config.properties here",
                hint="name one with --ts-config FILE; or --model-store DIR, --management URL, --log FILE",
            )
    if management is None:
        return gather(ts_config, model_store, log, local=True)
    # A server that uses no serving.yaml: its settings are compared with the files that were named.
    client = connect(management, token).client
    deployment = gather(ts_config, model_store, log, local=is_loopback(urlsplit(client.url).hostname or ""))
    return replace(deployment, server=tuple(survey(Connection(client, _declared(deployment), None))))


def _declared(deployment: Deployment) -> Serving | None:
    """The deployment's files in the shape in which the sources of a server's values are told."""
    store = properties(deployment).get("model_store")
    if store is None:
        return None
    return Serving.model_construct(
        server=Server.model_construct(model_store=Path(str(store.value))),
        models={
            model.name: ServedModel.model_construct(
                archive=model.stored.file, version=model.stored.version, workers=model.count("minWorkers"),
                batch_size=model.count("batchSize"), max_batch_delay=model.count("maxBatchDelay"),
                queue=model.count("jobQueueSize"), response_timeout=model.count("responseTimeout"),
                startup_timeout=model.count("startupTimeout"),
            )
            for model in served(deployment)
        },
    )  # fmt: skip


def as_mapping(deployment: Deployment, findings: list[Finding], changes: list[str]) -> dict[str, Any]:
    """The whole result for programs."""
    return {
        "findings": [asdict(finding) for finding in findings],
        "properties": {key: _plain(key, setting) for key, setting in sorted(every_property(deployment).items())},
        "models": [
            {"name": model.name, "version": model.stored.version, "archive": model.stored.file,
             "settings": {key: _plain(key, setting) for key, setting in model.settings.items()}}
            for model in served(deployment)
        ],
        "server": None if deployment.server is None else [asdict(one) for one in deployment.server],
        "not_looked_into": list(deployment.passed_over),
        "changed": changes,
    }  # fmt: skip


def _plain(key: str, setting: Setting) -> dict[str, Any]:
    return {"value": "***" if key in _SECRETS else setting.value, "from": setting.place}


def _print(deployment: Deployment, findings: list[Finding], changes: list[str]) -> None:
    for change in changes:
        path = deployment.file.path if deployment.file else ""
        console.print(_shown(f"changed {path}: {change}"), markup=False)
    found, models = every_property(deployment), served(deployment)
    if found:
        console.print(_table("property", found.items()))
    for model in models:
        console.print(_table(f"{model.name} {model.stored.version} ({model.stored.file})", model.settings.items()))
    for one in running(deployment):
        ready = f"{one.live.ready} of {one.count('minWorkers')} workers ready"
        console.print(_table(f"{one.title} ({ready})", one.settings.items()))
    if deployment.server == ():
        console.print("the server runs no models", markup=False)
    for name in deployment.passed_over:
        console.print(_shown(f"not looked into: {name} (no .mar)"), markup=False)
    for finding in findings:
        colour = _COLOURS[finding.severity]
        console.print(
            Text.assemble((f"{finding.severity} ", colour), (finding.code, "bold"), f"  {_shown(finding.where)}")
        )
        for label, text in (("", finding.what), ("so: ", finding.consequence), ("fix: ", finding.fix)):
            console.print(_shown(f"    {label}{text}"), markup=False)
    if findings:
        counts = {each: sum(finding.severity is each for finding in findings) for each in Severity}
        listed = ", ".join(f"{count} {each}{'s' * (count > 1)}" for each, count in counts.items() if count)
        console.print(listed, markup=False)
    else:
        console.print("nothing is wrong", markup=False)


def _shown(text: str) -> str:
    """Text out of other people's files, without what would steer the terminal or cannot be encoded."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def _table(title: str, rows: Iterable[tuple[str, Setting]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in (title, "value", "from"):
        table.add_column(Text(_shown(heading)), overflow="fold")
    for key, setting in rows:
        value = "***" if key in _SECRETS else _PER_MODEL.get(key) or " ".join(str(setting.value).split())
        place = Text(_shown(setting.place), style="" if setting.given else "dim")
        table.add_row(Text(_shown(key)), Text(_shown(value)), place)
    return table
