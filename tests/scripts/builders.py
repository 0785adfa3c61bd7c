"""Builds in processes of their own, several at once. They are forked from one that has imported all they need."""

import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import transformers.models.auto.modeling_auto  # noqa: F401  for all of them
import typer

from scripts import build as verb

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__])


def start(model: Path, store: Path, temporary: Path, builders: int, *options: str) -> BaseProcess:
    """A build whose verification waits until so many builders got that far: their files in `temporary`/barrier say so.

    What it prints goes into `temporary`/output-PID, its temporary files into `temporary`/tmp.
    """
    for name in ("barrier", "tmp"):
        (temporary / name).mkdir(exist_ok=True)
    arguments = [str(model), "--name", "m", "--store", str(store), *options]
    process = _FORKS.Process(target=_build, args=(arguments, temporary, builders), daemon=True)
    process.start()
    return process


def output(process: BaseProcess, temporary: Path) -> str:
    """All that an ended build printed."""
    return (temporary / f"output-{process.pid}").read_text(encoding="utf-8")


def _build(arguments: list[str], temporary: Path, builders: int) -> None:
    printed = os.open(temporary / f"output-{os.getpid()}", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(printed, stream)
    os.environ |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary / "tmp"))
    tempfile.tempdir = None

    def wait(*_: Any) -> dict[str, Any]:
        barrier = temporary / "barrier"
        (barrier / str(os.getpid())).touch()
        until = time.monotonic() + 120
        while len(list(barrier.iterdir())) < builders:
            assert time.monotonic() < until, "the others did not come"
            time.sleep(0.01)
        return {"card": {}}

    verb.verify = wait
    sys.argv = ["build", *arguments]
    typer.run(verb.build)
