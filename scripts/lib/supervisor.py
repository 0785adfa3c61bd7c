"""Keep a server's processes from outliving the command that started them.

Run as a program: `python -I supervisor.py SCRATCH COMMAND…` starts COMMAND and holds it as long as standard input
stays open. The pipe closes whenever the parent dies, by kill -9 too; then, or on a signal, or on an order over the
pipe, the command gets TERM, after a while KILL, and whatever processes it left are killed. The directory SCRATCH, which
the parent made for the command, is removed last. Exits with the command's status.

It stands by itself: it imports nothing of this repository.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

GRACE_S = 8.0
TICK_S = 0.1
#: Orders over the pipe: end, giving the command time to; end at once.
TERMINATE, KILL = b"t", b"k"

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    """Ask the Linux kernel; elsewhere the closing pipe has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def supervise(command: list[str], scratch: Path) -> int:
    """Run `command` until it ends or must end; returns its exit status (negative: the signal that ended it)."""
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: stopping.append(number))
    # Orphans of the command become our children, so that we can find them whoever their parent was.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    parent = os.getppid()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    Path("java.pid").write_text(f"{process.pid}\n")
    status = None
    while status is None and not stopping and os.getppid() == parent:
        if select.select([0], [], [], TICK_S)[0]:
            if os.read(0, 1) == KILL:
                process.kill()
            break
        status = process.poll()
    if status is None:
        status = _end(process)
    _end_descendants()
    shutil.rmtree(scratch, ignore_errors=True)
    _forget(process.pid)
    return status


def _forget(pid: int) -> None:
    """Remove our note of Java's process id; by now a new server may have put its own there."""
    note = Path("java.pid")
    with contextlib.suppress(OSError):
        if note.read_text().strip() == str(pid):
            note.unlink()


def _end(process: "subprocess.Popen[bytes]") -> int:
    """Terminate, wait, kill; an order to kill cuts the wait short."""
    process.terminate()
    deadline = time.monotonic() + GRACE_S
    watch = [0]
    while time.monotonic() < deadline and process.poll() is None:
        if select.select(watch, [], [], TICK_S / 2)[0]:
            order = os.read(0, 1)
            if order == KILL:
                break
            if order == b"":
                watch = []
    if process.poll() is None:
        process.kill()
    return process.wait()


def _end_descendants() -> None:
    """Kill and reap everything below this process; new orphans may appear while we do."""
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.02)


if __name__ == "__main__":
    code = supervise(sys.argv[2:], Path(sys.argv[1]))
    sys.exit(code if code >= 0 else 128 - code)
