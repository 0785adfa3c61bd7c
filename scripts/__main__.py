"""The `batchserve` command: assembles the verbs, nothing else."""

import sys

import typer
from rich.text import Text

from scripts.bench import bench
from scripts.build import build, inspect
from scripts.configure import configure
from scripts.demo import demo
from scripts.doctor import doctor
from scripts.lib.console import err_console
from scripts.lib.errors import UserError
from scripts.plan import plan
from scripts.predict import predict
from scripts.profile import profile
from scripts.serve import serve, token
from scripts.top import top
from scripts.tune import tune
from scripts.workers import register, scale, status, unregister

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Build, serve, scale, measure and debug batched transformer models on TorchServe.",
)
for verb in (
    build,
    inspect,
    configure,
    serve,
    token,
    status,
    top,
    scale,
    register,
    unregister,
    predict,
    profile,
    plan,
    tune,
    bench,
    demo,
    doctor,
):
    app.command()(verb)


def main() -> None:
    """Run the command; a UserError becomes a message and exit status 1."""
    try:
        app()
    except UserError as error:
        err_console.print(Text.assemble(("error: ", "red"), str(error)))
        if error.hint:
            err_console.print(f"  {error.hint}", markup=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
