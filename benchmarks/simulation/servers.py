"""Server processes whose memory is measured."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from benchmarks import processes


@contextmanager
def server(program: str, *more: str) -> Iterator[tuple[int, psutil.Process]]:
    """A program of `benchmarks.programs` that is given a listening socket; its port, and itself."""
    _allow_open_files()
    command = [sys.executable, "-m", f"benchmarks.programs.{program}", "{fd}", *more]
    with processes.serving(command) as port_and_process:
        yield port_and_process


def resident(process: psutil.Process) -> float:
    """Bytes of a process in memory."""
    return float(process.memory_info().rss)


def _allow_open_files() -> None:
    """For this process and for those that it starts."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
