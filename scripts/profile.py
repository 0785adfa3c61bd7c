"""`batchserve profile`: measure what an archive's batches cost on the device that is here."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from scripts.lib.console import console, progress
from scripts.lib.costs import Profile
from scripts.lib.errors import UserError
from scripts.lib.profiling import Texts
from scripts.lib.profiling import profile as measure
from scripts.lib.schedule import read_bodies


def profile(
    path: Annotated[Path, typer.Argument(metavar="ARCHIVE", help="The .mar file to run.")],
    workload: Annotated[
        str, typer.Option(help="What to run: mixed, short or lists, as bench makes them for the task.")
    ] = "mixed",
    bodies: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Run these request bodies instead: a JSON value a line.")
    ] = None,
    workers: Annotated[
        int,
        typer.Option(min=1, help="Workers that will share the device: measured with 1 to so many of them busy."),
    ] = 1,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads of each worker; what the archive says, or cores ÷ workers, if not given."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the costs to this file, for batchserve plan.")
    ] = None,
) -> None:
    """Run an archive in this process, on the GPU if there is one, and fit what its batches cost.

    Nothing else should run meanwhile. Take the file to where you plan: batchserve plan NAME --profile FILE.
    """
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise UserError(f"{json_file}: there is no directory {json_file.parent}", hint="make it, or name another file")
    texts = Texts(workload, tuple(read_bodies(bodies)) if bodies else ())
    found = measure(path, texts, workers=workers, threads=threads, progress=progress)
    show(found)
    if json_file is not None:
        json_file.write_text(found.model_dump_json(indent=1) + "\n", encoding="utf-8")
        console.print(f"wrote {json_file}", markup=False)


def show(found: Profile) -> None:
    """Print a profile."""
    console.print(
        f"{found.archive} ({found.task}) on {found.device_name}: {found.dtype}, threads {found.threads}, "
        f"{'packed' if found.packed else 'padded'}; micro-batches of {found.micro_batch_tokens} tokens; a forward pass "
        f"costs as much as {found.launch_cost} tokens more",
        markup=False,
    )
    table = Table(title="a batch takes", title_justify="left")
    for name in ("busy workers", "ms per batch", "ms per request", "µs per token"):
        table.add_column(name, justify="right")
    for busy, rates in enumerate(found.rates, 1):
        table.add_row(
            str(busy),
            f"{rates.per_batch_s * 1e3:.2f}",
            f"{rates.per_request_s * 1e3:.3f}",
            f"{rates.seconds_per_token * 1e6:.2f}",
        )
    console.print(table)
    console.print(
        f"fitted to {found.fit_error:.0%} on average; TorchServe adds {found.transport_s * 1e3:g} ms per batch and "
        f"{found.frontend_s * 1e3:g} ms per request (stated, not measured here)",
        markup=False,
    )
