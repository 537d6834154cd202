"""Why a worker ended: its exit status, and whether the kernel killed it for its memory."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

from kubetorch.errors import OutOfMemoryError, WorkerDiedError
from kubetorch.lib import usage

_HIERARCHY = Path("/sys/fs/cgroup")
# Version 1 says "no limit" by the largest number of pages that there could be.
_UNLIMITED = 1 << 60


class MemoryKills:
    """How often the kernel killed for lack of memory where a process runs.

    The process's own cgroup is asked, of either version; where its files cannot be read, the
    machine's counter.
    """

    def __init__(self, pid: int) -> None:
        self._files = [file for file in _counters(pid) if _count(file) is not None][:1]
        self._before = self._now()

    def has_risen(self) -> bool:
        """Whether it happened since this object was made."""
        return self._now() > self._before

    @property
    def limit(self) -> int | None:
        """Bytes that the cgroup may use, if it has a limit."""
        return self._beside("memory.max", "memory.limit_in_bytes")

    @property
    def peak(self) -> int | None:
        """Bytes that it used at most."""
        return self._beside("memory.peak", "memory.max_usage_in_bytes")

    def _beside(self, *names: str) -> int | None:
        """A number in the folder of the counter, whichever version of cgroups it is of."""
        for file in self._files:
            for name in names:
                with contextlib.suppress(OSError, ValueError):  # "max" is no limit
                    found = int((file.parent / name).read_text())
                    return found if found < _UNLIMITED else None
        return None

    def _now(self) -> int:
        return sum(_count(file) or 0 for file in self._files)


def _counters(pid: int) -> list[Path]:
    """Files that may have the counter, the most specific first."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            below = path.lstrip("/")
            if "memory" in controllers.split(","):
                found.append(_HIERARCHY / "memory" / below / "memory.oom_control")
            elif not controllers:
                found.append(_HIERARCHY / below / "memory.events")
    return [
        *found,
        _HIERARCHY / "memory.events",
        _HIERARCHY / "memory" / "memory.oom_control",
        Path("/proc/vmstat"),
    ]


def _count(file: Path) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    return None


def died(
    status: int | None, *, pod_name: str, kills: MemoryKills | None, doing: str = ""
) -> WorkerDiedError:
    """The error for the calls of a worker that ended.

    Args:
        status: What it ended with; `None` when nobody could tell.
        pod_name: Its pod.
        kills: The counter as of the start of the worker.
        doing: What it did meanwhile, as `while ...`.
    """
    error: WorkerDiedError
    if status == -signal.SIGKILL and kills is not None and kills.has_risen():
        limit = kills.limit
        text = f"the worker in {pod_name} ran out of memory and was killed by the kernel{doing}"
        error = OutOfMemoryError(
            text if limit is None else f"{text}: its pod may use {usage.written(limit)}",
            exit_code=status,
            hint="its machine had no more: ask for what it needs, kt.Compute(memory=...)"
            if limit is None
            else "resources.limits.memory in the manifest, or in service_template, allows more",
        )
        error.limit_bytes, error.used_bytes = limit, kills.peak
    else:
        error = WorkerDiedError(
            f"the worker in {pod_name} {describe(status)}{doing}", exit_code=status
        )
    error.pod_name = pod_name
    return error


def describe(status: int | None) -> str:
    """An exit status in words."""
    if status is None:
        return "ended"
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"was killed by {name}"
    return f"ended with exit code {status}"
