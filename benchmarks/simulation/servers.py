"""Server processes whose memory is measured."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

#: Seconds that an orderly end may take.
_STOP = 30.0
#: Connections that wait to be accepted.
_BACKLOG = 1024


@contextmanager
def server(program: str, *more: str) -> Iterator[tuple[int, psutil.Process]]:
    """A program of `benchmarks.programs` that is given a listening socket; its port, and itself."""
    _allow_open_files()
    with socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG) as listener:
        descriptor = listener.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.programs.{program}", str(descriptor), *more],
            stdin=subprocess.DEVNULL,
            pass_fds=[descriptor],
        )
        port: int = listener.getsockname()[1]
    try:
        yield port, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(_STOP)


def resident(process: psutil.Process) -> float:
    """Bytes of a process in memory."""
    return float(process.memory_info().rss)


def _allow_open_files() -> None:
    """For this process and for those that it starts."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
