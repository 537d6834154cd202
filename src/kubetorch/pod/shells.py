"""Shells in the pod, for its owner: the environment of a worker, on a terminal or on pipes."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import signal
import struct
import termios
import time
from collections.abc import Callable, Mapping

import msgspec

from kubetorch.errors import CallRefusedError, KubetorchError, ProtocolError
from kubetorch.lib import deadlines, process_watch, processes, websocket_protocol
from kubetorch.lib import tuning as lib_tuning
from kubetorch.lib.process_watch import ExitWatch
from kubetorch.lib.websocket import Connection, Endpoint
from kubetorch.pod.apps.process import exit_code
from kubetorch.pod.http.auth import Guard, refused
from kubetorch.pod.tuning import LIMITS, TIMING
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

_log = logging.getLogger(__name__)

#: In the folder `$0`: makes the terminal `$1` that of the session, and runs the command after it.
_ON_TERMINAL = 'cd -- "$0" && exec <"$1" >"$1" 2>&1 && shift && exec "$@"'
_ON_PIPES = 'cd -- "$0" && exec "$@"'

#: Folder and environment of a shell.
ShellEnvironment = Callable[[], tuple[str, Mapping[str, str]]]


class Shells(msgspec.Struct, eq=False, kw_only=True, dict=True):
    pod_name: str
    guard: Guard
    shell_environment: ShellEnvironment
    on_change: Callable[[], None]

    def __post_init__(self) -> None:
        self._shells: set[Shell] = set()
        #: When the last shell ended (`time.time`).
        self.last_end = 0.0
        self._is_closing = False

    @property
    def running(self) -> int:
        return len(self._shells)

    def accept(self, headers: Mapping[str, str]) -> Endpoint:
        """A shell for a request to upgrade; see `kubetorch.lib.websocket.Acceptor`."""
        try:
            self.guard.check_origin(headers.get("host"), headers.get("origin"))
            self.guard.check_token(headers.get(routes.AUTHORIZATION.lower()), tokens.EXEC)
            folder, env = self.shell_environment()
            if self._is_closing:
                raise CallRefusedError(f"pod {self.pod_name} is about to end: it opens no shells")
            if len(self._shells) >= LIMITS.shells:
                raise CallRefusedError(
                    f"pod {self.pod_name} already runs {LIMITS.shells} shells, the most at a time",
                    hint="end one of them",
                )
        except KubetorchError as error:
            raise refused(error, self.pod_name) from error
        shell = Shell(folder, env, self._on_over)
        self._shells.add(shell)
        self.on_change()
        return shell

    async def close(self) -> None:
        self._is_closing = True
        await asyncio.gather(*(shell.kill() for shell in list(self._shells)))

    def _on_over(self, shell: Shell) -> None:
        self._shells.discard(shell)
        self.last_end = time.time()
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
        # In the environment of all processes of the shell.
        self._marker = secrets.token_hex(8)
        self._pid = 0
        self._terminal = -1
        self._input = -1
        self._pending_input = bytearray()
        self._has_unfinished_line = False
        self._is_input_over = False
        # Descriptors that are read, and the byte that their messages begin with.
        self._outputs: dict[int, bytes] = {}
        self._exiting: asyncio.Task[None] | None = None
        self._has_ended = asyncio.Event()
        self._close_timer: asyncio.TimerHandle | None = None

    # --------------------------------------------------------------------------- the connection

    def on_open(self, connection: Connection) -> None:  # Endpoint's
        self._connection = connection
        seconds = TIMING.shell_open_seconds
        reason = f"no ShellOpen came within {seconds:.0f} s"
        self._close_timer = self._loop.call_later(seconds, self._break, reason)

    def on_message(self, opcode: int, payload: memoryview) -> None:  # Endpoint's
        try:
            if opcode == websocket_protocol.BINARY:
                self._feed(payload)
            else:
                self._on_client_message(messages.decode(FromClient, bytes(payload)))  # type: ignore[arg-type]  # a union
        except (ProtocolError, OSError) as error:
            self._break(str(error))

    def _break(self, reason: str) -> None:
        if self._connection is not None:
            self._connection.close(websocket_protocol.PROTOCOL_ERROR, reason, is_peer_first=True)

    def on_writable(self) -> None:  # Endpoint's
        for descriptor in self._outputs:
            self._loop.add_reader(descriptor, self._read, descriptor)

    def on_close(self, reason: str) -> None:  # Endpoint's
        self._connection = None
        if self._close_timer is not None:
            self._close_timer.cancel()
        if self._pid:
            self._kill_group()
        else:
            self._end()

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
        if self._close_timer is not None:
            self._close_timer.cancel()
        try:
            with contextlib.ExitStack() as child_ends:
                self._pid = self._spawn(request, child_ends)
        except (OSError, ValueError) as error:
            self._close_descriptors()
            raise OSError(f"the shell cannot be started: {error}") from error
        self.on_writable()
        try:
            ExitWatch(self._pid, self._on_end)
        except OSError as error:
            self._kill_group()
            self._on_end()
            raise OSError(f"the end of a shell cannot be watched: {error}") from error
        self._write()

    def _spawn(self, request: ShellOpen, child_ends: contextlib.ExitStack) -> int:
        env, folder = {**self._env, MARKER: self._marker}, self._folder
        prefix: tuple[str, ...]
        if request.terminal:
            self._terminal, tty = os.openpty()
            child_ends.callback(os.close, tty)
            self._outputs[self._terminal] = OUTPUT
            self._input = os.dup(self._terminal)
            self._resize(ShellResize(rows=request.rows, columns=request.columns))
            env["TERM"] = request.kind
            prefix = ("/bin/sh", "-c", _ON_TERMINAL, folder, os.ttyname(tty))
            child_descriptors = {"stdin": tty, "output": tty, "errors": tty}
        else:
            stdin, self._input = os.pipe()
            child_ends.callback(os.close, stdin)
            prefix = ("/bin/sh", "-c", _ON_PIPES, folder)
            child_descriptors = {"stdin": stdin}
            for name, kind in (("output", OUTPUT), ("errors", ERRORS)):
                descriptor, child_descriptors[name] = os.pipe()
                child_ends.callback(os.close, child_descriptors[name])
                self._outputs[descriptor] = kind
        for descriptor in (self._input, *self._outputs):
            os.set_blocking(descriptor, False)
        return processes.spawn((*prefix, *_program(request.command)), env, **child_descriptors)

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
        if self._exiting is not None:  # the shell has ended
            return
        if not self._pid or self._is_input_over:
            raise ProtocolError("input of a shell comes between ShellOpen and ShellEnd")
        self._has_unfinished_line = bytes(data[-1:]) not in (b"\n", b"\r")
        self._pending_input += data
        self._write()

    def _write(self) -> None:
        """Write the waiting input to the shell."""
        if self._input < 0:
            return
        self._loop.remove_writer(self._input)
        try:
            while self._pending_input:
                del self._pending_input[: os.write(self._input, self._pending_input[:_PIECE_BYTES])]
        except BlockingIOError:
            self._loop.add_writer(self._input, self._write)
        except OSError:  # the shell reads no more
            self._pending_input.clear()
        if self._connection is not None:
            self._connection.read_on(len(self._pending_input) < LIMITS.shell_input_bytes)
        if self._is_input_over and not self._pending_input:
            if self._terminal >= 0:
                # On an unfinished line the first one only has the program read it.
                self._pending_input += b"\x04\x04" if self._has_unfinished_line else b"\x04"
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
        self._kill_group()
        if self._connection is not None:
            self._connection.close(websocket_protocol.GOING_AWAY, "the pod ends")
        await deadlines.wait_at_most(TIMING.shell_kill_seconds, self._has_ended.wait())

    def _kill_group(self) -> None:
        if self._pid and self._exiting is None:
            with contextlib.suppress(OSError):
                os.killpg(self._pid, signal.SIGKILL)

    def _on_end(self) -> None:
        self._exiting = self._loop.create_task(self._finish_exit())

    async def _finish_exit(self) -> None:
        status = processes.exit_status(self._pid)
        try:
            await self._kill_leftovers()
            for descriptor, kind in self._outputs.items():
                with contextlib.suppress(OSError):
                    while data := os.read(descriptor, _PIECE_BYTES):
                        self._send(kind, data)
            self._report_exit(status)
        finally:
            self._close_descriptors()
            self._end()

    async def _kill_leftovers(self) -> None:
        marker = f"{MARKER}={self._marker}"
        # Twice: the shell's last child may be between two programs, and shows no marker then.
        for _ in range(2):
            try:
                pids = await asyncio.to_thread(processes.kill_session, self._pid, marker=marker)
            except OSError as error:  # no descriptor is free
                _log.warning("processes of a shell are not found pid=%d error=%s", self._pid, error)
                return
            for pid in pids:
                process_watch.reap(pid)

    def _report_exit(self, status: int | None) -> None:
        if self._connection is not None:
            exit_message = ShellExit(code=exit_code(status))
            self._connection.send(messages.encode(exit_message), opcode=websocket_protocol.TEXT)
            # The client closes: a client that still sends input would see a reset, not the code.
            self._connection.read_on(True)
            self._close_timer = self._loop.call_later(
                lib_tuning.TIMING.websocket_close_seconds, self._connection.close
            )

    def _close_descriptors(self) -> None:
        self._close_input()
        for descriptor in self._outputs:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
        self._outputs.clear()
        self._terminal = -1

    def _end(self) -> None:
        self._has_ended.set()
        self._on_over(self)


def _program(command: str | None) -> tuple[str, ...]:
    """The program to run: the command, or an interactive shell."""
    if command is not None:
        return ("/bin/sh", "-c", command)
    return ("/bin/bash", "-i") if os.access("/bin/bash", os.X_OK) else ("/bin/sh", "-i")
