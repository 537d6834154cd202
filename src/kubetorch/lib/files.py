"""Files that are whole or absent, whenever the process is killed.

Locks between processes (`flock`), waited for with a deadline.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import sys
import threading
from pathlib import Path


def write_atomically(
    path: Path, data: bytes, *, mode: int = 0o600, is_synced: bool = False
) -> None:
    """Put `data` into the file at once: readers see the old content or the new one.

    With `is_synced` this holds for a crash of the machine, too.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_tree(folder: Path) -> None:
    """Remove a folder, also if folders in it have no write bits; errors are ignored."""
    if os.geteuid():  # root needs none
        for parent, _, _ in os.walk(folder):
            with contextlib.suppress(OSError):
                os.chmod(parent, 0o700)  # noqa: PTH101  # thousands of folders
    shutil.rmtree(folder, ignore_errors=True)


def tail(path: Path, lines: int, *, limit_bytes: int = 64 * 1024) -> list[str]:
    """The last lines of a text file, as far as they lie in its last `limit_bytes`."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit_bytes))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.splitlines()[-lines:]


def has_writer(descriptor: int) -> bool:
    """Whether a program may be writing to a file: it has the file open for that, or mapped.

    Writes to a mapped file move no time of it while the page is not on disk yet. The kernel gives
    no lease for reading then (Linux, fcntl(2)). False where that cannot be known: for the file of
    another user, on other systems and some file systems.
    """
    if sys.platform != "linux":
        return False
    try:
        # The signal to who holds a lease that somebody opens the file: this one is ignored.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


class FileLock:
    """The lock of a file or folder.

    `flock` has no time-out: where another process holds the lock, a thread waits for it. After a
    time-out the thread goes on waiting, and releases the lock when it gets it. The lock ends with
    the process.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
        self._descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
        self._mutex = threading.Lock()
        self._is_acquired = threading.Event()
        self._has_waiter = False
        self._is_closed = False

    def get_at_once(self) -> bool:
        """Take the lock if it is free; false if it is not."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def get(self, timeout: float) -> bool:
        """Wait for the lock; false if it stays taken for so many seconds."""
        if self.get_at_once():
            return True
        self._has_waiter = True
        threading.Thread(target=self._wait, name="kubetorch-lock", daemon=True).start()
        return self._is_acquired.wait(timeout)

    def close(self) -> None:
        """Release the lock, or stop waiting for it."""
        with self._mutex:
            self._is_closed = True
            if not self._has_waiter:
                os.close(self._descriptor)

    def _wait(self) -> None:
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        with self._mutex:
            self._has_waiter = False
            if self._is_closed:
                os.close(self._descriptor)
        self._is_acquired.set()
