"""Lines of workers: read from their output pipes, and kept on the pod's disk for `kt logs`.

    <root>/log/current.jsonl     the segment that is written now
    <root>/log/previous.jsonl    the segment before it, replaced when the current one is full

A line is one JSON object. Both segments survive the agent, so the log of a pod outlives its
processes. With a full disk lines are dropped and counted, and calls go on. Lines also go to the
agent's standard output; a file of that output is bounded as a segment is.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import functools
import logging
import os
import shutil
import termios
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.pod.user_process import protocol
from kubetorch.pod.user_process.tuning import LIMITS as WORKER_LIMITS
from kubetorch.wire.frames import DebugEvent

# Writer, call, source. Bytes without a record have the writer 0.
_Key = tuple[int, int, int]
_RAW: _Key = (0, 0, protocol.STDOUT)
_READ_BYTES = 256 * 1024
#: Seconds since the epoch: the year 5138.
_LATEST = 1e11
#: Bytes that are read first to find the last lines.
_PIECE_BYTES = 64 * 1024
_encoder = msgspec.json.Encoder()


# ------------------------------------------------------------------------- lines out of a pipe


class Line(NamedTuple):
    text: str
    source: str
    level: str | None
    time: float
    call: int | None
    rank: int | None = None
    #: Another pod, of a distributed call; else this one.
    pod: str | None = None
    debug: DebugEvent | None = None


class _Unfinished:
    """The beginning of a line, of one process, call and source."""

    __slots__ = ("data", "level", "shown", "shown_at")

    def __init__(self) -> None:
        self.data = bytearray()
        self.level: str | None = None
        # The state of a progress bar that was delivered last.
        self.shown = b""
        self.shown_at = 0.0


class Assembler:
    """Puts lines together from the bytes in the pipe; see docs/design/logs.md. Pure."""

    def __init__(self, nonce: bytes, clock: Callable[[], float] = time.time) -> None:
        self._nonce = nonce
        self._clock = clock
        self._rest = b""
        self._unfinished: dict[_Key, _Unfinished] = {}
        self._latest_time = 0.0
        #: The call that bytes without a record belong to.
        self.latest: int | None = None

    def feed(self, data: bytes) -> Iterator[Line]:
        """Add bytes of the pipe; returns the lines that are whole now."""
        data = self._rest + data
        begin = 0
        while True:
            position = data.find(self._nonce, begin)
            if position < 0:
                break
            if position > begin:
                yield from self._add(_RAW, data[begin:position], self._clock())
            end = self._end_of_record(data, position)
            if end is None:
                self._rest = data[position:]
                return
            if end - position > protocol.RECORD_LIMIT:  # user code has read the nonce: it is text
                end = position + protocol.NONCE_BYTES
                yield from self._add(_RAW, data[position:end], self._clock())
            else:
                yield from self._record(data, position)
            begin = end
        keep = self._begin_of_nonce(data, begin)
        if keep > begin:
            yield from self._add(_RAW, data[begin:keep], self._clock())
        self._rest = data[keep:]

    def finish(self, call: int) -> Iterator[Line]:
        """A call ended: the lines that it left unfinished."""
        if call == self.latest:
            yield from self._end_raw()
        if self._unfinished:
            for key in [key for key in self._unfinished if key[1] == call]:
                yield from self._end(key)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._rest or self._unfinished)

    def close(self) -> Iterator[Line]:
        """Return all unfinished lines: nothing more comes."""
        yield from self._end_raw()
        for key in list(self._unfinished):
            yield from self._end(key)

    # ------------------------------------------------------------------------------- the bytes

    def _begin_of_nonce(self, data: bytes, begin: int) -> int:
        """The position at the end where a nonce may have begun, whose rest is still to come."""
        first = self._nonce[:1]
        position = data.find(first, max(begin, len(data) - protocol.NONCE_BYTES + 1))
        while position >= 0:
            if self._nonce.startswith(data[position:]):
                return position
            position = data.find(first, position + 1)
        return len(data)

    def _end_of_record(self, data: bytes, position: int) -> int | None:
        if len(data) - position < protocol.RECORD_HEADER_BYTES:
            return None
        _, _, level_length, text_length, *_ = protocol.unpack_record(data, position)
        end = position + protocol.RECORD_HEADER_BYTES + level_length + text_length
        return end if end <= len(data) or end - position > protocol.RECORD_LIMIT else None

    def _record(self, data: bytes, position: int) -> Iterator[Line]:
        source, flags, level_length, text_length, writer, call, when = protocol.unpack_record(
            data, position
        )
        if not 0 <= when < _LATEST:  # the user's own record of a message may have any
            when = self._clock()
        middle = position + protocol.RECORD_HEADER_BYTES + level_length
        header = data[position + protocol.RECORD_HEADER_BYTES : middle]
        level = header[: WORKER_LIMITS.level_name_bytes].decode(errors="replace")
        text = data[middle : middle + text_length]
        key = (writer, call, source)
        if source == protocol.LOGGER:
            is_last = bool(flags & protocol.END_OF_MESSAGE)
            yield from self._message(key, text, level, when, is_last=is_last)
        elif source in protocol.SOURCES:
            yield from self._add(key, text, when, level or None)

    # ------------------------------------------------------------------------------- the lines

    def _message(
        self, key: _Key, text: bytes, level: str, when: float, *, is_last: bool
    ) -> Iterator[Line]:
        if not is_last or key in self._unfinished:
            unfinished = self._unfinished.setdefault(key, _Unfinished())
            unfinished.data += text
            if not is_last and len(unfinished.data) < LIMITS.line_bytes:
                return
            text = bytes(self._unfinished.pop(key).data)
        yield self._line(key, text, when, level)

    def _add(self, key: _Key, data: bytes, when: float, level: str | None = None) -> Iterator[Line]:
        unfinished = self._unfinished.get(key)
        if unfinished is None:
            if b"\r" not in data and data.endswith(b"\n") and len(data) < LIMITS.line_bytes:
                for text in data[:-1].split(b"\n"):
                    yield self._line(key, text, when, level)
                return
            unfinished = self._unfinished[key] = _Unfinished()
        unfinished.data += data
        unfinished.level = level
        buffer = unfinished.data
        while buffer:
            end = buffer.find(b"\n", 0, LIMITS.line_bytes + 1)
            if end < 0 and len(buffer) <= LIMITS.line_bytes:
                break
            cut = end if end >= 0 else _character_end(buffer, LIMITS.line_bytes)
            text = _visible(bytes(buffer[:cut]))
            if not text or text != unfinished.shown:
                yield self._line(key, text, when, level)
            unfinished.shown = b""
            del buffer[: cut + (end >= 0)]
        if b"\r" in buffer:
            yield from self._bar(key, unfinished, when)
        if not buffer:
            del self._unfinished[key]
        elif len(self._unfinished) > LIMITS.unfinished_lines:
            yield from self._end(next(iter(self._unfinished)))

    def _bar(self, key: _Key, unfinished: _Unfinished, when: float) -> Iterator[Line]:
        """Show a line that is written over and over, now and then."""
        text = _visible(bytes(unfinished.data))
        # Text that was written over is dropped.
        del unfinished.data[: unfinished.data.rfind(text)]
        now = self._clock()
        if (
            text
            and text != unfinished.shown
            and now - unfinished.shown_at >= TIMING.progress_bar_interval_seconds
        ):
            unfinished.shown, unfinished.shown_at = text, now
            yield self._line(key, text, when, unfinished.level)

    def _end_raw(self) -> Iterator[Line]:
        if self._rest:
            rest, self._rest = self._rest, b""
            yield from self._add(_RAW, rest, self._clock())
        yield from self._end(_RAW)

    def _end(self, key: _Key) -> Iterator[Line]:
        unfinished = self._unfinished.pop(key, None)
        if unfinished is None:
            return
        text = _visible(bytes(unfinished.data))
        if text and text != unfinished.shown:
            yield self._line(key, text, self._clock(), unfinished.level)

    def _line(self, key: _Key, text: bytes, when: float, level: str | None = None) -> Line:
        _, call, source = key
        # A record has the time of its writing, raw bytes only the time of their reading: no time
        # goes back, so that lines sorted by time stay in the order of the pipe.
        self._latest_time = when = max(self._latest_time, when)
        return Line(
            text.decode(errors="replace"),
            protocol.SOURCES[source],
            level,
            when,
            call or self.latest,
        )


def _visible(text: bytes) -> bytes:
    """The text that a terminal would show of a line with carriage returns."""
    if b"\r" not in text:
        return text
    return next((part for part in reversed(text.split(b"\r")) if part), b"")


def _character_end(data: bytearray, limit: int) -> int:
    """The last end of a UTF-8 character that is not behind `limit`."""
    for end in range(limit, limit - 4, -1):
        if data[end] & 0xC0 != 0x80:
            return end
    return limit


class LogPipe:
    """The agent's end of a worker's pipe, which the event loop reads."""

    def __init__(self, descriptor: int, nonce: bytes, on_line: Callable[[Line], None]) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._assembler = Assembler(nonce)
        self._on_line = on_line
        self._available = array.array("i", [0])
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(descriptor, self._read)

    def attribute_to(self, call: int | None) -> None:
        """Attribute output that names no call to this call from now on."""
        self._assembler.latest = call

    def _read(self) -> None:
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._feed(data)
        else:
            self._loop.remove_reader(self._descriptor)

    def drain(self) -> None:
        """Read the bytes that are in the pipe at this moment."""
        fcntl.ioctl(self._descriptor, termios.FIONREAD, self._available)
        remaining_bytes = self._available[0]
        while remaining_bytes > 0:
            try:
                data = os.read(self._descriptor, min(remaining_bytes, _READ_BYTES))
            except OSError:
                return
            if not data:
                return
            remaining_bytes -= len(data)
            self._feed(data)

    def finish(self, call: int) -> None:
        """Deliver the unfinished lines of a call that ended."""
        if self._assembler.has_unfinished:
            for line in self._assembler.finish(call):
                self._on_line(line)

    def close(self) -> None:
        if self._descriptor < 0:
            return
        self._loop.remove_reader(self._descriptor)
        with contextlib.suppress(OSError):
            self.drain()
        for line in self._assembler.close():
            self._on_line(line)
        os.close(self._descriptor)
        self._descriptor = -1

    def _feed(self, data: bytes) -> None:
        for line in self._assembler.feed(data):
            self._on_line(line)


# ------------------------------------------------------------------------------ the log on disk


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
    def __init__(
        self,
        folder: Path,
        *,
        stdout: int | None,
        output: Path | None = None,
        segment_bytes: int = LIMITS.log_segment_bytes,
    ) -> None:
        self._current = folder / "current.jsonl"
        self._previous = folder / "previous.jsonl"
        self._stdout = stdout
        # The file behind the agent's standard output, if it is one.
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
        if len(line.text) > LIMITS.log_text_characters:
            line = msgspec.structs.replace(line, text=f"{line.text[: LIMITS.log_text_characters]}…")
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
            except OSError:  # the reader of this output is gone, or its disk is full
                self.dropped += 1

    def _bound(self, stdout: int, output: Path) -> None:
        if os.fstat(stdout).st_size > self._segment_bytes:
            # Emptied and not renamed: other processes of the pod write to it too.
            shutil.copyfile(output, output.with_name(f"{output.name}.1"))
            os.ftruncate(stdout, 0)

    def close(self) -> None:
        """Write the waiting lines and end all followers."""
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
        self._lines: deque[bytes] = deque(maxlen=LIMITS.follower_lines)
        self._on_close = on_close
        self._event = asyncio.Event()
        self._is_closed = False

    def put(self, line: bytes) -> None:
        self._lines.append(line)
        self._event.set()

    def close(self) -> None:
        """End the lines: the log is closed, or its reader is gone."""
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
        return b"".join(
            source.popleft() for _ in range(min(len(source), LIMITS.follower_piece_lines))
        )


def _last_lines(path: Path, count: int) -> list[bytes]:
    """The last whole lines of a segment; it is read from its end."""
    length = _PIECE_BYTES
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
    # The last line of a killed process may be cut.
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
        try:
            text = self.format(record)  # with the traceback of an exception
        except Exception:  # noqa: BLE001  # as all handlers of logging do
            self.handleError(record)
            return
        line = LogLine(record.created, self._pod_name, text, "agent", record.levelname)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(functools.partial(self._log.write, line, echo=False))
