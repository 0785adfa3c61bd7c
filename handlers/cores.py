"""How many cores this process may use. Imports no torch: the commands ask it too."""

import math
import os
from pathlib import Path


def cores() -> int:
    """Cores this process may use: its affinity, and the CPU quota of its container (cgroup v2) where there is one."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, min(count, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup, or "max": no quota
        return count
