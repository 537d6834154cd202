"""The progress of a put or get: a bar with rate and remaining time, and figures for programs."""

from __future__ import annotations

import threading
import time

from kubetorch.lib import terminal
from kubetorch.sdk.bars import Bar


class Progress:
    """Counts the bytes of a transfer; as a context it shows a bar, and a line at the end.

    Attributes:
        total, files: Bytes and number of all files.
        done: Bytes that are where they belong, whether they had to be moved or not.
        moved: Bytes that were sent or fetched.
        from_pods: Bytes that pods sent, as they travelled; the others came from the store.
    """

    def __init__(self, verb: str, label: str, *, is_verbose: bool = False) -> None:
        self.total = self.done = self.moved = self.from_pods = self.files = 0
        self._verb = verb
        self._is_verbose = is_verbose
        self._begun = time.monotonic()
        self._lock = threading.Lock()
        self._bar = Bar(label)

    def __enter__(self) -> Progress:
        self._bar.update(self._verb)
        self._bar.show()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._bar.hide()
        if kind is None and self._is_verbose:
            terminal.say(f"{self._bar.label}: {self.summary()}")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def summary(self) -> str:
        files = "1 file" if self.files == 1 else f"{self.files:,} files"
        from_pods = f" ({readable(self.from_pods)} from pods)" if self.from_pods else ""
        return (
            f"{files}, {readable(self.total)}, of which {readable(self.moved)} had to be moved"
            f"{from_pods}, in {self.seconds:.1f}s"
        )

    def begin(self, size: int, files: int) -> None:
        """Begin with a key, or begin again with it."""
        self.total, self.files, self.done = size, files, 0

    def add(self, size: int) -> None:
        with self._lock:
            self.done += size
        if not self.total:
            return
        rate = self.done / max(self.seconds, 1e-6)
        remaining = max(self.total - self.done, 0) / max(rate, 1.0)
        doing = f"{self._verb} {readable(self.done)} of {readable(self.total)}"
        if rate:
            doing += f", {readable(rate)}/s, {remaining:.0f}s left"
        self._bar.update(doing, self.done / self.total)

    def add_moved(self, size: int) -> None:
        with self._lock:
            self.moved += size

    def add_from_pods(self, size: int) -> None:
        with self._lock:
            self.from_pods += size


def readable(size: float) -> str:
    """A number of bytes, for people."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
