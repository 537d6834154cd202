"""Asks a worker, which may be unable to run Python, for the stacks of its threads.

    agent ── frame DUMP ─────► worker: `faulthandler` writes a file in memory ──► agent reads it
          └─ signal `STACKS`

The worker writes while it holds the interpreter, so that no thread runs meanwhile: to read the
frames of a running thread may crash the process. A worker that does not answer is blocked, for
example by a collective that waits for another rank in C; its threads stand still, and the signal's
handler in C writes the file. No process has to read the memory of another.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import kubetorch
from kubetorch.lib import memory, processes
from kubetorch.pod import user_process
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.pod.user_process import protocol

#: Folder of the library's own frames: a thread is shown from its first frame of user code on.
LIBRARY_FOLDER = str(Path(user_process.__file__).parent) + os.sep
_STATES = {
    "D": "it waits in the kernel, such as for a device or a network file system",
    "T": "it is stopped by a signal",
    "t": "it is stopped by a debugger",
    "Z": "it has ended",
}
_FILE = re.compile(r'^  File "(.*)", line ')
#: Frames of a debugger, which the user's frames have called in a thread that has stopped.
_DEBUGGER = re.compile(
    rf'^  File "({re.escape(LIBRARY_FOLDER)}(debugger|remote_terminal)'
    rf'|{re.escape(str(Path(kubetorch.__file__).parent))}/sdk/debugger/breakpoints)\.py", '
)
#: The frame of a thread that waits until another one stops.
_STOPPING = " in _stop_thread"
#: The frame of a thread that runs, and looks whether it is the one that is to stop.
_LOOKING = " in on_collection"
#: Frames of the event loop: those below the code that it runs, and its wait.
_LOOP = re.compile(r'[/\\](asyncio[/\\](base_events|events|runners)|selectors)\.py", line ')


class StackFile:
    """The file that one worker writes its stacks to."""

    def __init__(self) -> None:
        self.descriptor = memory.unnamed_file()
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, os.O_APPEND)
        self._lock = asyncio.Lock()
        self._is_closed = False

    async def ask(self, pid: int, send: Callable[[bytes], object]) -> str:
        """The stacks of the process that `send` sends frames to, or why there are none."""
        async with self._lock:
            if self._is_closed or protocol.STACKS is None:
                return "it has ended"
            os.ftruncate(self.descriptor, 0)
            until = int((time.monotonic() + TIMING.stacks_answer_seconds) * 1000)
            send(protocol.pack(protocol.DUMP, call=until))
            text = await self._answer(TIMING.stacks_answer_seconds)
            if not text and not self._is_closed:
                try:
                    os.kill(pid, protocol.STACKS)
                except ProcessLookupError:
                    return "it has ended"
                text = await self._answer(TIMING.stacks_signal_seconds)
        if text:
            return user_stacks(text)
        why = _STATES.get(
            processes.state(pid) or "", "it may be starting, or have closed its files"
        )
        seconds = TIMING.stacks_answer_seconds + TIMING.stacks_signal_seconds
        return f"no answer within {seconds:.0f} s: {why}"

    async def _answer(self, seconds: float) -> str:
        """Read the answer until no more bytes come."""
        until = time.monotonic() + seconds
        answer = b""
        while time.monotonic() < until:
            await asyncio.sleep(TIMING.stacks_quiet_seconds)
            if self._is_closed:
                break
            previous_answer, answer = answer, os.pread(self.descriptor, LIMITS.stacks_bytes, 0)
            if answer and answer == previous_answer:
                break
        return answer.decode(errors="replace")

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            os.close(self.descriptor)


def user_stacks(text: str) -> str:
    """The threads that run user code, each from its first frame of user code on."""
    threads = []
    for block in re.split(r"\n(?=\S)", text.strip("\n")):
        head, *frames = block.strip("\n").split("\n")
        stop = max((n for n, frame in enumerate(frames, 1) if _DEBUGGER.match(frame)), default=0)
        if stop and frames[stop - 1].endswith(_STOPPING):
            continue
        is_stopped = stop > 0 and not frames[stop - 1].endswith(_LOOKING)
        user_frames = ["  stopped in a debugger"] if is_stopped else []
        for frame in frames[stop:]:
            file = _FILE.match(frame)
            if file is not None and file[1].startswith(LIBRARY_FOLDER):
                break
            user_frames.append(frame)
        while user_frames and _LOOP.search(user_frames[-1]):
            user_frames.pop()
        if user_frames:
            threads.append("\n".join([head, *user_frames]).rstrip("\n"))
    return "\n\n".join(threads) or "no thread runs your code"
