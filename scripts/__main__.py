"""The `batchserve` command: assembles the verbs, nothing else."""

import sys
from importlib import import_module
from typing import Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from scripts.lib.console import err_console
from scripts.lib.errors import UserError

# Each verb and the module that it stands in, in the order of the help.
_VERBS = {
    "build": "build",
    "inspect": "build",
    "configure": "configure",
    "serve": "serve",
    "token": "serve",
    "status": "workers",
    "top": "top",
    "scale": "workers",
    "register": "workers",
    "unregister": "workers",
    "predict": "predict",
    "profile": "profile",
    "plan": "plan",
    "tune": "tune",
    "bench": "bench",
    "demo": "demo",
    "doctor": "doctor",
}


class _Verbs(TyperGroup):
    """Imports a verb when it is asked for: `token` does not wait for all that `bench` needs."""

    def list_commands(self, ctx: object) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: object, cmd_name: str) -> Any:
        # all of them for an unknown name: the nearest one is suggested
        for verb in [cmd_name] if cmd_name in _VERBS else _VERBS:
            if verb not in self.commands:
                alone = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
                alone.command(verb)(getattr(import_module(f"scripts.{_VERBS[verb]}"), verb))
                self.commands[verb] = typer.main.get_command(alone)
        return self.commands.get(cmd_name)


app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback()
def _batchserve() -> None:
    """Build, serve, scale, measure and debug batched transformer models on TorchServe."""


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
