"""The host's free memory."""

import os
from pathlib import Path


def free_host_memory() -> int:
    """Return the bytes that this machine, or this container, can give without swapping.

    Without /proc, as on macOS and in some sandboxes, all of the machine's memory counts as free.
    """
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except FileNotFoundError:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        with open("/sys/fs/cgroup/memory.stat") as lines:
            pages = dict(line.split() for line in lines)
        cached = int(pages["inactive_file"]) + int(pages["active_file"])
    except (OSError, ValueError, KeyError):  # no limit ("max"), or no cgroups of version 2
        return available
    return max(0, min(available, limit - used + cached))
