"""A command under the supervisor: started, listed, ended; whatever ends this process ends the command's tree too."""

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from scripts.lib import launch, supervisor

_MARGIN_S = 7.0  # more than the grace that the supervisor gives the command
_AT_ONCE_S = 10.0


class Supervised:
    """A running command and all that it starts.

    Args:
        command: the program and its arguments.
        scratch: its temporary directory, from `launch.scratch_directory`; removed when the command has ended, or cannot
            be started.
        directory: its current one.
        output: where what it prints goes.
        settings: environment variables on top of `launch.environment`'s.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self, command: Sequence[str], scratch: Path, directory: Path, output: Path, settings: Mapping[str, str]
    ) -> None:
        try:
            with output.open("wb") as printed:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", supervisor.__file__, str(scratch), *command],
                    stdin=subprocess.PIPE,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    cwd=directory,
                    env=launch.environment(scratch, settings),
                    # Ctrl-C in the terminal is for us: we end the command in order.
                    start_new_session=True,
                )
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise

    @property
    def pid(self) -> int:
        """The supervisor's process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the command lives."""
        return self._process.poll() is None

    def wait(self) -> int:
        """Block until the command ends by itself; returns its exit status."""
        return self._process.wait()

    def processes(self) -> list[psutil.Process]:
        """The command and all that it started, now; the supervisor is not among them."""
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.Error:
            return []

    def stop(self, graceful: bool = True) -> None:
        """End all of it and wait until it is gone; doing it twice is no error.

        Args:
            graceful: let the command end by itself, within the supervisor's grace, instead of killing it at once.
        """
        tree = self.processes()
        self._order(supervisor.TERMINATE if graceful else supervisor.KILL)
        try:
            self._process.wait(supervisor.GRACE_S + _MARGIN_S)
        except KeyboardInterrupt:
            # Asked again: no more patience.
            self._order(supervisor.KILL)
            self._process.wait(_AT_ONCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_AT_ONCE_S)
        finally:
            if self._process.stdin is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()
            _kill_all(tree)

    def _order(self, order: bytes) -> None:
        """Tell the supervisor to end, if it still listens."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # ValueError: closed, at a second stop
                self._process.stdin.write(order)
                self._process.stdin.flush()


def _kill_all(processes: list[psutil.Process]) -> None:
    """Make sure that each of these is gone; psutil tells a reused process id from the old one."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=5)
