"""Notices that a process cannot open files any more.

Another process of the same user may lower the limit of open files of this process (`prlimit`). The
process then accepts no connection, and nothing reports that, so it checks itself. A restarted
process has the limit of its parent.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable

from kubetorch.lib import sockets
from kubetorch.lib.tuning import LIMITS, TIMING


class DescriptorWatch:
    """Calls `on_exhausted` once, with the reason, when this process cannot open files for long."""

    def __init__(self, on_exhausted: Callable[[str], None]) -> None:
        self._on_exhausted = on_exhausted
        self._loop = asyncio.get_running_loop()
        self._limit = sockets.limit()
        self._failures = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = self._loop.call_later(TIMING.descriptor_check_seconds, self._check)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        if not _can_open():
            sockets.raise_limit()  # fails if the hard limit was lowered
        if _can_open():
            self._failures = 0
        else:
            self._failures += 1
            limit = sockets.limit()
            if limit < self._limit or self._failures == LIMITS.failed_descriptor_checks:
                self._on_exhausted(f"it may open {limit} files and connections, and has them open")
                return
        self.start()


def _can_open() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno != errno.EMFILE
    return True
