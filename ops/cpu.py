"""What the host's CPU has."""

import os
from pathlib import Path


def usable_cores() -> int:
    """Return how many cores the process may use, in a container with a quota too."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")  # microseconds of CPU, of a period: version 2
    found = quota.read_text().split() if quota.exists() else ["max"]
    return cores if found[0] == "max" else max(1, min(cores, int(found[0]) // int(found[1])))
