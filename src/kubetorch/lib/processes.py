"""Processes: starting them, telling them apart, and the memory and processors that they use.

A process id is used again; the id and the start time together are not. What a process inherited
in its environment tells where it belongs, even if its parents are gone.

Needs the standard library alone, and loads neither `subprocess` nor `asyncio`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from math import inf
from pathlib import Path

#: Ticks of processor time in a second.
TICKS = os.sysconf("SC_CLK_TCK")


def start_time(pid: int) -> str | None:
    """The start of a process, as text to compare with; `None` if it is gone or a zombie."""
    if sys.platform != "linux":
        return _start_time_by_ps(pid)
    try:
        fields = stat(Path(f"/proc/{pid}"))
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


def identity() -> str:
    """This process, as text that no other process of the machine ever has."""
    return _identity(os.getpid())


@functools.lru_cache(maxsize=1)
def _identity(pid: int) -> str:
    return f"{pid}:{start_time(pid) or ''}"


def is_alive(process: str) -> bool:
    """True if the process of this `identity` runs."""
    pid, _, started = process.partition(":")
    return pid.isdecimal() and len(pid) < 10 and start_time(int(pid)) == started


def pid_of(process: str) -> int:
    """The process id in an `identity`."""
    return int(process.partition(":")[0])


def state(pid: int) -> str | None:
    """The kernel's letter for what a process does, such as `T` for stopped; `None` if unknown."""
    try:
        return stat(Path(f"/proc/{pid}"))[0].decode()
    except OSError:
        return None


def ticks_used(pid: int) -> int | None:
    """Processor time of a process and of its children that have ended; `None` if unknown."""
    try:
        return sum(map(int, stat(Path(f"/proc/{pid}"))[11:15]))
    except OSError:
        return None


def stat(folder: Path) -> list[bytes]:
    """The fields of `/proc/PID/stat`, from the state on."""
    # The name, in parentheses, may have spaces and parentheses in it.
    return (folder / "stat").read_bytes().rpartition(b")")[2].split()


def processes_with(variable: str) -> dict[int, str]:
    """The value of an environment variable in each process of this user that started with it."""
    prefix = f"{variable}=".encode()
    found = {}
    for pid, environment in _environments():
        for item in environment:
            if item.startswith(prefix):
                found[pid] = item[len(prefix) :].decode(errors="replace")
                break
    return found


def _environments() -> list[tuple[int, list[bytes]]]:
    if sys.platform != "linux":
        return _environments_by_ps()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
                found.append((int(folder.name), environment))
            except OSError:  # another user's, or gone
                continue
    return found


def _environments_by_ps() -> list[tuple[int, list[bytes]]]:
    # Arguments and environment on one line: what is looked for has no spaces in it.
    found = []
    for line in _output("ps", "-E", "-x", "-ww", "-o", "pid=,command=").splitlines():
        pid, _, rest = line.strip().partition(" ")
        if pid.isdigit():
            found.append((int(pid), rest.encode().split(b" ")))
    return found


def _start_time_by_ps(pid: int) -> str | None:
    state, _, started = _output("ps", "-o", "stat=,lstart=", "-p", str(pid)).strip().partition(" ")
    return None if not started or state.startswith("Z") else started.strip()


def _output(*command: str) -> str:
    import subprocess  # noqa: PLC0415  # costs 8 ms, and Linux never needs it

    run = subprocess.run(command, capture_output=True, check=False, timeout=10)
    return run.stdout.decode(errors="replace")


def spawn(
    command: tuple[str, ...],
    environment: Mapping[str, str],
    *,
    stdin: int | None = None,
    output: int | None = None,
    errors: int | None = None,
) -> int:
    """Start a program as the leader of a new session; its process id."""
    null = os.open(os.devnull, os.O_RDWR)
    try:
        given = [null if fd is None else fd for fd in (stdin, output, errors)]
        # Above 2, so that none of them is overwritten before its turn comes.
        raised = [_above_standard(fd) for fd in given]
        try:
            return _spawn(command, environment, raised)
        finally:
            for fd in raised:
                os.close(fd)
    finally:
        os.close(null)


def _above_standard(descriptor: int) -> int:
    low = []
    copy = os.dup(descriptor)
    while copy <= 2:
        low.append(copy)
        copy = os.dup(descriptor)
    for fd in low:
        os.close(fd)
    return copy


def _spawn(command: tuple[str, ...], environment: Mapping[str, str], standard: list[int]) -> int:
    moves = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(standard)]
    # What this process ignores, as Python does SIGPIPE, the program would ignore, too.
    defaults = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    try:
        return os.posix_spawn(
            command[0],
            command,
            environment,
            file_actions=moves,
            setsid=True,
            setsigmask=[],
            setsigdef=defaults,
        )
    except NotImplementedError:  # a C library without POSIX_SPAWN_SETSID
        pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            for ignored in defaults:
                signal.signal(ignored, signal.SIG_DFL)
            for number, fd in enumerate(standard):
                os.dup2(fd, number)
            os.execve(command[0], command, environment)
        finally:
            os._exit(127)
    return pid


def at_fork(method: Callable[[], object]) -> None:
    """Call a method in forked children, as long as somebody has its object."""
    reference = weakref.WeakMethod(method)
    os.register_at_fork(after_in_child=lambda: _call(reference))


def at_exit(method: Callable[[], object]) -> None:
    """Call a method when the program ends, if somebody still has its object."""
    atexit.register(_call, weakref.WeakMethod(method))


def _call(reference: weakref.WeakMethod[Callable[[], object]]) -> None:
    method = reference()
    if method is not None:
        method()


def become_subreaper() -> bool:
    """Become the parent of descendants whose own parent ends. False where that does not exist."""
    if sys.platform != "linux":
        return False
    import ctypes  # noqa: PLC0415  # of those who import this module, few need it

    return ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0  # type: ignore[no-any-return]


def exit_status(pid: int) -> int | None:
    """The status of an ended child, as `subprocess` counts; `None` if it lives or is no child."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if found else None


def signal_name(number: int) -> str:
    """The name of a signal; those of real time have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def members(leader: int, *, marker: str) -> list[int]:
    """The processes of a session, and those that left it; none where the system does not say."""
    if sys.platform != "linux":
        return []
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            is_member = int(stat(folder)[3]) == leader
            if is_member or (
                marker and marker.encode() in (folder / "environ").read_bytes().split(b"\0")
            ):
                found.append(int(folder.name))
    return found


def kill_session(leader: int, *, marker: str) -> list[int]:
    """Kill the processes of a session, and those that left it; the ids of those found."""
    found = members(leader, marker=marker)
    for pid in found:
        if pid != os.getpid():  # the last to go
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.killpg(leader, signal.SIGKILL)
    return found


_PR_SET_CHILD_SUBREAPER = 36
_PAGE = os.sysconf("SC_PAGE_SIZE")


def children(pid: int) -> list[int]:
    """The processes that a process started; none where the system does not say."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """A process and all that it started, directly or not, as far as they live."""
    found = [pid]
    for one in found:
        found += children(one)
    return found


def resident(pids: Iterable[int]) -> int:
    """Bytes of memory that processes have, those that several share counted for each of them."""
    return sum(map(_resident, pids))


def proportional(pids: Iterable[int]) -> int:
    """Bytes of memory that processes have, those that several share counted once in all."""
    return sum(map(_proportional, pids))


def _resident(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) * _PAGE if len(fields) > 1 else 0


def _proportional(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        # It has ended, or belongs to somebody else, of whom only the sum is known.
        return _resident(pid)
    for line in lines:
        name, _, amount = line.partition(":")
        if name == "Pss":
            return int(amount.split()[0]) * 1024
    return 0


def machine_memory() -> int:
    """Bytes of memory that the machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def written(size: int) -> str:
    """Bytes as manifests write them, to four digits."""
    for unit, factor in (("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10)):
        if size >= factor:
            return f"{size / factor:.4g}{unit}"
    return str(size)


#: Where a container sees the limits of its cgroup: version 2, and version 1.
_V2 = [Path("/sys/fs/cgroup/cpu.max")]
_V1 = [Path(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period")]


def usable() -> set[int]:
    """Numbers of the processors that the system lets this process run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def quota() -> float:
    """The processors that the CPU limit of this container allows; infinite without a limit."""
    for paths in (_V2, _V1):
        try:
            return parse_quota(" ".join(path.read_text() for path in paths))
        except (OSError, ValueError, ZeroDivisionError):  # not there, or not of this format
            continue
    return inf


def parse_quota(text: str) -> float:
    """Processors' time per time, of a quota and its period."""
    allowed, period = text.split()
    if allowed in ("max", "-1"):
        return inf
    return int(allowed) / int(period)
