"""What the commands print: one console each for answers and for everything else."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

WIDE = 1000  # columns where nobody's terminal sets a limit: a table in a log or a pipe keeps whole lines


def _console(*, stderr: bool = False) -> Console:
    made = Console(stderr=stderr, soft_wrap=True, highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = WIDE
    return made


console = _console()
err_console = _console(stderr=True)


@contextmanager
def progress(label: str) -> Iterator[None]:
    """Show that `label` is under way, and how long it took when it ends.

    A spinner on a terminal; elsewhere (a log, a pipe) one line at the start and one at the end.
    """
    start = time.monotonic()
    if err_console.is_terminal:
        with err_console.status(label):
            yield
    else:
        err_console.print(f"{label} …", markup=False)
        yield
    err_console.print(f"{label}: done in {time.monotonic() - start:.1f} s", markup=False)
