"""The terminal of a debugger in the program of the user: a connection to the agent of the pod."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from kubetorch.pod.user_process.tuning import LIMITS
from kubetorch.wire import debugger as wire
from kubetorch.wire import tuning as wire_tuning


class StatementOutput:
    """`sys.stdout` while statements of debuggers run: a terminal in their threads alone."""

    def __init__(self) -> None:
        self._terminals: dict[int, RemoteTerminal] = {}
        self._program_output: Any = sys.stdout
        self._changing = threading.Lock()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # as of the stream
        return getattr(self._terminals.get(threading.get_ident(), self._program_output), name)

    @contextlib.contextmanager
    def to(self, terminal: RemoteTerminal) -> Iterator[None]:
        """Have this thread print to a terminal."""
        thread = threading.get_ident()
        this: Any = self
        outer_terminal = self._terminals.get(thread)
        with self._changing:
            if sys.stdout is not this:
                self._program_output = sys.stdout
            self._terminals[thread] = terminal
            sys.stdout = this
        try:
            yield
        finally:
            with self._changing:
                del self._terminals[thread]
                if outer_terminal is not None:
                    self._terminals[thread] = outer_terminal
                if not self._terminals and sys.stdout is this:
                    sys.stdout = self._program_output


STATEMENT_OUTPUT = StatementOutput()
_MESSAGE_BYTES = wire_tuning.LIMITS.debug_message_bytes


class RemoteTerminal:
    """The standard streams of a debugger; a terminal may be attached to them."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._messages = wire.Messages()
        self._received: list[tuple[int, bytes]] = []
        # Text behind the last end of a line: the prompt, if a line is read next.
        self._unfinished = ""
        self.completions: Callable[[str, str, int, int], list[str]] = lambda *_: []
        # Several threads send while a debug adapter is attached.
        self._sending = threading.Lock()
        #: `debugger.MODES` of the terminal that is attached; empty while none is.
        self.mode = ""
        self.is_over = False

    # -------------------------------------------------------------------------------- messages

    def send(self, kind: int, content: Any = b"") -> None:  # noqa: ANN401  # as `wire.pack`
        try:
            with self._sending:
                self._connection.sendall(wire.pack(kind, content))
        except OSError:
            self.is_over = True

    def receive(self) -> tuple[int, bytes]:
        """Wait for the next message; LEFT when the agent is gone."""
        while not self._received:
            try:
                data = self._connection.recv(_MESSAGE_BYTES)
            except OSError:
                data = b""
            if not data:
                self.is_over = True
                return wire.LEFT, b""
            self._received += self._messages.feed(data)
        return self._received.pop(0)

    def wait_for_attachment(self, where: str) -> bool:
        """Report a stop, and wait until a terminal is attached; false if none comes."""
        self.send(wire.STOPPED, {"where": where})
        while not self.mode and not self.is_over:
            kind, content = self.receive()
            if kind == wire.ATTACHED:
                self.mode = str(wire.decode(content).get("mode") or "pdb")
            elif kind == wire.LEFT:
                self.is_over = True
        return not self.is_over

    def wake(self) -> None:
        """End a wait of another thread, and the session."""
        self.is_over = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self, reason: str = "") -> None:
        self.send(wire.ENDED, reason)
        self.abandon()

    def abandon(self) -> None:
        """Close this process's end without a word: its parent has the session."""
        self.is_over = True
        self._connection.close()

    # --------------------------------------------------------------------------------- streams

    def write(self, text: str) -> int:
        lines, end, rest = text.rpartition("\n")
        if end:
            self._send_text(self._unfinished + lines + end)
            self._unfinished = rest
        else:
            self._unfinished += text
        return len(text)

    def _send_text(self, text: str) -> None:
        data = text.encode(self.encoding, self.errors)
        for begin in range(0, len(data), _MESSAGE_BYTES):
            if self.is_over:
                return
            self.send(wire.OUTPUT, data[begin : begin + _MESSAGE_BYTES])

    def readline(self) -> str:
        """The next line of the terminal; empty when the debugger is left."""
        prompt, self._unfinished = self._unfinished, ""
        if len(prompt) > LIMITS.debugger_prompt_characters:  # output without an end of line
            self._send_text(f"{prompt}\n")
            prompt = ""
        self.send(wire.PROMPT, prompt.encode(self.encoding, self.errors))
        while not self.is_over:
            kind, content = self.receive()
            if kind == wire.LINE:
                return content.decode(errors="surrogateescape").rstrip("\r\n") + "\n"
            if kind == wire.COMPLETE:
                self._complete(wire.decode(content))
            elif kind in (wire.QUIT, wire.LEFT):
                break
        return ""

    def _complete(self, question: dict[str, Any]) -> None:
        try:
            names = self.completions(
                str(question["text"]), str(question["line"]), question["begin"], question["end"]
            )
        except Exception:  # noqa: BLE001  # completing runs the user's `__getattr__`
            names = []
        self.send(wire.COMPLETIONS, [str(name) for name in names[: LIMITS.debugger_completions]])

    def flush(self) -> None:
        """Nothing waits but the prompt."""

    def isatty(self) -> bool:
        return False
