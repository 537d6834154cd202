"""Shells in the pod, for its owner: the environment of a worker, on a terminal or on pipes."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import signal
import struct
import termios
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kubetorch.errors import CallRefusedError, KubetorchError, ProtocolError
from kubetorch.lib import process_watch, processes, websocket_protocol
from kubetorch.lib import tuning as lib_tuning
from kubetorch.lib.process_watch import ExitWatch
from kubetorch.lib.websocket import Connection, Endpoint
from kubetorch.pod.apps.process import exit_code
from kubetorch.pod.http.auth import Guard, refused
from kubetorch.pod.tuning import LIMITS
from kubetorch.pod.worker_process.worker import MARKER
from kubetorch.wire import messages, routes, tokens
from kubetorch.wire.pod_commands import (
    ERRORS,
    OUTPUT,
    FromClient,
    ShellEnd,
    ShellExit,
    ShellOpen,
    ShellResize,
)

_PIECE_BYTES = 64 * 1024

#: Makes the terminal of `$1` that of the session, and runs the command that follows.
_ON_TERMINAL = 'cd -- "$0" && exec <"$1" >"$1" 2>&1 && shift && exec "$@"'
_ON_PIPES = 'cd -- "$0" && exec "$@"'

#: Folder and environment of a shell.
ShellEnvironment = Callable[[], tuple[str, Mapping[str, str]]]


@dataclass(eq=False, kw_only=True)
class Shells:
    pod_name: str
    guard: Guard
    shell_environment: ShellEnvironment
    on_change: Callable[[], None]

    def __post_init__(self) -> None:
        self._shells: set[Shell] = set()
        #: When the last shell ended (`time.time`).
        self.last = 0.0

    @property
    def running(self) -> int:
        return len(self._shells)

    def accept(self, headers: Mapping[str, str]) -> Endpoint:
        """A shell for a request to upgrade; see `kubetorch.lib.websocket.Acceptor`."""
        try:
            self.guard.check_origin(headers.get("host"), headers.get("origin"))
            self.guard.check_token(headers.get(routes.AUTHORIZATION.lower()), tokens.EXEC)
            folder, env = self.shell_environment()
            if len(self._shells) >= LIMITS.shells:
                raise CallRefusedError(f"pod {self.pod_name} has {LIMITS.shells} shells")
        except KubetorchError as error:
            raise refused(error, self.pod_name) from error
        shell = Shell(folder, env, self._on_over)
        self._shells.add(shell)
        self.on_change()
        return shell

    async def close(self) -> None:
        await asyncio.gather(*(shell.kill() for shell in list(self._shells)))

    def _on_over(self, shell: Shell) -> None:
        self._shells.discard(shell)
        self.last = time.time()
        self.on_change()


class Shell(Endpoint):
    """One shell, and the endpoint of its connection."""

    def __init__(
        self, folder: str, env: Mapping[str, str], on_over: Callable[[Shell], None]
    ) -> None:
        self._folder = folder
        self._env = env
        self._on_over = on_over
        self._loop = asyncio.get_running_loop()
        self._connection: Connection | None = None
        self._marker = f"{MARKER}={secrets.token_hex(8)}"
        self._pid = 0
        self._terminal = -1
        self._input = -1
        self._waiting = bytearray()
        self._is_input_over = False
        # Descriptors that are read, and the byte that their messages begin with.
        self._outputs: dict[int, bytes] = {}
        self._exiting: asyncio.Task[None] | None = None
        self._close_timer: asyncio.TimerHandle | None = None

    # --------------------------------------------------------------------------- the connection

    def on_open(self, connection: Connection) -> None:  # Endpoint's
        self._connection = connection

    def on_message(self, opcode: int, payload: memoryview) -> None:  # Endpoint's
        if opcode == websocket_protocol.BINARY:
            self._feed(payload)
            return
        try:
            self._on_client_message(messages.decode(FromClient, bytes(payload)))  # type: ignore[arg-type]  # a union
        except (ProtocolError, OSError) as error:
            if self._connection is not None:
                self._connection.close(websocket_protocol.PROTOCOL_ERROR, str(error))

    def on_writable(self) -> None:  # Endpoint's
        for descriptor in self._outputs:
            self._loop.add_reader(descriptor, self._read, descriptor)

    def on_close(self, reason: str) -> None:  # Endpoint's
        self._connection = None
        if self._close_timer is not None:
            self._close_timer.cancel()
        if self._pid:
            self._signal(signal.SIGHUP)
            self._signal(signal.SIGKILL)
        else:
            self._on_over(self)

    def _on_client_message(self, message: FromClient) -> None:
        if isinstance(message, ShellOpen):
            if not self._pid:
                self._start(message)
        elif isinstance(message, ShellEnd):
            self._is_input_over = True
            self._write()
        elif self._terminal >= 0:
            self._resize(message)

    # -------------------------------------------------------------------------------- the shell

    def _start(self, request: ShellOpen) -> None:
        env, folder = {**self._env, MARKER: self._marker.partition("=")[2]}, self._folder
        begin: tuple[str, ...]
        if request.terminal:
            self._terminal, theirs = os.openpty()
            self._resize(ShellResize(rows=request.rows, columns=request.columns))
            env["TERM"] = request.kind
            begin = ("/bin/sh", "-c", _ON_TERMINAL, folder, os.ttyname(theirs))
            standard = {"stdin": theirs, "output": theirs, "errors": theirs}
            self._input = os.dup(self._terminal)
            self._outputs = {self._terminal: OUTPUT}
        else:
            stdin, self._input = os.pipe()
            output, stdout = os.pipe()
            errors, stderr = os.pipe()
            begin = ("/bin/sh", "-c", _ON_PIPES, folder)
            standard = {"stdin": stdin, "output": stdout, "errors": stderr}
            self._outputs = {output: OUTPUT, errors: ERRORS}
        try:
            self._pid = processes.spawn((*begin, *_program(request.command)), env, **standard)
        finally:
            for descriptor in set(standard.values()):
                os.close(descriptor)
        for descriptor in (self._input, *self._outputs):
            os.set_blocking(descriptor, False)
        self.on_writable()
        ExitWatch(self._pid, self._on_end)
        self._write()

    def _resize(self, size: ShellResize) -> None:
        packed = struct.pack("HHHH", size.rows & 0xFFFF, size.columns & 0xFFFF, 0, 0)
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, packed)

    def _read(self, descriptor: int) -> None:
        connection = self._connection
        if connection is not None and connection.is_congested:
            self._loop.remove_reader(descriptor)
            return
        try:
            data = os.read(descriptor, _PIECE_BYTES)
        except BlockingIOError:
            return
        except OSError:  # a terminal that no process has open any more
            data = b""
        if data:
            self._send(self._outputs[descriptor], data)
        else:
            self._loop.remove_reader(descriptor)

    def _send(self, kind: bytes, data: bytes) -> None:
        if self._connection is not None:
            self._connection.send(kind, data)

    def _feed(self, data: bytes | memoryview) -> None:
        if self._exiting is None:  # else the shell has ended
            self._waiting += data
            self._write()

    def _write(self) -> None:
        """Write the waiting input to the shell."""
        if self._input < 0:
            return
        self._loop.remove_writer(self._input)
        try:
            while self._waiting:
                del self._waiting[: os.write(self._input, self._waiting[:_PIECE_BYTES])]
        except BlockingIOError:
            self._loop.add_writer(self._input, self._write)
        except OSError:  # the shell reads no more
            self._waiting.clear()
        if self._connection is not None:
            self._connection.read_on(len(self._waiting) < LIMITS.shell_input_bytes)
        if self._is_input_over and not self._waiting:
            if self._terminal >= 0:
                self._waiting += b"\x04"
                self._is_input_over = False
                self._write()
            else:
                self._close_input()

    def _close_input(self) -> None:
        if self._input >= 0:
            self._loop.remove_writer(self._input)
            os.close(self._input)
            self._input = -1

    # ---------------------------------------------------------------------------------- its end

    async def kill(self) -> None:
        self._signal(signal.SIGKILL)
        if self._connection is not None:
            self._connection.close(websocket_protocol.GOING_AWAY, "the pod ends")
        if self._exiting is not None:
            await self._exiting

    def _signal(self, number: signal.Signals) -> None:
        if self._pid and self._exiting is None:
            with contextlib.suppress(OSError):
                os.killpg(self._pid, number)

    def _on_end(self) -> None:
        self._exiting = self._loop.create_task(self._finish_exit())

    async def _finish_exit(self) -> None:
        status = processes.exit_status(self._pid)
        # Twice: the shell's last child may be between two programs, and shows no marker then.
        for _ in range(2):
            leftover_pids = await asyncio.to_thread(
                processes.kill_session, self._pid, marker=self._marker
            )
            for pid in leftover_pids:
                process_watch.reap(pid)
        self._close_input()
        for descriptor, kind in self._outputs.items():
            self._loop.remove_reader(descriptor)
            with contextlib.suppress(OSError):
                while data := os.read(descriptor, _PIECE_BYTES):
                    self._send(kind, data)
            os.close(descriptor)
        self._outputs.clear()
        self._terminal = -1
        if self._connection is not None:
            code = ShellExit(code=exit_code(status))
            self._connection.send(messages.encode(code), opcode=websocket_protocol.TEXT)
            # The client closes: a client that still sends input would see a reset, not the code.
            self._connection.read_on(True)
            self._close_timer = self._loop.call_later(
                lib_tuning.TIMING.websocket_close_seconds, self._connection.close
            )
        self._on_over(self)


def _program(command: str | None) -> tuple[str, ...]:
    """The program to run: the command, or an interactive shell."""
    if command is not None:
        return ("/bin/sh", "-c", command)
    return ("/bin/bash", "-i") if os.access("/bin/bash", os.X_OK) else ("/bin/sh", "-i")
