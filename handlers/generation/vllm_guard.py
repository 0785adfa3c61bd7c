"""Ends vLLM's processes when the worker that started them is gone.

vLLM's engine runs in processes of its own, which outlive a worker that is killed and keep their memory, while
TorchServe starts the next one. So a small process waits for the end of its standard input, which comes with the
worker's own end, whatever that was, and then ends those that it was told of. This file is both sides: imported, the
worker's handle; run as a script, that process, which needs nothing but psutil.

It can watch only what is there: a worker that is killed while vLLM starts, before it has a guard, leaves the processes
that vLLM has started by then.
"""

import multiprocessing
import subprocess
import sys
from contextlib import suppress

import psutil


class Guard:
    """Watches over processes that this one has started through `multiprocessing`.

    Args:
        before: those that it is not about, see `running`.
    """

    def __init__(self, before: frozenset[int] = frozenset()) -> None:
        pids = sorted(running() - before)
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, *map(str, pids)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # what ends the worker's group must not end it
        )

    def release(self) -> None:
        """Watch no longer; the processes go on."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def running() -> frozenset[int]:
    """Processes that this one has started through `multiprocessing`."""
    return frozenset(child.pid for child in multiprocessing.active_children() if child.pid is not None)


def _watch(pids: list[int]) -> None:
    watched = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            watched.append(psutil.Process(pid))  # knows it by its time of birth too
    sys.stdin.read()
    family = []
    for process in watched:
        with suppress(psutil.NoSuchProcess):
            family += [*process.children(recursive=True), process]
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    _watch([int(pid) for pid in sys.argv[1:]])
