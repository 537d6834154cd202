"""What a test left behind: processes, threads, listening sockets, temporary files.

A census is taken before a test and compared with one taken after it. Things that are ending are
waited for until a deadline; what is still there then is a leak.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

# How long a process that was told to end, or a thread that was told to stop, may take where many
# others run, too.
GRACE = 60.0
#: What this process has open, where the system says it so.
_DESCRIPTORS = Path("/proc/self/fd")


@dataclass(frozen=True)
class Census:
    """What belongs to this process at one moment."""

    children: frozenset[psutil.Process]
    threads: frozenset[threading.Thread]
    listening: frozenset[tuple[str, int]]
    files: frozenset[str]

    @classmethod
    def take(cls) -> Census:
        """Of this process, now."""
        return cls(
            children=frozenset(_children()),
            threads=frozenset(t for t in threading.enumerate() if not t.daemon),
            listening=frozenset(_listening()),
            files=frozenset(_temporary_files()),
        )

    def leaks_since(self, grace: float = GRACE) -> list[str]:
        """A line for each thing that is here, was not at this census, and does not end."""
        deadline = time.monotonic() + grace
        while True:
            now = Census.take()
            found = [
                *(_describe(child) for child in now.children - self.children if self._leaks(child)),
                *(f"thread {thread.name}" for thread in now.threads - self.threads),
                *(f"listening on {host}:{port}" for host, port in now.listening - self.listening),
                *(f"temporary file {name}" for name in sorted(now.files - self.files)),
            ]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.05)

    def _leaks(self, child: psutil.Process) -> bool:
        """Whether it lives, and is not what an agent that lasts has made in the place of another.

        A zygote that does not answer in time, as on a busy machine, is replaced.
        """
        try:
            owners = {owner.pid for owner in self.children}
            is_replacement = child.ppid() in owners and child.cmdline()[-1:] == ["zygote"]
        except psutil.Error:
            is_replacement = False
        return _lives(child) and not is_replacement


def processes_of(home: Path) -> list[psutil.Process]:
    """The living processes whose environment names `home` as `KT_LOCAL_DIR`."""
    return [process for process in psutil.process_iter() if _belongs(process, home)]


def processes_left_of(home: Path, grace: float = GRACE) -> list[str]:
    """A line for each process of `home` that does not end."""
    _, alive = psutil.wait_procs(processes_of(home), timeout=grace)
    return [_describe(process) for process in alive if _lives(process)]


def _belongs(process: psutil.Process, home: Path) -> bool:
    try:
        named = process.pid != os.getpid() and process.environ().get("KT_LOCAL_DIR") == str(home)
        return named and _lives(process)
    except psutil.Error:
        return False


def _lives(process: psutil.Process) -> bool:
    """Whether it runs, or is a child of this process that nobody has reaped."""
    try:
        zombie = process.status() == psutil.STATUS_ZOMBIE
        return not zombie or process.ppid() == os.getpid()
    except psutil.NoSuchProcess:
        return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"process {process.pid}: {' '.join(process.cmdline())}"
    except psutil.ZombieProcess:
        return f"process {process.pid}: has ended, and nobody reaped it"
    except psutil.Error:
        return f"process {process.pid}"


def _children() -> Iterator[psutil.Process]:
    """All processes below this one."""
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        yield from psutil.Process().children(recursive=True)
        return
    # psutil reads the parents of all processes of the machine. Twice: a list lacks some while one
    # of them ends.
    for pid in {*_pids_below(os.getpid()), *_pids_below(os.getpid())}:
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)


def _pids_below(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):  # it ended meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield int(child)
                yield from _pids_below(int(child))


def _listening() -> Iterator[tuple[str, int]]:
    if not _DESCRIPTORS.is_dir():
        for connection in psutil.Process().net_connections(kind="inet"):
            if connection.status == psutil.CONN_LISTEN:
                yield connection.laddr.ip, connection.laddr.port
        return
    # Each is asked: psutil reads the list of all sockets of the machine.
    for link in _DESCRIPTORS.iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if link.readlink().name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(link.name))) as sock:
                    is_inet = sock.family in (socket.AF_INET, socket.AF_INET6)
                    if is_inet and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        host, port = sock.getsockname()[:2]
                        yield host, port


def _temporary_files() -> list[str]:
    names = (path.name for path in Path(tempfile.gettempdir()).iterdir())
    return [name for name in names if not name.startswith("pytest-of-")]
