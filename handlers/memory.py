"""Whether an error means that memory ran out, and how much there is."""

from pathlib import Path

import psutil
import torch

_CGROUP = Path("/sys/fs/cgroup")


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
