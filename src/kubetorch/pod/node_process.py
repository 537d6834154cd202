"""A process of a framework that stands beside the workers of a pod, with all that it starts.

Ray and Monarch have such a node in every pod; the program of the user runs in a worker, and has
the nodes do its work.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import secrets
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kubetorch.lib import deadlines, process_watch, processes
from kubetorch.lib.process_watch import ExitWatch, Output

#: Variable by which what a node started is found.
MARKER = "KT_NODE"
#: Lines that an error shows.
_SHOWN = 15
#: Seconds to end by itself.
_STOPPING = 3.0


class NodeProcess:
    """Starts the node, perhaps several times until it stays, and ends it."""

    def __init__(self, env: Mapping[str, str], on_line: Callable[[str], None]) -> None:
        #: For its own files and sockets, whose paths may have 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="kt-node-"))
        self._marker = f"{MARKER}={secrets.token_hex(8)}"
        name, _, value = self._marker.partition("=")
        folder = {"TMPDIR": str(self.folder)}
        self._env = {**env, **folder, name: value, "PYTHONUNBUFFERED": "1"}
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=_SHOWN)
        self._ready = ""
        self._pid = 0
        self._watch: ExitWatch | None = None
        self._output: Output | None = None
        self._news = asyncio.Event()
        self._is_ready = self._has_ended = False

    @property
    def lines(self) -> Sequence[str]:
        """The last lines that it printed."""
        return self._lines

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    async def start(self, command: tuple[str, ...], ready: str) -> bool:
        """Start it, and wait for a line with this text; whether it has come before the end."""
        self._lines.clear()
        self._ready = ready
        self._is_ready = self._has_ended = False
        reader, writer = os.pipe()
        self._output = Output(reader, self._take)
        try:
            self._pid = processes.spawn(command, self._env, output=writer, errors=writer)
        finally:
            os.close(writer)
        self._watch = ExitWatch(self._pid, self._end)
        while not self._has_ended and not self._is_ready:
            self._news.clear()
            await self._news.wait()
        return self._is_ready

    def _take(self, line: str) -> None:
        self._lines.append(line)
        self._is_ready = self._is_ready or self._ready in line
        self._on_line(line)
        self._news.set()

    def _end(self) -> None:
        self._has_ended = True
        if self._output is not None:
            self._output.drain()
            self._output.close()
        process_watch.reap(self._pid)
        self._news.set()

    async def kill(self) -> None:
        """End it, and all that it started."""
        if self._pid and not self._has_ended:
            with contextlib.suppress(OSError):
                os.kill(self._pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with deadlines.timeout(_STOPPING):
                    while not self._has_ended:
                        self._news.clear()
                        await self._news.wait()
        if self._pid:
            kill = functools.partial(processes.kill_session, self._pid, marker=self._marker)
            for pid in await asyncio.to_thread(kill):
                process_watch.reap(pid)
        if self._watch is not None:
            self._watch.close()
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)
