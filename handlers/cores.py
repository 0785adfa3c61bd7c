"""How many cores this process may use, and how it waits on them. Imports no torch: the commands ask it too."""

import math
import os
from collections.abc import Mapping
from pathlib import Path

#: Variables that bound how long GNU OpenMP's helpers wait for the next loop; they are read when torch is imported.
BOUNDS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
#: A helper looks so often before it sleeps, about 20 microseconds: decode steps on two threads are 1.15 times as fast
#: as without any. Four times as often makes them faster by a tenth again, but beside another thread that computes 1.7
#: times as slow, and OpenMP's own milliseconds eight times.
_SPINS = "2000"


def cores() -> int:
    """Cores this process may use: its affinity, and the CPU quota of its container (cgroup v2) where there is one."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, min(count, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup, or "max": no quota
        return count


def spinning(environment: Mapping[str, str]) -> dict[str, str]:
    """What an environment lacks for OpenMP's helpers to wait no longer than is good: nothing if it says how long."""
    return {} if any(name in environment for name in BOUNDS) else {"GOMP_SPINCOUNT": _SPINS}
