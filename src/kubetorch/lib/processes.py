"""Processes: starting them, identifying them, and the memory and processors that they use.

A process id is used again; the id and the start time together are not. An inherited variable in the
environment of a process says whose it is, even if its parents have ended.

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf
from pathlib import Path

#: Ticks of processor time in a second.
TICKS = os.sysconf("SC_CLK_TCK")


def start_time(pid: int) -> str | None:
    """The start of a process, as text to compare with; `None` if it has ended or is a zombie."""
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


def catches(pid: int, number: int) -> bool:
    """True if a process has a handler for a signal; false where the system cannot tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    mask = status.partition("\nSigCgt:")[2].partition("\n")[0]
    return bool(int(mask or "0", 16) >> (number - 1) & 1)


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
    values = {}
    for pid, environment in _environments():
        for item in environment:
            if item.startswith(prefix):
                values[pid] = item[len(prefix) :].decode(errors="replace")
                break
    return values


def _environments() -> list[tuple[int, list[bytes]]]:
    if sys.platform != "linux":
        return _environments_by_ps()
    environments = []
    for pid in _pids():
        with contextlib.suppress(OSError):  # another user's, or gone
            environments.append((pid, _environment(pid)))
    return environments


def _pids() -> Iterator[int]:
    return (int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit())


def _environment(pid: int) -> list[bytes]:
    # Machines have hundreds of processes, and pathlib takes longer than the file.
    with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:  # noqa: PTH123
        return file.read().split(b"\0")


def _environments_by_ps() -> list[tuple[int, list[bytes]]]:
    # Arguments and environment on one line: the value of the variable has no spaces in it.
    environments = []
    for line in _output("ps", "-E", "-x", "-ww", "-o", "pid=,command=").splitlines():
        pid, _, rest = line.strip().partition(" ")
        if pid.isdigit():
            environments.append((int(pid), rest.encode().split(b" ")))
    return environments


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
    high_descriptors: list[int] = []
    try:
        # Above 2, so that no descriptor is overwritten before it is duplicated.
        for fd in (stdin, output, errors):
            high_descriptors.append(_above_standard(null if fd is None else fd))
        return _spawn(command, environment, high_descriptors)
    finally:
        for fd in (null, *high_descriptors):
            os.close(fd)


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
    # The program would inherit ignored signals, such as SIGPIPE in Python.
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
    """Call a method in forked children, as long as its object lives."""
    reference = weakref.WeakMethod(method)
    os.register_at_fork(after_in_child=lambda: _call(reference))


def at_exit(method: Callable[[], object]) -> None:
    """Call a method when the program ends, if its object still lives."""
    atexit.register(_call, weakref.WeakMethod(method))


def _call(reference: weakref.WeakMethod[Callable[[], object]]) -> None:
    method = reference()
    if method is not None:
        method()


def become_subreaper() -> bool:
    """Become the parent of descendants whose own parent ends; false if the system lacks that."""
    if sys.platform != "linux":
        return False
    import ctypes  # noqa: PLC0415  # of those who import this module, few need it

    return ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0  # type: ignore[no-any-return]


def exit_status(pid: int) -> int | None:
    """The status of an ended child, as `subprocess` counts; `None` if it lives or is no child."""
    try:
        ended_pid, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if ended_pid else None


def signal_name(number: int) -> str:
    """The name of a signal; those of real time have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def members(leader: int, *, marker: str) -> list[int]:
    """The processes of a session, and those that left it; empty where the system cannot tell."""
    if sys.platform != "linux":
        return []
    pids = []
    for pid in _pids():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if os.getsid(pid) == leader or (marker and marker.encode() in _environment(pid)):
                pids.append(pid)
    return pids


def kill_session(leader: int, *, marker: str) -> list[int]:
    """Kill the processes of a session, and those that left it; return their ids."""
    pids = members(leader, marker=marker)
    for pid in pids:
        if pid != os.getpid():  # the last to go
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.killpg(leader, signal.SIGKILL)
    return pids


_PR_SET_CHILD_SUBREAPER = 36
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def children(pid: int) -> list[int]:
    """The processes that a process started; empty where the system cannot tell."""
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            pids += map(int, (thread / "children").read_text().split())
    return pids


def descendants(pid: int) -> list[int]:
    """A process and all living processes that it started, directly or not."""
    pids = [pid]
    for ancestor in pids:
        pids += children(ancestor)
    return pids


def resident(pids: Iterable[int]) -> int:
    """Bytes of memory of processes; shared memory counts for each of them."""
    return sum(map(_resident, pids))


def proportional(pids: Iterable[int]) -> int:
    """Bytes of memory of processes; shared memory counts once in all."""
    return sum(map(_proportional, pids))


def _resident(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) * _PAGE_BYTES if len(fields) > 1 else 0


def _proportional(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        # It has ended, or belongs to another user, and only its resident memory is known.
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


#: Files with the CPU limit of a container's cgroup: version 2, and version 1.
_QUOTA_FILES_V2 = [Path("/sys/fs/cgroup/cpu.max")]
_QUOTA_FILES_V1 = [Path(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period")]


def usable() -> set[int]:
    """Numbers of the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def quota() -> float:
    """The processors that the CPU limit of this container allows; infinite without a limit."""
    for paths in (_QUOTA_FILES_V2, _QUOTA_FILES_V1):
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
