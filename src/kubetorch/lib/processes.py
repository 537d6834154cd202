"""Processes of other owners than `subprocess`: watched, ended with what they started, reaped.

Linux tells the end of a process through a pidfd, macOS through a kqueue; both are descriptors that
an event loop can wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
#: Number of the system call, the same on every architecture.
_PIDFD_OPEN = 434


def become_subreaper() -> bool:
    """Become the parent of descendants whose own parent ends. False where that does not exist."""
    if sys.platform != "linux":
        return False
    import ctypes  # noqa: PLC0415  # of those who import this module, few need it

    return ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0  # type: ignore[no-any-return]


class ExitWatch:
    """Calls back, once, when a process has ended; it may still be a zombie then.

    Args:
        pid: The process.
        on_exit: What to call, in the running event loop.
        pidfd: A descriptor of the process, if somebody has opened one; it is closed here.

    Raises:
        OSError: The kernel has no such thing, or forbids it.
    """

    def __init__(self, pid: int, on_exit: Callable[[], None], pidfd: int | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        self._descriptor = -1
        try:
            self._descriptor = self._open(pid) if pidfd is None else pidfd
        except ProcessLookupError:
            self._loop.call_soon(self._ended)
        else:
            self._loop.add_reader(self._descriptor, self._ended)

    def close(self) -> None:
        """Do not watch any more."""
        self._on_exit = _nothing
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self, pid: int) -> int:
        if sys.platform == "darwin":
            queue = select.kqueue()
            event = select.kevent(
                pid,
                filter=select.KQ_FILTER_PROC,
                flags=select.KQ_EV_ADD | select.KQ_EV_ONESHOT,
                fflags=select.KQ_NOTE_EXIT,
            )
            try:
                queue.control([event], 0)
                return os.dup(queue.fileno())
            finally:
                queue.close()
        elif hasattr(os, "pidfd_open"):
            return os.pidfd_open(pid)
        else:
            return _pidfd_open(pid)

    def _ended(self) -> None:
        on_exit = self._on_exit
        self.close()
        on_exit()


def _pidfd_open(pid: int) -> int:
    """For a Python that was built with headers of an older kernel than the one that it runs on.

    Raises:
        OSError: The kernel has no such thing, or there is no such process.
    """
    import ctypes  # noqa: PLC0415  # rarely needed

    descriptor: int = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_OPEN, pid, 0)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


def _nothing() -> None:
    return None


def _discard(_: object) -> None:
    return None


def exit_status(pid: int) -> int | None:
    """What a child ended with, as `subprocess` counts; `None` if it lives or is not a child."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if found else None


async def wait_for_ends(pids: Iterable[int]) -> None:
    """Wait until processes have ended, whoever their parents are; take the status of children.

    Args:
        pids: The processes; one that may not be watched is left out.
    """
    loop = asyncio.get_running_loop()
    ends: list[asyncio.Future[None]] = []
    watches = []
    try:
        for pid in pids:
            end = loop.create_future()
            with contextlib.suppress(OSError):
                watches.append(ExitWatch(pid, functools.partial(_end, pid, end)))
                ends.append(end)
        await asyncio.gather(*ends)
    finally:
        for watch in watches:
            watch.close()


def _end(pid: int, end: asyncio.Future[None]) -> None:
    exit_status(pid)
    if not end.done():
        end.set_result(None)


def members(leader: int, *, marker: str) -> list[int]:
    """The processes of a session, and those that left it; none where the system does not say.

    Args:
        leader: The process that leads the session; it may have ended.
        marker: `NAME=value` in the environment that its descendants inherited.
    """
    return _members(leader, marker.encode())


def kill_session(leader: int, *, marker: str) -> list[int]:
    """Kill the processes of a session, and those that left it; the ids of those found.

    Args:
        leader: The process that leads the session; it may have ended.
        marker: `NAME=value` in the environment that its descendants inherited.
    """
    found = members(leader, marker=marker)
    for pid in found:
        if pid == os.getpid():  # the last to go
            continue
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.killpg(leader, signal.SIGKILL)
    return found


def _members(session: int, marker: bytes) -> list[int]:
    if sys.platform != "linux":
        return []
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The name, in parentheses, may have spaces and parentheses in it.
            fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            is_member = int(fields[3]) == session
            if is_member or (marker and marker in (entry / "environ").read_bytes().split(b"\0")):
                found.append(int(entry.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def reap(pid: int) -> None:
    """Take the exit status of an orphan that is a child of this process now, when it ends."""
    with contextlib.suppress(OSError):
        ExitWatch(pid, lambda: _discard(exit_status(pid)))
