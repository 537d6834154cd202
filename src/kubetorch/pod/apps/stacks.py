"""Asks the Python processes of an app for the stacks of their threads.

    agent ── signal `STACKS` ─► handler of `children/sitecustomize.py` ── file ──► agent reads it

The handler is Python's, so it runs between two instructions of the main thread, and reading the
frames of the other threads is safe. A process that has no such handler, such as one of another
language or of `python -I`, gets no signal, which would end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from pathlib import Path

from kubetorch.lib import processes
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.pod.user_process import loader, protocol

#: Variable of an app's environment: the number of the signal, and the file.
VARIABLE = "KT_APP_STACKS"
_HANDLER = re.compile(rf'^  File "{re.escape(loader.CHILDREN_FOLDER)}.*\n', re.MULTILINE)


class AppStacksFile:
    """The file that the processes of an app write their stacks to, one after the other."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._lock = asyncio.Lock()

    @staticmethod
    def answers(pid: int) -> bool:
        """True if a process has the handler."""
        return protocol.STACKS is not None and processes.catches(pid, protocol.STACKS)

    async def ask(self, pid: int) -> str:
        """The stacks of a process that answers, or why there are none."""
        assert protocol.STACKS is not None
        async with self._lock:
            self._path.write_bytes(b"")
            try:
                os.kill(pid, protocol.STACKS)
            except OSError:
                return "it has ended"
            until = time.monotonic() + TIMING.stacks_answer_seconds + TIMING.stacks_signal_seconds
            text = b""
            while time.monotonic() < until:
                await asyncio.sleep(TIMING.stacks_quiet_seconds)
                with contextlib.suppress(OSError), self._path.open("rb") as file:
                    previous_text, text = text, file.read(LIMITS.stacks_bytes)
                    if text and text == previous_text:
                        return _HANDLER.sub("", text.decode(errors="replace")).rstrip("\n")
        return f"no answer: its main thread runs no Python; {way_out(pid)}"


def way_out(pid: int) -> str:
    return f"py-spy dump --pid {pid} in a shell of the pod (kt ssh) shows more, if it is installed"
