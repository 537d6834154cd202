"""Processes under an event loop: their ends, the lines that they print, programs, orphans.

Linux reports the end of a process through a pidfd, macOS through a kqueue; both are
descriptors that an event loop can wait for.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import functools
import os
import select
import signal
import sys
import termios
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from kubetorch.lib import processes
from kubetorch.lib.tuning import LIMITS, TIMING

#: Number of the system call, the same on every architecture.
_PIDFD_OPEN = 434


class ExitWatch:
    """Calls back, once, when a process has ended; it may still be a zombie then."""

    def __init__(self, pid: int, on_exit: Callable[[], object], pidfd: int | None = None) -> None:
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
        self._on_exit = lambda: None
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
    """`os.pidfd_open` for a Python that was built with the headers of an older kernel."""
    import ctypes  # noqa: PLC0415  # rarely needed

    descriptor: int = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_OPEN, pid, 0)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


async def wait_for_ends(pids: Iterable[int]) -> None:
    """Wait until processes have ended, children or not; take the exit status of children."""
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
    processes.exit_status(pid)
    if not end.done():
        end.set_result(None)


def reap(pid: int) -> None:
    """Take the exit status of an orphan that is a child of this process now, when it ends."""
    with contextlib.suppress(OSError):
        ExitWatch(pid, lambda: processes.exit_status(pid))


_READ_BYTES = 64 * 1024

OnLine = Callable[[str], None]


class Output:
    """Reads lines from a pipe until its last writer has closed it."""

    def __init__(self, descriptor: int, on_line: OnLine) -> None:
        self._loop = asyncio.get_running_loop()
        self._descriptor = descriptor
        self._on_line = on_line
        self._rest = b""
        os.set_blocking(descriptor, False)
        self._loop.add_reader(descriptor, self._read)

    def drain(self) -> None:
        """Read the bytes that are in the pipe at this moment: a program may write without end."""
        if self._descriptor < 0:
            return
        available = array.array("i", [0])
        fcntl.ioctl(self._descriptor, termios.FIONREAD, available)
        remaining_bytes = available[0]
        while remaining_bytes > 0:
            count = self._read(min(remaining_bytes, _READ_BYTES))
            if not count:
                break
            remaining_bytes -= count
        if self._descriptor >= 0:
            self._read()  # the end of the pipe, if its last writer has closed it

    def close(self) -> None:
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
            if self._rest:
                self._report_line(self._rest)

    def _read(self, most_bytes: int = _READ_BYTES) -> int:
        """Read once; returns the number of bytes."""
        try:
            data = os.read(self._descriptor, most_bytes)
        except BlockingIOError:
            return 0
        if not data:
            self.close()
            return 0
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._report_line(line)
        while len(self._rest) > LIMITS.child_line_bytes:
            self._report_line(self._rest[: LIMITS.child_line_bytes])
            self._rest = self._rest[LIMITS.child_line_bytes :]
        return len(data)

    def _report_line(self, line: bytes) -> None:
        # A progress bar writes its states over each other; only the last one is visible.
        text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        self._on_line(text)


async def run(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    folder: str,
    on_line: OnLine,
    on_error_line: OnLine | None = None,
) -> int:
    """Run a program to its end; its exit status, as `subprocess` counts.

    Programs that it leaves in the background live on, and their lines are still reported. If this
    is cancelled, its session is killed.
    """
    readers: list[Output] = []
    writers: list[int] = []
    try:
        for on_stream_line in filter(None, (on_line, on_error_line)):
            descriptor, writer = os.pipe()
            writers.append(writer)
            readers.append(Output(descriptor, on_stream_line))
        pid = processes.spawn(
            ("/bin/sh", "-c", 'cd "$0" && exec "$@"', folder, *command),
            environ,
            output=writers[0],
            errors=writers[-1],
        )
    except BaseException:
        for reader in readers:
            reader.close()
        raise
    finally:
        for writer in writers:
            os.close(writer)
    ended = asyncio.Event()
    try:
        with contextlib.closing(ExitWatch(pid, ended.set)):
            await ended.wait()
    except BaseException:
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
        reap(pid)
        raise
    finally:
        for reader in readers:
            reader.drain()
    status = processes.exit_status(pid)
    return 1 if status is None else status


class OrphanReaper:
    """Reaps orphans, as long as it is started.

    Workers and zygotes have an owner that waits for them. They lead a session each, as a few
    orphans do too: a leader is reaped only when it has been a zombie for long.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        #: Ended leaders of sessions, with the time at which the end was first seen.
        self._leaders: dict[int, float] = {}

    def start(self) -> None:
        """Look for orphans whenever a child ends."""
        # Not the loop's own add_signal_handler: uvloop keeps this signal for itself.
        signal.signal(signal.SIGCHLD, self._on_signal)

    def stop(self) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if self._timer is not None:
            self._timer.cancel()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(
                self._schedule_check, TIMING.orphan_search_delay_seconds
            )

    def _schedule_check(self, delay: float) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(delay, self._check)

    def _check(self) -> None:
        self._timer = None
        now = self._loop.time()
        leaders: dict[int, float] = {}
        for pid in processes.children(os.getpid()):
            leads = _leads_session(pid)
            if leads is None:
                continue
            since = self._leaders.get(pid, now)
            if not leads or now - since >= TIMING.ended_leader_seconds:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            else:
                leaders[pid] = since
        self._leaders = leaders
        if leaders:
            self._schedule_check(TIMING.ended_leader_seconds)


def _leads_session(pid: int) -> bool | None:
    """True if an ended process led its session; `None` if the process lives or is gone."""
    try:
        fields = processes.stat(Path("/proc", str(pid)))
    except OSError:
        return None
    return int(fields[3]) == pid if fields[0] == b"Z" else None
