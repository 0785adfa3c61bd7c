"""Whether an error means that memory ran out, and how much there is."""

import ctypes
import functools
from pathlib import Path

import psutil
import torch

_CGROUP = Path("/sys/fs/cgroup")
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # mallopt(3)
_MOST_MMAP = 2**25  # bytes: glibc takes no more
_KEPT = 2**30  # bytes of freed memory that stay the process's


def available() -> int:
    """Bytes of the host's memory that this process may still take: what is free, and what its container (cgroup v2)
    leaves. Files that the system keeps in memory are given back when it is needed.
    """
    free = int(psutil.virtual_memory().available)
    try:
        most, held = (int((_CGROUP / f"memory.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
        counts = dict(line.split() for line in (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
        return max(0, min(free, most - held + int(counts.get("inactive_file", 0))))
    except (OSError, ValueError):  # no cgroup, or "max": no limit
        return free


@functools.cache
def keep_freed() -> bool:
    """Let the process keep the memory that it frees, up to a gibibyte at the heap's end, for its next allocation.

    glibc gives a freed block of some megabytes back to the system at once and asks for it anew, page by page, which
    costs a CPU more than many an operation on it does. To be called before there are other threads: those that have an
    arena of their own keep to its rules.

    Returns:
        Whether the C library took it: only glibc does.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_MMAP_THRESHOLD, _MOST_MMAP), (_TRIM_THRESHOLD, _KEPT), (_ARENA_MAX, 1))
    answers = [mallopt(which, value) for which, value in settings]
    return all(answers)


def trim() -> None:
    """Give back once what is free now, between blocks that are not: weights that were let go leave such holes."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the device or the host.

    On the CPU torch says so in a plain RuntimeError, by its allocator's text alone.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("not enough memory" in text or "can't allocate memory" in text)


def release() -> None:
    """Give cached device memory back, so that a smaller micro-batch finds it in one piece."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
