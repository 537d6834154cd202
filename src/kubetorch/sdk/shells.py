"""The terminal's end of a shell in a pod."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import termios
import tty
from collections.abc import Iterator

from kubetorch.errors import AgentDiedError
from kubetorch.lib import upgrading, websocket
from kubetorch.lib.connections import Connection
from kubetorch.sdk import standard_input
from kubetorch.sdk.session import Session
from kubetorch.sdk.streams import dial
from kubetorch.wire import failures, messages, routes, shells
from kubetorch.wire.messages import PodView, WorkloadView
from kubetorch.wire.shells import ShellEnd, ShellExit, ShellMessage, ShellOpen, ShellResize

#: Seconds until the agent has to have agreed.
_TIMEOUT = 10.0


def run(session: Session, view: WorkloadView, pod: PodView, command: str | None = None) -> int:
    """Run a shell in a pod on this program's standard streams; its exit code.

    Args:
        session: The way to its controller.
        view: The workload.
        pod: The pod.
        command: What it runs; without one it is interactive, if this program has a terminal.

    Raises:
        UnauthorizedError: This user may not.
        AgentDiedError: The pod ended.
        OSError: It cannot be reached.
    """
    token = session.own_token(view)
    url = session.address(view, pod)
    if not url:
        raise AgentDiedError(pod.name, "it has no agent that answers")
    headers = {routes.AUTHORIZATION: f"Bearer {token}"}
    try:
        upgraded, rest = dial.dial(url, routes.SHELL, headers, timeout=_TIMEOUT, way=session.way)
    except dial.RefusedError as error:
        raise failures.rebuild(failures.parse_json(error.body)) from error
    return asyncio.run(_run(pod, upgraded, rest, command))


async def _run(pod: PodView, upgraded: socket.socket, rest: bytes, command: str | None) -> int:
    has_terminal = command is None and os.isatty(0) and os.isatty(1)
    wanted = ShellOpen(command=command)
    if has_terminal:
        columns, rows = shutil.get_terminal_size()
        kind = os.environ.get("TERM") or "xterm"
        wanted = ShellOpen(terminal=True, kind=kind, rows=rows, columns=columns)
    client = _Client()
    await upgrading.adopt(upgraded, rest, client, max_message=shells.MESSAGE_LIMIT)
    client.say(wanted)
    with _raw() if has_terminal else contextlib.nullcontext(), client.attached(has_terminal):
        code = await client.exited
    if code is None:
        raise AgentDiedError(pod.name, f"the shell was lost: {client.reason}")
    return code


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Keys go to the pod as they are, Ctrl-C too."""
    before = termios.tcgetattr(0)
    tty.setraw(0, termios.TCSADRAIN)  # what was typed ahead stays
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


class _Client:
    """The endpoint of the connection."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection: Connection | None = None
        self.exited: asyncio.Future[int | None] = self._loop.create_future()
        self.reason = ""
        self._has_room = asyncio.Event()
        self._has_room.set()

    def say(self, message: ShellMessage) -> None:
        """Tell the agent."""
        if self._connection is not None:
            self._connection.send(messages.encode(message), opcode=websocket.TEXT)

    @contextlib.contextmanager
    def attached(self, has_terminal: bool) -> Iterator[None]:
        """Pass the standard input on, and sizes of the terminal."""
        if has_terminal:
            self._loop.add_signal_handler(signal.SIGWINCH, self._resize)
        passing = self._loop.create_task(self._pass_input())
        try:
            yield
        finally:
            passing.cancel()
            if self._connection is not None:
                self._connection.abort("the shell has ended")
            if has_terminal:
                self._loop.remove_signal_handler(signal.SIGWINCH)

    async def _pass_input(self) -> None:
        """Standard input to its end, read only as fast as the pod takes it."""
        while data := await standard_input.read():
            if self._connection is not None:
                self._connection.send(data)
                if self._connection.is_congested:
                    self._has_room.clear()
            await self._has_room.wait()
        self.say(ShellEnd())

    def _resize(self) -> None:
        columns, rows = shutil.get_terminal_size()
        self.say(ShellResize(rows=rows, columns=columns))

    # ------------------------------------------------------------------------------ connection

    def on_open(self, connection: Connection) -> None:
        self._connection = connection

    def on_message(self, opcode: int, payload: memoryview) -> None:
        if opcode == websocket.TEXT:
            self._end(messages.decode(ShellExit, bytes(payload)).code)
        else:
            self._show(bytes(payload[:1]), bytes(payload[1:]))

    def on_large(self, head: memoryview, length: int) -> memoryview | None:
        return None

    def on_placed(self, head: bytes, rest: memoryview) -> None:
        self._show(head[:1], head[1:] + bytes(rest))

    def on_writable(self) -> None:
        self._has_room.set()

    def on_close(self, reason: str) -> None:
        self.reason = reason
        self._end(None)

    def _end(self, code: int | None) -> None:
        if not self.exited.done():
            self.exited.set_result(code)

    def _show(self, kind: bytes, data: bytes) -> None:
        stream = sys.stderr if kind == shells.ERRORS else sys.stdout
        with contextlib.suppress(BrokenPipeError):
            stream.buffer.write(data)
            stream.buffer.flush()
