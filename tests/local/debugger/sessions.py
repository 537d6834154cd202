"""Programs for tests of debuggers, on a wide terminal: pdb redraws a line that does not fit."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Iterator, Sequence

#: Seconds that anything in these tests may take.
DEADLINE = 60.0
PROMPT = "(Pdb) "
_STEERING = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


def attempts() -> Iterator[None]:
    """Turns of a loop that tries something until it succeeds, for as long as it may take."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        yield


class TerminalProgram:
    """A program on a terminal, whose output is read as it comes."""

    def __init__(self, words: Sequence[str], *, folder: str | None = None) -> None:
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            if folder is not None:
                os.chdir(folder)
            os.environ["TERM"] = "xterm"
            os.execvp(words[0], list(words))
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 400, 0, 0))
        #: Everything that it wrote, without colours.
        self.output = ""
        self._seen = 0
        self.status: int | None = None

    def until(self, text: str) -> str:
        """Wait for a text; returns what was written up to there since the last wait."""
        return self._wait(lambda: self.output.find(text, self._seen), len(text), text)

    def _wait(self, find, length: int, text: str) -> str:
        deadline = time.monotonic() + DEADLINE
        while (position := find()) < 0:
            assert time.monotonic() < deadline, f"no {text!r} in:\n{self.output}"
            assert self._read(), f"ended without {text!r}:\n{self.output}"
        written = self.output[self._seen : position]
        self._seen = position + length
        return written

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def interrupt(self) -> None:
        """Type Ctrl-C at a prompt, again after each second in which the program writes nothing.

        A signal that comes after a prompt was written, and before readline waits for a key, is lost
        until the next key.
        """
        deadline = time.monotonic() + DEADLINE
        while self._read_all() and time.monotonic() < deadline:
            self.type("\x03")
            written = len(self.output)
            self._read()
            if len(self.output) > written:
                return

    def command(self, text: str) -> str:
        """Type a command at the prompt, and wait for the next prompt; returns the answer."""
        self.type(f"{text}\n")
        self.until(f"{text}\n")
        return self.until(PROMPT)

    def complete(self, beginning: str, rest: str) -> None:
        """Type the beginning of a line, and Tab until the rest is there.

        A completion that takes long is given up: the terminal rings, and the next Tab asks again.
        """
        self.type(beginning)
        for _ in attempts():
            self.type("\t")
            self._read_all()
            if beginning + rest in self.output.replace("\a", ""):
                return
        raise AssertionError(f"no {rest!r} after {beginning!r} in:\n{self.output}")

    def end(self) -> str:
        """Wait for the end of the program; returns all that it wrote."""
        deadline = time.monotonic() + DEADLINE
        while self._read():
            assert time.monotonic() < deadline, f"it does not end:\n{self.output}"
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.output

    def kill(self) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.end()

    def close(self) -> None:
        self.kill()
        os.close(self._terminal)

    def _read_all(self) -> bool:
        """Read what the program has written so far, its colours too; false at its end."""
        while select.select([self._terminal], [], [], 0.1)[0]:
            if not self._read():
                return False
        return True

    def _read(self) -> bool:
        ready, _, _ = select.select([self._terminal], [], [], 1.0)
        if not ready:
            return True
        try:
            data = os.read(self._terminal, 65536)
        except OSError:  # its end of the terminal is closed
            data = b""
        self.output += _STEERING.sub("", data.decode(errors="replace"))
        return bool(data)
