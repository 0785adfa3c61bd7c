"""`batchserve predict`: run an archive in this process, to debug a handler without a server."""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from scripts.lib import service
from scripts.lib.console import console, progress
from scripts.lib.errors import UserError
from scripts.lib.loaded import loaded


def predict(
    path: Annotated[Path, typer.Argument(metavar="ARCHIVE", help="The .mar file to run.")],
    file: Annotated[
        Path | None,
        typer.Argument(
            help="JSON: one request body, or a list of bodies that are run as one batch; `-` or nothing reads stdin."
        ),
    ] = None,
    route: Annotated[str, typer.Option(help="Path behind the model, such as v1/embeddings, for every body.")] = "",
    text: Annotated[list[str] | None, typer.Option(help="A text to send instead of FILE; may be repeated.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Print answers whole instead of shortened.")] = False,
) -> None:
    """Run an archive in this process through TorchServe's own loader, a list of request bodies as one batch."""
    bodies: list[Any] = [{"text": each} for each in text] if text else _bodies(file)
    requests = [
        service.Body(json.dumps(body).encode(), headers={"url_path": route} if route else {}) for body in bodies
    ]
    with ExitStack() as stack:
        with progress(f"Loading {path.name}"):
            running = stack.enter_context(loaded(path))
        answers = service.predict(running, requests)
    for index, answer in enumerate(answers):
        body = answer.body.decode(errors="replace")
        shown = body if full or len(body) <= 300 else f"{body[:300]}… ({len(body):,} characters)"
        headers = {key: value for key, value in answer.headers.items() if key != "content-type"}
        console.print(f"[{index}] {answer.status} {headers or ''}", markup=False)
        console.print(shown, markup=False)
    if any(answer.status >= 400 for answer in answers):
        raise typer.Exit(1)


def _bodies(file: Path | None) -> list[Any]:
    where = "stdin" if file is None or str(file) == "-" else str(file)
    try:
        content = sys.stdin.read() if where == "stdin" else Path(where).read_text(encoding="utf-8-sig")
        value = json.loads(content)
    except OSError as error:
        raise UserError(f"{where} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}.", "Send one body or a list of bodies.") from None
    bodies = value if isinstance(value, list) else [value]
    if not bodies:
        raise UserError(f"{where} holds an empty list.", "Send at least one body.")
    return bodies
