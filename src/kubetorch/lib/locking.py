"""Locks between processes (`flock`), waited for with a deadline."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from pathlib import Path


class FileLock:
    """The lock of a file or folder, that is held or waited for.

    `flock` has no time-out: where somebody holds the lock, a thread waits for it. A thread that is
    given up waits on, and lets the lock go again when it gets it. The lock ends with the process.

    Args:
        path: The file, made if there is none; or a folder.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
        self._descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
        self._mutex = threading.Lock()
        self._got = threading.Event()
        self._is_waited_for = False
        self._is_closed = False

    def get_at_once(self) -> bool:
        """Whether it could be had without waiting."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def get(self, timeout: float) -> bool:
        """Whether it could be had within so many seconds."""
        if self.get_at_once():
            return True
        self._is_waited_for = True
        threading.Thread(target=self._wait, name="kubetorch-lock", daemon=True).start()
        return self._got.wait(timeout)

    def close(self) -> None:
        """Let go of it, or stop waiting."""
        with self._mutex:
            self._is_closed = True
            if not self._is_waited_for:
                os.close(self._descriptor)

    def _wait(self) -> None:
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        with self._mutex:
            self._is_waited_for = False
            if self._is_closed:
                os.close(self._descriptor)
        self._got.set()
