"""Running a program whose output is wanted line by line, and ending it with all that it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence

from kubetorch.lib import processes, spawning

#: Bytes of a line; a longer one is cut into several.
LINE_LIMIT = 16 * 1024
_READ = 64 * 1024

OnLine = Callable[[str], None]


class Output:
    """Reads lines from a pipe until its last writer has closed it.

    Args:
        descriptor: The pipe; it is closed at its end.
        on_line: Told of each line, in the running event loop.
    """

    def __init__(self, descriptor: int, on_line: OnLine) -> None:
        self._loop = asyncio.get_running_loop()
        self._descriptor = descriptor
        self._on_line = on_line
        self._rest = b""
        os.set_blocking(descriptor, False)
        self._loop.add_reader(descriptor, self._read)

    def drain(self) -> None:
        """Read what has been written by now."""
        while self._descriptor >= 0 and self._read():
            pass

    def close(self) -> None:
        """Read no more."""
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
            if self._rest:
                self._tell(self._rest)

    def _read(self) -> bool:
        """Read once; whether there may be more."""
        try:
            data = os.read(self._descriptor, _READ)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._tell(line)
        while len(self._rest) > LINE_LIMIT:
            self._tell(self._rest[:LINE_LIMIT])
            self._rest = self._rest[LINE_LIMIT:]
        return True

    def _tell(self, line: bytes) -> None:
        # A progress bar writes its states over each other; the last one is what is seen.
        text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        self._on_line(text)


async def run(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    folder: str,
    on_line: OnLine,
    on_error_line: OnLine | None = None,
) -> int:
    """Run a program to its end; its exit status, as `subprocess` counts.

    What it leaves behind in the background lives on, and its lines are still told. If this is
    cancelled, its session is killed.

    Args:
        command: Absolute path of the program, and its arguments.
        environ: All of its environment.
        folder: Its working directory.
        on_line: Told of each line that it writes.
        on_error_line: Told of those on standard error instead.

    Raises:
        OSError: It cannot be started.
    """
    pipes = [os.pipe()] if on_error_line is None else [os.pipe(), os.pipe()]
    readers = [Output(pipes[0][0], on_line)]
    if on_error_line is not None:
        readers.append(Output(pipes[1][0], on_error_line))
    try:
        pid = spawning.spawn(
            ("/bin/sh", "-c", 'cd "$0" && exec "$@"', folder, *command),
            environ,
            output=pipes[0][1],
            errors=pipes[-1][1],
        )
    except BaseException:
        for reader in readers:
            reader.close()
        raise
    finally:
        for _, writer in pipes:
            os.close(writer)
    ended = asyncio.Event()
    watch = processes.ExitWatch(pid, ended.set)
    try:
        await ended.wait()
    except BaseException:
        watch.close()
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
        processes.reap(pid)
        raise
    finally:
        for reader in readers:
            reader.drain()
    status = processes.exit_status(pid)
    return 1 if status is None else status
