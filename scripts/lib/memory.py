"""Memory of a set of processes, sampled while they work."""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

import psutil

Processes = Callable[[], Iterable[psutil.Process]]


def total_memory(processes: Iterable[psutil.Process]) -> int:
    """Bytes held by these processes; one that has gone holds none.

    Shared pages count once in all (PSS) where the system tells them apart, else once per process (RSS).
    """
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
    """Samples the memory of processes in a thread; a context manager. `peak` is in bytes.

    Args:
        processes: which processes there are, asked anew for each sample.
        every_s: seconds between two samples.
    """

    def __init__(self, processes: Processes, every_s: float = 2.0) -> None:
        self.peak = 0
        self._processes = processes
        self._every_s = every_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peak-memory", daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self._sample()

    def _run(self) -> None:
        while not self._done.is_set():
            self._sample()
            self._done.wait(self._every_s)

    def _sample(self) -> None:
        self.peak = max(self.peak, total_memory(self._processes()))
