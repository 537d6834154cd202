"""Asks a worker, which may be unable to run Python, for the stacks of its threads.

    agent ── frame DUMP ─────► worker: `faulthandler` writes a file in memory ──► agent reads it
          └─ signal `STACKS`

The worker writes while it holds the interpreter, so that no thread runs meanwhile: to look at the
frames of one that runs may end the process. A worker that does not answer is held up, by a
collective that waits for another rank in C, say; its threads stand still, and the signal has a
handler in C write. No process has to look into another.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from kubetorch.lib import memory, processes
from kubetorch.pod import user_process
from kubetorch.pod.user_process import protocol

#: Seconds that a worker has to answer, then its handler of the signal, and those without another
#: byte after which it has.
TIMEOUT, HANDLING, QUIET = 1.5, 1.5, 0.1
#: Bytes that are read of an answer.
LIMIT = 1024 * 1024
#: Files whose frames are ours: a thread is shown from where it calls code of the user.
OWN = str(Path(user_process.__file__).parent) + os.sep
_STATES = {
    "D": "it waits in the kernel, such as for a device or a network file system",
    "T": "it is stopped by a signal",
    "t": "it is stopped by a debugger",
    "Z": "it has ended",
}
_FILE = re.compile(r'^  File "(.*)", line ')
#: Frames of the event loop below what it runs, and its wait, which is all that an idle one has.
_LOOP = re.compile(r'[/\\](asyncio[/\\](base_events|events|runners)|selectors)\.py", line ')


class StackFile:
    """The file that one worker writes its stacks to."""

    def __init__(self) -> None:
        self.descriptor = memory.unnamed_file()
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, os.O_APPEND)
        self._lock = asyncio.Lock()
        self._is_closed = False

    async def ask(self, pid: int, send: Callable[[bytes], object]) -> str:
        """The stacks of the process that frames are sent to, or why there are none."""
        async with self._lock:
            if self._is_closed or protocol.STACKS is None:
                return "it has ended"
            os.ftruncate(self.descriptor, 0)
            until = int((time.monotonic() + TIMEOUT) * 1000)
            send(protocol.pack(protocol.DUMP, call=until))
            text = await self._answer(TIMEOUT)
            if not text and not self._is_closed:
                try:
                    os.kill(pid, protocol.STACKS)
                except ProcessLookupError:
                    return "it has ended"
                text = await self._answer(HANDLING)
        if text:
            return shown(text)
        why = _STATES.get(
            processes.state(pid) or "", "it may be starting, or have closed its files"
        )
        return f"no answer within {TIMEOUT + HANDLING:.0f} s: {why}"

    async def _answer(self, seconds: float) -> str:
        """Read the answer until nothing more comes."""
        until = time.monotonic() + seconds
        found = b""
        while time.monotonic() < until:
            await asyncio.sleep(QUIET)
            if self._is_closed:
                break
            before, found = found, os.pread(self.descriptor, LIMIT, 0)
            if found and found == before:
                break
        return found.decode(errors="replace")

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            os.close(self.descriptor)


def shown(text: str) -> str:
    """The threads that run code of the user, each from where it does."""
    threads = []
    for block in re.split(r"\n(?=\S)", text.strip("\n")):
        head, *frames = block.strip("\n").split("\n")
        kept = []
        for frame in frames:
            file = _FILE.match(frame)
            if file is not None and file[1].startswith(OWN):
                break
            kept.append(frame)
        while kept and _LOOP.search(kept[-1]):
            kept.pop()
        if kept:
            threads.append("\n".join([head, *kept]).rstrip("\n"))
    return "\n\n".join(threads) or "no thread runs your code"
