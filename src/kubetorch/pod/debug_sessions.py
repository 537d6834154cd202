"""Programs of a pod that have stopped for a debugger, and the terminals that attach to them.

    stopped program ── Unix socket ── StoppedProgram ── Terminal ── WebSocket ── terminal

The socket has a path and no port, and takes programs of the pod's own user alone. A terminal needs
the token of a shell: a prompt runs any code. One terminal at a time is attached; what it does not
read stays in the program, which waits meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from kubetorch.errors import CallRefusedError, KubetorchError, ProtocolError, SpecError
from kubetorch.lib import private_sockets, websocket_protocol
from kubetorch.lib.tasks import start_task
from kubetorch.lib.terminal import printable
from kubetorch.lib.websocket import Connection, Endpoint
from kubetorch.pod.http.auth import Guard, refused
from kubetorch.pod.logs import Line
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.pod.worker_process.worker import Worker
from kubetorch.wire import debugger as wire
from kubetorch.wire import routes, tokens
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.debugger import Debugging
from kubetorch.wire.frames import HINT, OVER, STOPPED, DebugEvent
from kubetorch.wire.messages import DebugView

_MODE = re.compile(r"[a-z-]{1,20}")
#: Reasons of stops that an option of the call asks for.
_REQUESTED = ("debug=", "post-mortem")


class DebugSessions(msgspec.Struct, eq=False, kw_only=True, dict=True):
    """All stopped programs of a pod."""

    pod_name: str
    namespace: str
    #: Address of the pod, if others reach it by that; else empty.
    host: str
    path: Path
    guard: Guard
    workers: Callable[[], Iterable[Worker]]
    #: Receives a line of a program that is no worker.
    on_line: Callable[[Line], None]
    #: Called when a program stops first, and when its debugger ends.
    on_change: Callable[[], None]

    def __post_init__(self) -> None:
        self._programs: dict[str, StoppedProgram] = {}
        self._pending: set[Terminal] = set()
        self._numbers = itertools.count(1)
        # They end: a question for stacks has a deadline.
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen on the socket; if the system forbids, programs say so and do not stop."""
        folder = self.path.parent
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.lstat().st_uid != os.getuid():  # such as a link that another user has made
                return
            self.path.unlink(missing_ok=True)
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(
                lambda: StoppedProgram(self), str(self.path)
            )
            self.path.chmod(0o600)

    async def close(self) -> None:
        for program in list(self._programs.values()):
            program.close("the pod ends")
        for terminal in list(self._pending):
            terminal.end("the pod ends")
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            self._server.close()
            self.path.unlink(missing_ok=True)

    @property
    def views(self) -> list[DebugView]:
        """The stopped programs, the first one first."""
        return [program.view for program in self._programs.values()]

    @property
    def stopped(self) -> int:
        """The number of programs that have stopped, and whose debugger is not over."""
        return sum(program.has_stopped for program in self._programs.values())

    # ------------------------------------------------------------------------------- programs

    def add(self, program: StoppedProgram) -> str:
        """Note a program that has said hello; returns the identity of its session."""
        if len(self._programs) >= LIMITS.debug_sessions:
            raise CallRefusedError(f"pod {self.pod_name} has {LIMITS.debug_sessions} debuggers")
        session = f"{os.urandom(4).hex()}-{next(self._numbers)}"
        self._programs[session] = program
        return session

    @property
    def requested_stops(self) -> int:
        """The number of stops by an option of the call that have no terminal."""
        return sum(program.is_requested for program in self._programs.values())

    def remove(self, session: str) -> None:
        if self._programs.pop(session, None) is not None:
            self.on_change()

    def worker_of(self, marker: str) -> Worker | None:
        """The worker whose processes have this marker."""
        return next((w for w in self.workers() if w.process.marker.endswith(f"={marker}")), None)

    def take_terminal(self, worker: Worker | None, number: int | None) -> Terminal | None:
        """The terminal that waits for this call to stop."""
        for terminal in self._pending:
            if terminal.awaited == (worker, number):
                self._pending.discard(terminal)
                return terminal
        return None

    # ------------------------------------------------------------------------------ terminals

    def accept(self, path: str, headers: Mapping[str, str]) -> Endpoint:
        """A terminal for a request to upgrade; see `kubetorch.lib.websocket.Acceptor`."""
        try:
            self.guard.check_origin(headers.get("host"), headers.get("origin"))
            self.guard.check_token(headers.get(routes.AUTHORIZATION.lower()), tokens.EXEC)
            kind, _, rest = path.removeprefix(f"{routes.DEBUGGER}/").partition("/")
            user = printable(headers.get(routes.CLIENT.lower(), "a terminal"))
            shows_lines = kind != routes.CALLER
            terminal = Terminal(self, user[: LIMITS.debug_user_characters], shows_lines=shows_lines)
            if headers.get(routes.DEBUG_MODE.lower()) == wire.DAP:
                terminal.mode = wire.DAP
            if kind == routes.RUNNING:
                rank, _, call = rest.partition("/")
                self._interrupt(terminal, call, rank)
                return terminal
            terminal.program = self._waiting_program(rest)
            terminal.program.check_free()
        except KubetorchError as error:
            raise refused(error, self.pod_name) from error
        return terminal

    def _waiting_program(self, session: str) -> StoppedProgram:
        program = self._programs.get(session)
        if program is None:
            raise CallRefusedError(
                f"nothing waits in pod {self.pod_name} for this debugger any more",
                hint="breakpoint() and debug=True stop a call; kt debug --call ID one that runs",
            )
        return program

    def _interrupt(self, terminal: Terminal, call: str, rank: str) -> None:
        """Stop a running call, and attach the terminal when it stops."""
        running = []
        for worker in self.workers():
            if rank in (routes.ANY_RANK, str(worker.rank)):
                running += [(worker, number, label) for number, label in worker.calls_of(call)]
        if not running:
            labels = [label for worker in self.workers() for _, label in worker.calls_of("")]
            named = ", ".join(labels[: LIMITS.debug_named_calls])
            rest = f"; those that run: {named}" if labels else ""
            raise SpecError(
                f"no call {call!r} runs in pod {self.pod_name}{rest}",
                hint="kt calls lists spawned calls; the request of a call stands in its errors",
            )
        worker, number, _ = running[-1]
        for program in self._programs.values():
            if program.is_of(worker, number):
                program.check_free()
                terminal.program = program
                return
        terminal.awaited = (worker, number)
        self._pending.add(terminal)
        loop = asyncio.get_running_loop()
        loop.call_later(TIMING.debugger_notice_seconds, self._explain_wait, terminal, worker)
        loop.call_later(TIMING.debugger_interrupt_seconds, self._give_up, terminal)
        worker.debug(number, Debugging())

    def _explain_wait(self, terminal: Terminal, worker: Worker) -> None:
        if terminal in self._pending:
            start_task(self._show_stacks(terminal, worker), self._tasks)

    async def _show_stacks(self, terminal: Terminal, worker: Worker) -> None:
        """Show a terminal where the call is that does not stop."""
        text = (
            "the call has not stopped yet: it stops at its next line of Python. Now it is here:\n"
        )
        with contextlib.suppress(KubetorchError, TimeoutError, OSError):
            text += f"{(await worker.stacks()).text.rstrip()}\n"
        if terminal in self._pending:
            data = text.encode(errors="replace")
            terminal.send(wire.OUTPUT, data[: wire_tuning.LIMITS.debug_message_bytes])

    def _give_up(self, terminal: Terminal) -> None:
        if terminal in self._pending:
            seconds = TIMING.debugger_interrupt_seconds
            terminal.end(
                f"the call did not stop within {seconds:g} s: it ran no line of Python, or it has "
                "ended"
            )

    def forget(self, terminal: Terminal) -> None:
        self._pending.discard(terminal)


class StoppedProgram(asyncio.Protocol):
    """One session of a program, from its first stop to the end of its call."""

    def __init__(self, sessions: DebugSessions) -> None:
        self._sessions = sessions
        self._messages = wire.Messages()
        self._transport: asyncio.Transport
        self._worker: Worker | None = None
        # The number of its call in the worker.
        self._number: int | None = None
        self._session = ""
        self._where = self._why = self._mode = ""
        self._port = wire.PORT
        self._pid = 0
        self._wait = TIMING.debugger_wait_seconds
        self._wait_problem = ""
        self._since = self._attached_since = 0.0
        self._terminal: Terminal | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        # Lines of the call that its terminal had no room for, since the last one.
        self._left_out = 0

    # ----------------------------------------------------------------------------- the program

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's is no asyncio.Transport
        peer = private_sockets.peer(transport.get_extra_info("socket"))
        if peer is not None:
            self._pid = peer.pid
            if peer.user not in (os.geteuid(), 0):
                self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            for kind, content in self._messages.feed(data):
                self._on_message(kind, content)
        except KubetorchError as error:
            self.close(error.message)

    def _on_message(self, kind: int, content: bytes) -> None:
        if self._is_over:  # by a message that came together with this one
            return
        if kind not in wire.FROM_PROGRAM or bool(self._session) == (kind == wire.HELLO):
            raise ProtocolError(f"a message of kind {kind} from a stopped program")
        if kind == wire.HELLO:
            self._on_hello(content)
        elif kind == wire.STOPPED:
            self._on_stop(printable(str(wire.decode(content).get("where", ""))))
        elif kind == wire.ENDED:
            self._end(content.decode(errors="replace") or wire.LEFT_NORMALLY)
        else:
            if kind == wire.PROMPT and self._worker is not None:
                self._worker.drain_output()  # what it printed is shown before the prompt
            self._pass_on(kind, content)

    def _on_hello(self, content: bytes) -> None:
        about = wire.decode(content)
        self._worker = self._sessions.worker_of(str(about.get("worker") or "-"))
        if self._worker is not None:
            self._number = self._worker.call_number(about.get("call"))
        self._why = printable(str(about.get("why", "")))
        mode, port = about.get("mode"), about.get("port")
        self._mode = mode if isinstance(mode, str) and _MODE.fullmatch(mode) else "pdb"
        self._port = port if type(port) is int and 0 < port < 65536 else wire.PORT
        wait = printable(str(about.get("wait") or self._wait))
        try:
            seconds = float(wait)
        except ValueError:
            seconds = -1
        if seconds >= 0:  # not NaN
            self._wait = min(seconds, TIMING.debugger_longest_wait_seconds)
        else:
            self._wait_problem = f", since {wire.WAIT} is {wait[:20]!r}, no number of seconds"
        self._session = self._sessions.add(self)

    def _on_stop(self, where: str) -> None:
        is_first = not self._since
        self._where = where
        self._since = self._since or time.time()
        if self._worker is not None:
            self._worker.drain_output()
        if is_first:
            self._sessions.on_change()
        if self._terminal is None and is_first:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._wait, self._give_up)
            terminal = self._sessions.take_terminal(self._worker, self._number)
            if terminal is not None:
                self._note("", STOPPED)
                self.attach(terminal)
                return
            if not self._wait:
                self.close(f"went on at {where}: {wire.WAIT} is 0, so no call waits for a debugger")
                return
            if self._sessions.requested_stops > LIMITS.requested_stops:
                self.close(
                    f"{LIMITS.requested_stops} calls with debug= or post_mortem= wait for a "
                    "debugger in this pod: the call goes on"
                )
                return
            for text in (wire.ACTIVATED, self._command):
                self._note(text, HINT)
            # No caller can attach: such as while a module is imported.
            elsewhere = " from another terminal" if self._number is None else ""
            text = f"stopped at {where}; waits {self._wait:g} s for a debugger{elsewhere}"
            self._note(f"{text}{self._wait_problem}", STOPPED)
            return
        self._note("", STOPPED)
        self._pass_on(wire.STOPPED, wire.encode({"where": where}))

    @property
    def _command(self) -> str:
        sessions = self._sessions
        return wire.attach_command(
            sessions.pod_name, self._port, sessions.namespace, self._mode, sessions.host
        )

    def _note(self, text: str, kind: str) -> None:
        """Write a line to the log of the call, or of the pod; one without text is for clients."""
        event = DebugEvent(self._session, kind, self._mode)
        line = Line(text, "stdout", None, time.time(), None, debug=event)
        if self._worker is not None:
            self._worker.note_debugger(line, self._number)
        elif text:
            self._sessions.on_line(line)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._session:
            self._end("the stopped program has ended")

    # ---------------------------------------------------------------------------- the terminal

    @property
    def is_requested(self) -> bool:
        """True if an option of the call has it stop, and it waits for a terminal."""
        return self._why in _REQUESTED and self._terminal is None and self._since > 0

    @property
    def has_stopped(self) -> bool:
        return self._since > 0

    def is_of(self, worker: Worker, number: int) -> bool:
        return self._worker is worker and self._number == number

    def check_free(self) -> None:
        if self._terminal is not None:
            since = time.strftime("%H:%M:%S", time.localtime(self._attached_since))
            raise CallRefusedError(
                f"{self._terminal.user} has been attached to this debugger since {since}",
                hint="one terminal at a time: q there, or Ctrl-C, ends that debugger",
            )

    def attach(self, terminal: Terminal) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._terminal, self._attached_since = terminal, time.time()
        terminal.program = self
        if terminal.shows_lines and self._worker is not None:
            self._worker.listeners.append(self._show_line)
        self._pass_on(wire.STOPPED, wire.encode({"where": self._where}))
        self._send(wire.ATTACHED, wire.encode({"mode": terminal.mode}))

    def _show_line(self, line: Line) -> None:
        if line.call != self._number or line.debug is not None:
            return
        if self._terminal is not None and self._terminal.is_congested:
            self._left_out += 1  # the call prints on, and does not wait for the terminal
            return
        text = f"{line.text}\n".encode()
        self._pass_on(wire.OUTPUT, text[: wire_tuning.LIMITS.debug_message_bytes])

    def _pass_on(self, kind: int, content: bytes) -> None:
        terminal = self._terminal
        if terminal is not None and not terminal.send(kind, content):
            self._transport.pause_reading()  # the program waits for its terminal

    def read_on(self) -> None:
        if self._is_over:
            return
        self._transport.resume_reading()
        count, self._left_out = self._left_out, 0
        if count:
            text = f"… {count} lines of the call came meanwhile, and are not shown\n"
            self._pass_on(wire.OUTPUT, text.encode())

    def from_terminal(self, kind: int, content: bytes) -> None:
        self._send(kind, content)

    def pause_writing(self) -> None:
        if self._terminal is not None:
            self._terminal.read_on(is_wanted=False)

    def resume_writing(self) -> None:
        if self._terminal is not None:
            self._terminal.read_on(is_wanted=True)

    def on_terminal_left(self) -> None:
        """The terminal is gone: the call goes on."""
        self._terminal = None
        self.close("the terminal of the debugger is gone: the call goes on")

    # --------------------------------------------------------------------------------- its end

    def _give_up(self) -> None:
        self.close(f"no debugger was attached within {self._wait:g} s: the call goes on")

    def close(self, reason: str) -> None:
        """End the session; the program goes on."""
        self._send(wire.LEFT, b"")
        self._end(reason)

    def _send(self, kind: int, content: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(wire.pack(kind, content))

    def _end(self, reason: str) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._sessions.remove(self._session)
        if self._timer is not None:
            self._timer.cancel()
        if self._worker is not None:
            with contextlib.suppress(ValueError):
                self._worker.listeners.remove(self._show_line)
        self._transport.close()
        if self._since:
            if self._worker is not None:
                self._worker.drain_output()  # what the call printed before
            self._note("" if reason == wire.RUNS_ON else reason, OVER)
        terminal, self._terminal = self._terminal, None
        if terminal is not None:
            is_silent = reason == wire.RUNS_ON and not terminal.shows_lines
            terminal.end("" if is_silent else reason)

    @property
    def view(self) -> DebugView:
        until = None if self._terminal is not None else self._since + self._wait
        return DebugView(
            session=self._session,
            pod=self._sessions.pod_name,
            rank=None if self._worker is None else self._worker.rank,
            pid=self._pid,
            call="" if self._worker is None else self._worker.label_of(self._number),
            why=self._why,
            where=self._where,
            mode=self._mode,
            port=self._port,
            host=self._sessions.host,
            since=self._since,
            until=until,
            user="" if self._terminal is None else self._terminal.user,
        )


class Terminal(Endpoint):
    """The connection of a terminal, and the endpoint of its WebSocket."""

    def __init__(self, sessions: DebugSessions, user: str, *, shows_lines: bool) -> None:
        self._sessions = sessions
        self._connection: Connection | None = None
        self.user = user
        self.shows_lines = shows_lines
        #: A terminal for commands of pdb (a page too), or `DAP`.
        self.mode = "pdb"
        self.program: StoppedProgram | None = None
        #: The call that is to stop, if it has not.
        self.awaited: tuple[Worker, int] | None = None

    def on_open(self, connection: Connection) -> None:  # Endpoint's
        self._connection = connection
        program = self.program
        if program is None:
            return
        try:
            program.check_free()  # another terminal may have come meanwhile
        except KubetorchError as error:
            self.program = None
            self.end(error.message)
            return
        program.attach(self)

    def on_message(self, opcode: int, payload: memoryview) -> None:  # Endpoint's
        kind = payload[0] if payload else 0
        is_right = opcode == websocket_protocol.BINARY and kind in wire.FROM_TERMINAL
        if not is_right or len(payload) > wire_tuning.LIMITS.debug_message_bytes:
            if self._connection is not None:
                text = "a message that no terminal sends"
                self._connection.close(websocket_protocol.PROTOCOL_ERROR, text)
        elif self.program is not None:
            self.program.from_terminal(kind, bytes(payload[1:]))

    def on_writable(self) -> None:  # Endpoint's
        if self.program is not None:
            self.program.read_on()

    def on_close(self, reason: str) -> None:  # Endpoint's
        self._connection = None
        self._sessions.forget(self)
        program, self.program = self.program, None
        if program is not None:
            program.on_terminal_left()

    def send(self, kind: int, content: bytes) -> bool:
        """Send a message; false if the terminal does not keep up."""
        if self._connection is None:
            return True
        self._connection.send(bytes([kind]), content)
        return not self.is_congested

    @property
    def is_congested(self) -> bool:
        return self._connection is not None and self._connection.is_congested

    def read_on(self, *, is_wanted: bool) -> None:
        if self._connection is not None:
            self._connection.read_on(is_wanted)

    def end(self, reason: str) -> None:
        """Close the connection after the reason."""
        self.program = None
        self._sessions.forget(self)
        self.send(wire.ENDED, reason.encode()[: wire_tuning.LIMITS.debug_message_bytes])
        if self._connection is not None:
            self._connection.close(reason=reason)
