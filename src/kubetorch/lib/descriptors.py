"""Notices that a process cannot open files any more.

Whoever has the same user may take away from a process what it may open (`prlimit`). It accepts no
connection then, and says nothing: so it looks for itself. A process that is started anew has the
limit of whoever starts it.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable

from kubetorch.lib import sockets

#: Seconds between two looks: nothing tells of a limit that somebody else has set.
INTERVAL = 1.0
#: Looks in a row that may fail where the limit is what it was: clients may come all at once.
_PATIENCE = 10


class DescriptorWatch:
    """Calls `on_exhausted` once, with the reason, when this process cannot open files for long."""

    def __init__(self, on_exhausted: Callable[[str], None]) -> None:
        self._on_exhausted = on_exhausted
        self._loop = asyncio.get_running_loop()
        self._limit = sockets.limit()
        self._failed = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = self._loop.call_later(INTERVAL, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        if not _can_open():
            sockets.raise_limit()  # nobody may raise a hard limit that was lowered
        if _can_open():
            self._failed = 0
        else:
            self._failed += 1
            limit = sockets.limit()
            if limit < self._limit or self._failed == _PATIENCE:
                self._on_exhausted(f"it may open {limit} files and connections, and has them open")
                return
        self.start()


def _can_open() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno != errno.EMFILE
    return True
