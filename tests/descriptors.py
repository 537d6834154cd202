"""The open descriptors of this process, and a shortage of them."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path


def numbers() -> set[int]:
    """Those that are open."""
    files = list(Path("/dev/fd").iterdir())
    return {int(file.name) for file in files if os.path.lexists(file)}  # not that of the folder


@contextlib.contextmanager
def left(count: int) -> Iterator[None]:
    """So many more can be opened."""
    used = numbers()
    limit = 0
    while count:
        count -= limit not in used
        limit += 1
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
