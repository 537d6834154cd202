"""Turns prints and logs of user code into records; file descriptors stay the user's to change.

`sys.stdout` and `sys.stderr` are replaced by text files that collect whole lines and write each as
a record that names the call. They respect redirection of descriptors 1 and 2: while one of them is
not the captured pipe, what is printed goes there as plain bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import os
import select
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, TextIO, cast

from kubetorch.pod.user_process import protocol
from kubetorch.pod.user_process.current_call import current
from kubetorch.pod.user_process.tuning import LIMITS

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

#: Levels of printed lines in programs whose messages are written by their own handlers.
_LEVELS = {protocol.STDOUT: b"INFO", protocol.STDERR: b"ERROR"}
#: `_IOLBF` of the C library: each line is written when it ends.
_LINE_BUFFERED: Final = 1
_STREAM: Final = "__stdoutp" if sys.platform == "darwin" else "stdout"


class COutput:
    """`stdout` of the C library, if this interpreter shows its symbols; written line by line.

    The library would collect whole blocks for a pipe, and `os._exit`, with which a worker ends,
    writes no collected block. With line buffering every whole line is in the pipe even when the
    process crashes, and an unfinished line is written when its call ends.
    """

    def __init__(self) -> None:
        self._flush: Callable[[ctypes.c_void_p | None], int] = lambda _: 0
        self._stream = ctypes.c_void_p()
        with contextlib.suppress(OSError, ValueError, AttributeError):
            library = ctypes.CDLL(None)
            self._stream = ctypes.c_void_p.in_dll(library, _STREAM)
            library.fflush.argtypes = (ctypes.c_void_p,)
            library.setvbuf.argtypes = (
                ctypes.c_void_p,
                ctypes.c_void_p,
                ctypes.c_int,
                ctypes.c_size_t,
            )
            self._flush = library.fflush
            self.flush()
            library.setvbuf(self._stream, None, _LINE_BUFFERED, 0)
            # Else a child would write it once more.
            os.register_at_fork(before=self.flush)

    def flush(self) -> None:
        """Write the unfinished line of `stdout`."""
        # Not all streams: a stream that another thread reads is locked until input comes.
        self._flush(self._stream)

    def flush_all(self) -> None:
        """Write the buffers of all streams, those of files too, as at the end of a program."""
        self.flush()
        self._flush(None)


class OutputPipe:
    """The pipe to the agent, and the unfinished lines that wait here."""

    def __init__(self, descriptor: int, nonce: bytes, c_output: COutput) -> None:
        #: The output of the C library, which goes into the pipe too.
        self.c_output = c_output
        self._descriptor = descriptor
        self._nonce = nonce
        self._identity = _identity(descriptor)
        self._writer = os.getpid()
        # Re-entrant: a destructor that prints may run at any allocation.
        self._lock = threading.RLock()
        self._pending: dict[tuple[int, int], bytes] = {}
        os.register_at_fork(after_in_child=self._after_fork)

    def write(self, source: int, data: bytes) -> None:
        """Write the whole lines of a piece of a stream; the rest waits for the next piece."""
        number = _current_number()
        key = (number, source)
        with self._lock:
            pending = self._pending.pop(key, b"")
            end = data.rfind(b"\n") + 1
            if len(pending) + len(data) - end > LIMITS.unfinished_line_bytes or b"\r" in data:
                end = len(data)
            if end == 0:
                self._pending[key] = pending + data
                return
            if end < len(data):
                self._pending[key] = data[end:]
            self._emit(source, number, pending + data[:end])

    def flush(self, source: int) -> None:
        """Write the unfinished line of this call."""
        self._flush(source, _current_number())

    def finish(self, number: int) -> None:
        """Write the unfinished lines of a call that ended."""
        self.c_output.flush()
        if self._pending:
            self._flush(protocol.STDOUT, number)
            self._flush(protocol.STDERR, number)

    def _flush(self, source: int, number: int) -> None:
        with self._lock:
            pending = self._pending.pop((number, source), b"")
            if pending:
                self._emit(source, number, pending)

    def log(self, level: str, text: str, created: float) -> None:
        data = text.encode(errors="backslashreplace")
        name = level.encode(errors="replace")[: LIMITS.level_name_bytes]
        with self._lock:
            self._write_records(protocol.LOGGER, _current_number(), data, name, created)

    def _emit(self, source: int, number: int, data: bytes) -> None:
        redirected = self._redirected_descriptor(source)
        if redirected is not None:
            _write_all(redirected, data)
        else:
            level = _LEVELS[source] if _has_handlers() else b""
            self._write_records(source, number, data, level, time.time())

    def _redirected_descriptor(self, source: int) -> int | None:
        """Descriptor 1 or 2, if user code has redirected it away from the pipe."""
        try:
            return None if _identity(source) == self._identity else source
        except OSError:  # closed
            return None

    def _write_records(
        self, source: int, number: int, data: bytes, level: bytes, created: float
    ) -> None:
        room = protocol.RECORD_LIMIT - protocol.RECORD_HEADER_BYTES - len(level)
        origin = protocol.Origin(self._nonce, self._writer, number, source, level)
        view = memoryview(data)
        for begin in range(0, max(len(view), 1), room):
            is_last = source == protocol.LOGGER and begin + room >= len(view)
            flags = protocol.END_OF_MESSAGE if is_last else 0
            record = protocol.pack_record(
                origin, view[begin : begin + room], time=created, flags=flags
            )
            _write_all(self._descriptor, record)

    def _after_fork(self) -> None:
        self._writer = os.getpid()
        self._lock = threading.RLock()
        self._pending.clear()  # the parent writes it


def _current_number() -> int:
    call = current.get()
    return 0 if call is None else call.number


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes, also when a child made the shared pipe non-blocking."""
    done = 0
    while done < len(data):
        try:
            done += os.write(descriptor, data[done:] if done else data)
        except BlockingIOError:
            select.select([], [descriptor], [])
        except OSError:  # the reader is gone: output is lost, the program goes on
            return


class _Stream(io.IOBase):
    """The base of a captured stream's text and bytes."""

    def __init__(self, pipe: OutputPipe, source: int) -> None:
        self._pipe = pipe
        self._source = source
        self.name = f"<{protocol.SOURCES[source]}>"

    def flush(self) -> None:
        self._pipe.flush(self._source)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._source

    def isatty(self) -> bool:
        return False

    def close(self) -> None:
        """Flush alone: prints must go on to arrive after a wrapper of the stream is collected."""
        self.flush()


class BinaryStream(_Stream, io.BufferedIOBase):
    """`sys.stdout.buffer`."""

    mode = "wb"

    def write(self, data: ReadableBuffer, /) -> int:
        copy = bytes(data)
        self._pipe.write(self._source, copy)
        return len(copy)

    @property
    def raw(self) -> BinaryStream:
        """The stream itself: it has no buffer of its own."""
        return self


class TextStream(_Stream, io.TextIOBase):
    """`sys.stdout` and `sys.stderr`."""

    mode = "w"
    line_buffering = True
    write_through = False
    newlines = None
    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, pipe: OutputPipe, source: int) -> None:
        super().__init__(pipe, source)
        #: The same stream for bytes.
        self.buffer = BinaryStream(pipe, source)

    def write(self, text: str, /) -> int:
        self._pipe.write(self._source, text.encode("utf-8", self.errors))
        if self.write_through:
            self.flush()
        return len(text)

    def writelines(self, lines: Iterable[str], /) -> None:  # type: ignore[override]
        for line in lines:
            self.write(line)

    def reconfigure(
        self,
        *,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        line_buffering: bool | None = None,
        write_through: bool | None = None,
    ) -> None:
        """As of `io.TextIOWrapper`. Lines are always written at once, and always as UTF-8."""
        encoding_name = (encoding or "utf-8").lower().replace("_", "-")
        if encoding_name not in ("utf-8", "utf8"):
            warnings.warn(f"output is UTF-8; {encoding} is not used", stacklevel=2)
        if newline not in (None, "", "\n"):
            warnings.warn("lines end in \\n; newline is not used", stacklevel=2)
        self.errors = errors or self.errors
        if write_through is not None:
            self.write_through = write_through
        self.flush()


class UnhandledRecords(logging.Handler):
    """Handles messages for which the program has no handler, as records with their level."""

    def __init__(self, pipe: OutputPipe, level: int) -> None:
        super().__init__(level)
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:  # noqa: BLE001  # the user's arguments may not fit the message
            self.handleError(record)
            return
        self._pipe.log(record.levelname, text, record.created)


class _Levels:
    """Shows messages from `lowest` on of loggers that the program has not configured.

    The root logger has no handler of ours and its usual level, so that what a program configures
    has its usual effect. Only loggers without any handler, and without a level that was set, have
    another level.
    """

    def __init__(self, lowest: int) -> None:
        self._lowest = lowest
        self._usual = logging.root.level
        self._is_set = False

    def install(self) -> None:
        usual = logging.Logger.getEffectiveLevel
        set_level, add = logging.Logger.setLevel, logging.Logger.addHandler
        remove = logging.Logger.removeHandler

        def get_effective_level(logger: logging.Logger) -> int:
            return self._lowest if self._is_unset(logger) else usual(logger)

        def set_level_of(logger: logging.Logger, level: int | str) -> None:
            self._is_set |= logger is logging.root
            set_level(logger, level)

        # Setting a level makes loggers forget which levels they have found to be enabled.
        def add_handler(logger: logging.Logger, handler: logging.Handler) -> None:
            add(logger, handler)
            set_level(logger, logger.level)

        def remove_handler(logger: logging.Logger, handler: logging.Handler) -> None:
            remove(logger, handler)
            set_level(logger, logger.level)

        for name, function in (
            ("getEffectiveLevel", get_effective_level),
            ("setLevel", set_level_of),
            ("addHandler", add_handler),
            ("removeHandler", remove_handler),
        ):
            setattr(logging.Logger, name, function)

    def _is_unset(self, logger: logging.Logger) -> bool:
        if self._is_set or logging.root.level != self._usual or logger.hasHandlers():
            return False
        above: logging.Logger | None = logger
        while above is not None and above is not logging.root:
            if above.level:
                return False
            above = above.parent
        return True


def _has_handlers() -> bool:
    """True if the program has configured the root logger."""
    return any(not isinstance(handler, logging.NullHandler) for handler in logging.root.handlers)


def flush_streams() -> None:
    """Flush standard output and error, which user code may have replaced."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def install(pipe: OutputPipe, level: str) -> None:
    """Replace the standard streams, and handle messages that no handler of the program handles."""
    flush_streams()
    out, err = TextStream(pipe, protocol.STDOUT), TextStream(pipe, protocol.STDERR)
    sys.stdout, sys.stderr = cast("TextIO", out), cast("TextIO", err)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc,assignment]  # final
    lowest = logging.getLevelName(level.upper())
    logging.lastResort = UnhandledRecords(pipe, lowest)
    _Levels(lowest).install()
