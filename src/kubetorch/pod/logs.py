"""The pod's log: every line that a worker wrote, on disk, bounded, for `kt logs`.

    <root>/log/current.jsonl     what is written now
    <root>/log/previous.jsonl    the segment before it, replaced when the current one is full

A line is one JSON object. Both segments survive the agent, so the log of a pod outlives its
processes. A full disk costs lines, never a call: they are counted and dropped. Lines also go to the
agent's standard output; where that is a file, it is bounded as a segment is.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

#: Bytes of one segment; there are two.
SEGMENT_BYTES = 8 * 1024 * 1024
#: Lines that wait for one slow follower; the oldest go first.
FOLLOWER_LINES = 10_000
#: Characters of one line's text that are kept.
TEXT_LIMIT = 64 * 1024
#: Lines that a follower gets in one piece.
_PIECE_LINES = 500
#: Bytes that are read first to find the last lines.
_BLOCK = 64 * 1024
_encoder = msgspec.json.Encoder()


class LogLine(msgspec.Struct, frozen=True, omit_defaults=True):
    time: float
    pod: str
    text: str
    source: str = "stdout"
    level: str | None = None
    request: str | None = None
    generation: int = 0
    rank: int | None = None


class PodLog:
    """Writes the log, and lets readers follow it."""

    def __init__(
        self,
        folder: Path,
        *,
        stdout: int | None,
        output: Path | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._current = folder / "current.jsonl"
        self._previous = folder / "previous.jsonl"
        self._stdout = stdout
        # The file that it is.
        self._output = output
        self._segment_bytes = segment_bytes
        self._followers: set[Follower] = set()
        self._pending: list[bytes] = []
        self._pending_text: list[bytes] = []
        self._is_scheduled = False
        self._descriptor: int | None = None
        self._size = 0
        #: Lines that could not be written.
        self.dropped = 0

    def write(self, line: LogLine, *, echo: bool = True) -> None:
        """Add a line. Lines of one turn of the event loop are written together."""
        if len(line.text) > TEXT_LIMIT:
            line = msgspec.structs.replace(line, text=f"{line.text[:TEXT_LIMIT]}…")
        encoded = _encoder.encode(line) + b"\n"
        self._pending.append(encoded)
        if echo and self._stdout is not None:
            self._pending_text.append(line.text.encode(errors="replace") + b"\n")
        for follower in self._followers:
            follower.put(encoded)
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        self._is_scheduled = False
        lines, self._pending = self._pending, []
        if lines and not self._append(b"".join(lines)):
            self.dropped += len(lines)
        if self._stdout is not None and self._pending_text:
            text, self._pending_text = b"".join(self._pending_text), []
            try:
                os.write(self._stdout, text)
                if self._output is not None:
                    self._bound(self._stdout, self._output)
            except OSError:  # whoever collects this output is gone, or its disk is full
                self.dropped += 1

    def _bound(self, stdout: int, output: Path) -> None:
        if os.fstat(stdout).st_size > self._segment_bytes:
            # Emptied and not renamed: other processes of the pod write to it too.
            shutil.copyfile(output, output.with_name(f"{output.name}.1"))
            os.ftruncate(stdout, 0)

    def close(self) -> None:
        """Write what waits and end all followers."""
        self.flush()
        for follower in list(self._followers):
            follower.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def tail(self, count: int) -> list[bytes]:
        """The last lines that were written, each as JSON with its line end. Reads the disk."""
        lines = _last_lines(self._current, count)
        if len(lines) < count:
            lines = _last_lines(self._previous, count - len(lines)) + lines
        return lines

    def follow(self, tail: int) -> Follower:
        """The last lines and then each new one, until the log or the follower is closed."""
        # Nothing is awaited in between: no line is missed, and none comes twice.
        self.flush()
        follower = Follower(self.tail(tail), self._followers.discard)
        self._followers.add(follower)
        return follower

    def _append(self, data: bytes) -> bool:
        try:
            if self._descriptor is None or self._size + len(data) > self._segment_bytes:
                self._open()
            assert self._descriptor is not None
            written = os.write(self._descriptor, data)
            self._size += written
            if written < len(data):  # the disk is full: the cut line must not spoil the next one
                os.ftruncate(self._descriptor, self._size - written)
                self._size -= written
                return False
        except OSError:
            return False
        return True

    def _open(self) -> None:
        """Open the current segment for appending; a full one becomes the previous one."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            self._current.replace(self._previous)
        self._current.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(self._current, flags, 0o600)
        self._size = os.fstat(self._descriptor).st_size
        if self._size and os.pread(self._descriptor, 1, self._size - 1) != b"\n":
            self._size += os.write(self._descriptor, b"\n")


class Follower:
    """Lines on their way to one reader, who iterates over pieces of several lines."""

    def __init__(self, lines: list[bytes], on_close: Callable[[Follower], None]) -> None:
        self._before = deque(lines)
        self._lines: deque[bytes] = deque(maxlen=FOLLOWER_LINES)
        self._on_close = on_close
        self._event = asyncio.Event()
        self._is_closed = False

    def put(self, line: bytes) -> None:
        self._lines.append(line)
        self._event.set()

    def close(self) -> None:
        """There will be no more lines, or nobody who reads them."""
        self._is_closed = True
        self._event.set()
        self._on_close(self)

    def __aiter__(self) -> Follower:
        return self

    async def __anext__(self) -> bytes:
        while not self._before and not self._lines:
            if self._is_closed:
                raise StopAsyncIteration
            self._event.clear()
            await self._event.wait()
        source = self._before or self._lines
        return b"".join(source.popleft() for _ in range(min(len(source), _PIECE_LINES)))


def _last_lines(path: Path, count: int) -> list[bytes]:
    """The last whole lines of a segment; it is read from its end."""
    length = _BLOCK
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            while True:
                begin = max(size - length, 0)
                file.seek(begin)
                lines = file.read(size - begin).splitlines(keepends=True)
                if begin == 0 or len(lines) > count:
                    break
                length *= 4
    except OSError:
        return []
    if begin:
        del lines[0]
    # What a process that was killed wrote last may be cut.
    whole = [line for line in lines if line.startswith(b"{") and line.endswith(b"}\n")]
    return whole[-count:] if count else []


class AgentLines(logging.Handler):
    """Puts the agent's own lines into the pod's log too."""

    def __init__(self, log: PodLog, pod_name: str, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._log = log
        self._pod_name = pod_name
        self._loop = loop

    def emit(self, record: logging.LogRecord) -> None:
        """Called in any thread."""
        line = LogLine(
            record.created, self._pod_name, record.getMessage(), "agent", record.levelname
        )
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(functools.partial(self._log.write, line, echo=False))
