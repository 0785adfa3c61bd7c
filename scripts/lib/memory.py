"""Memory of a process and everything it started, sampled while it works."""

import threading
from pathlib import Path
from types import TracebackType

import psutil


def tree_memory(pid: int) -> int:
    """Bytes held by a process and its descendants; 0 when it has gone.

    Shared pages count once in all (PSS) where the system tells them apart, else once per process (RSS).
    """
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    return sum(_process_memory(process) for process in processes)


def _process_memory(process: psutil.Process) -> int:
    try:
        # One kernel pass; psutil's memory_full_info walks every mapping in Python.
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


class PeakMemory:
    """Samples `tree_memory` of a process in a thread; a context manager. `peak` is in bytes."""

    def __init__(self, pid: int, every_s: float = 0.5) -> None:
        self.peak = 0
        self._pid = pid
        self._every_s = every_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self.peak = max(self.peak, tree_memory(self._pid))

    def _sample(self) -> None:
        while True:
            self.peak = max(self.peak, tree_memory(self._pid))
            if self._done.wait(self._every_s):
                return
