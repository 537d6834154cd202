"""Which processors this process may run on, and how much of them."""

from __future__ import annotations

import os
from math import inf
from pathlib import Path

#: Where a container sees the limits of its cgroup: version 2, and version 1.
_V2 = [Path("/sys/fs/cgroup/cpu.max")]
_V1 = [Path(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period")]


def usable() -> set[int]:
    """Numbers of the processors that the system lets this process run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def quota() -> float:
    """How many processors' time the CPU limit of this container leaves; infinite without one."""
    for paths in (_V2, _V1):
        try:
            return parse_quota(" ".join(path.read_text() for path in paths))
        except (OSError, ValueError, ZeroDivisionError):  # not there, or not of this format
            continue
    return inf


def parse_quota(text: str) -> float:
    """Processors' time per time, of a quota and its period.

    Args:
        text: Both in µs, as in `cpu.max` of cgroup v2 ("150000 100000", "max 100000"), or
            `cpu.cfs_quota_us` and `cpu.cfs_period_us` of v1 ("-1 100000": no limit).
    """
    allowed, period = text.split()
    if allowed in ("max", "-1"):
        return inf
    return int(allowed) / int(period)
