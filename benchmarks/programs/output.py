"""What a program sees on its standard output, with the moment at which each line came."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

# 60 s: nothing that is measured takes longer; a line that never comes ends the benchmark.
DEADLINE = 60.0


class Lines(io.TextIOBase):
    """A standard output that remembers when lines came. Any thread may write."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._partial = ""
        self._lines: list[tuple[float, str]] = []

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, text: str) -> int:
        """Take in text; a line counts as come when its end is written."""
        now = time.monotonic()
        with self._changed:
            *lines, self._partial = (self._partial + text).split("\n")
            self._lines += [(now, line) for line in lines]
            self._changed.notify_all()
        return len(text)

    def wait_for(self, text: str) -> tuple[float, str]:
        """The first line that contains `text`: its moment (`time.monotonic`), and the line."""
        with self._changed:
            moment_and_line = self._changed.wait_for(lambda: self._find(text), DEADLINE)
        if moment_and_line is None:
            raise TimeoutError(f"no line with {text!r} within {DEADLINE:.0f} s")
        return moment_and_line

    def take(self) -> list[tuple[float, str]]:
        """All lines so far; they are forgotten."""
        with self._changed:
            lines, self._lines = self._lines, []
        return lines

    def _find(self, text: str) -> tuple[float, str] | None:
        return next((entry for entry in self._lines if text in entry[1]), None)


@contextmanager
def watched() -> Iterator[Lines]:
    """Standard output goes to a `Lines`, and to standard error, which is the program's log."""
    lines = Lines()
    with redirect_stdout(lines):
        try:
            yield lines
        finally:
            for _, line in lines.take():
                print(line, file=sys.stderr)
