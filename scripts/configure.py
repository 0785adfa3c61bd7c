"""`batchserve configure`: TorchServe's config.properties from a declared deployment."""

from pathlib import Path
from typing import Annotated

import typer

from scripts.lib import deployment
from scripts.lib.console import console
from scripts.lib.properties import torchserve_command
from scripts.lib.serving import DEFAULT_SERVING, Serving

DEFAULT_OUTPUT = Path("config/config.properties")


def configure(
    serving: Annotated[Path, typer.Option(help="The deployment to read.", metavar="FILE")] = DEFAULT_SERVING,
    output: Annotated[
        Path, typer.Option(help="Where to write the file that torchserve takes as --ts-config.", metavar="FILE")
    ] = DEFAULT_OUTPUT,
) -> None:
    """Write TorchServe's config.properties from serving.yaml, for use without batchserve.

    Everything declared takes effect, or is refused with the reason. `batchserve serve` does this by itself.
    """
    declared = Serving.load(serving)
    deployment.check(declared)
    deployment.write(declared, output, str(serving), "configure")
    console.print(f"wrote {output}", markup=False)
    for line in deployment.describe(declared):
        console.print(f"  {line}", markup=False)
    console.print(torchserve_command(declared, output), markup=False)
