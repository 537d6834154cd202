"""The terminal's end of a debugger: commands in, output out.

A caller that sits at a terminal, or in a notebook, gets the prompt in its own program, in the
thread that waits for the call; `kt debug` gets it in another one. Lines are edited, and kept, on
this machine; what can be completed the debugger in the pod knows.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any

from kubetorch.errors import AgentDiedError, KubetorchError
from kubetorch.lib import modules, terminal, websocket_protocol
from kubetorch.sdk import backend, inpod
from kubetorch.sdk.calls import stream
from kubetorch.sdk.calls.stream_writer import message
from kubetorch.sdk.logs import pod_label
from kubetorch.sdk.transport import pod_transport
from kubetorch.sdk.transport.session import Session
from kubetorch.sdk.tuning import LIMITS, TIMING
from kubetorch.wire import debugger as wire
from kubetorch.wire import exceptions, frames, messages, routes
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.messages import DebugView, PodView, WorkloadView

_POSITION = re.compile(r"^(> .*|-> .*)$", re.MULTILINE)
#: The prompt of a group of programs.
_GROUP_PROMPT = "(Pdb, all) "
_CYAN, _YELLOW, _RESET = "\x1b[36m", "\x1b[33m", "\x1b[0m"


class DebugTerminal:
    """A connection to a stopped program, in this program's terminal."""

    def __init__(self, connection: socket.socket, rest: bytes) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        # Bounded: what is not shown yet stays in the pod. While the user thinks at a prompt, output
        # takes half of the room and is dropped beyond: the thread that reads must not wait for
        # the user, since it answers the pod's pings.
        self._messages: Queue[tuple[int, bytes]] = Queue(LIMITS.debug_messages)
        self._is_showing = True
        self._dropped = 0
        self._completions: Queue[list[str]] = Queue(1)
        self._parser = websocket_protocol.Parser(
            self, masked=False, max_message=2 * wire_tuning.LIMITS.debug_message_bytes
        )
        self._is_asking = False
        #: The prompt that waits for a command, after its output was collected.
        self._prompt: str | None = None
        # Where the program stands, if that was collected.
        self._position = ""
        #: Finds the other calls that have stopped, by label: `all` takes a command to them.
        self.find_others: Callable[[], Mapping[str, DebugTerminal]] | None = None
        #: Set when the debugger is over on this side.
        self.over = threading.Event()
        args = (rest,)
        threading.Thread(target=self._read, args=args, name="kubetorch-debug", daemon=True).start()

    @property
    def is_over(self) -> bool:
        return self.over.is_set()

    # ------------------------------------------------------------------------------- receiving

    def _read(self, rest: bytes) -> None:
        try:
            self._parser.feed(rest)
            while size := self._connection.recv_into(self._parser.get_buffer()):
                self._parser.advance(size)
        except (OSError, ValueError, websocket_protocol.WebSocketError):
            pass
        finally:
            self.end("the connection to the pod is lost")

    def on_message(self, opcode: int, payload: memoryview) -> None:  # Handler's
        kind, content = payload[0] if payload else 0, bytes(payload[1:])
        if kind == wire.COMPLETIONS:
            with contextlib.suppress(Full):  # more than were asked for
                self._completions.put_nowait(_names(content))
        elif kind == wire.ENDED:
            self.end(content.decode(errors="replace"))
        elif kind == wire.OUTPUT:
            self._take_output(content)
        else:
            self._report_dropped()
            while not self.is_over and not self._put(kind, content):
                continue

    def _put(self, kind: int, content: bytes) -> bool:
        """Put a message where there is soon room; else tell the pod that this end lives.

        What is shown may wait long, for example for `less`, and the pod's pings wait behind.
        """
        try:
            self._messages.put((kind, content), timeout=TIMING.debug_room_seconds)
        except Full:
            self._send_pong(b"")
            return False
        return True

    def _take_output(self, content: bytes) -> None:
        while self._is_showing:
            if self._put(wire.OUTPUT, content):
                return
        if self._dropped or self._messages.qsize() >= LIMITS.debug_messages // 2:
            self._dropped += 1
        else:
            self._messages.put((wire.OUTPUT, content))

    def _report_dropped(self) -> None:
        """Report, before the next prompt, how much output is missing."""
        count, self._dropped = self._dropped, 0
        if count:
            note = f"… {count} more messages of output came meanwhile, and are not shown\n"
            self._messages.put((wire.OUTPUT, note.encode()))

    def on_large(self, head: memoryview, length: int) -> memoryview | None:  # Handler's
        return None

    def on_placed(self, head: bytes, rest: memoryview) -> None:  # Handler's
        self.on_message(websocket_protocol.BINARY, memoryview(head + rest))

    def on_control(self, opcode: int, payload: bytes) -> None:  # Handler's
        if opcode == websocket_protocol.PING:
            self._send_pong(payload)

    def _send_pong(self, payload: bytes) -> None:
        header = websocket_protocol.frame_header(websocket_protocol.PONG, len(payload), masked=True)
        self._write(header + payload)

    def end(self, reason: str) -> None:
        """End the debugger on this side, for this reason; once."""
        if self.is_over:
            return
        self.over.set()
        self._report_dropped()
        self._messages.put((wire.ENDED, reason.encode()))
        main = threading.main_thread().ident
        # A signal that comes between readline's prompt and its wait for a line ends no wait.
        while self._is_asking and main is not None and _has_default_interrupt():
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(TIMING.debug_interrupt_seconds)

    # ----------------------------------------------------------------------------- at the prompt

    def interact(self) -> bool:
        """Show output and ask for commands until the program runs; false when it is over."""
        self._is_showing = True
        try:
            while True:
                if self._prompt is not None:
                    _show(self._position)
                    self._ask_for_command(self._prompt)
                kind, content = self._messages.get()
                if kind == wire.OUTPUT:
                    _show(content.decode(errors="replace"))
                elif kind == wire.PROMPT:
                    self._ask_for_command(content.decode(errors="replace"))
                elif kind == wire.RUNS:
                    return True
                elif kind == wire.ENDED:
                    if content:
                        terminal.say(content.decode(errors="replace"))
                    return False
        except KeyboardInterrupt:  # while a command runs
            self.leave()
            terminal.say("the debugger is left: the call goes on")
            return False
        finally:
            self._is_showing = False

    def collect(self) -> str:
        """The output up to the next prompt, or to the end; a long one without its end."""
        pieces, size = [], 0
        while True:
            kind, content = self._messages.get()
            if kind == wire.OUTPUT:
                size += len(content)
                if size <= LIMITS.debug_page_bytes:
                    pieces.append(content)
            if kind in (wire.PROMPT, wire.ENDED):
                self._prompt = content.decode(errors="replace") if kind == wire.PROMPT else None
                break
        self._is_showing = False
        if size > LIMITS.debug_page_bytes:
            pieces.append(f"\n… of {size} bytes\n".encode())
        text = terminal.visible(b"".join(pieces).decode(errors="replace"))
        lines = _POSITION.findall(text)
        self._position = "".join(f"{line}\n" for line in lines[-2:]) or self._position
        return text

    def _ask_for_command(self, prompt: str) -> None:
        try:
            line = self._ask(prompt)
        except (EOFError, KeyboardInterrupt):
            if not self.is_over:
                sys.stdout.write("\n")
                self.send(wire.QUIT, b"")
            return
        finally:
            self._prompt = None
        word, _, command = line.strip().partition(" ")
        if word != "all" or not command or self.find_others is None:
            self.answer(line)
            return
        terminals = self.find_others()
        for debug_terminal in (self, *terminals.values()):
            debug_terminal.answer(command)
        show_answers(terminals)

    def answer(self, line: str) -> None:
        """Send a command."""
        self._prompt = None
        data = line.encode(errors="surrogateescape")
        if len(data) >= wire_tuning.LIMITS.debug_message_bytes:
            terminal.say(f"a command of {len(data)} bytes is too long, and was not sent")
            data = b""
        self._is_showing = True
        self.send(wire.LINE, data)

    def _ask(self, prompt: str) -> str:
        self._is_asking, self._is_showing = True, False
        try:
            if self.is_over:
                raise EOFError
            return input(_coloured_prompt(prompt))
        finally:
            self._is_asking, self._is_showing = False, True

    def complete(self, text: str, line: str, begin: int, end: int) -> list[str]:
        """The completions of a name, which the debugger in the pod knows."""
        while not self._completions.empty():
            self._completions.get()
        question = {"text": text, "line": line, "begin": begin, "end": end}
        self.send(wire.COMPLETE, wire.encode(question))
        try:
            return self._completions.get(timeout=TIMING.debug_completion_seconds)
        except Empty:
            return []

    def receive(self) -> tuple[int, bytes]:
        """Wait for the next message; the last one is ENDED."""
        return self._messages.get()

    def leave(self) -> None:
        """Close the connection: the call goes on."""
        self.over.set()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def send(self, kind: int, content: bytes) -> None:
        """Send a message."""
        self._write(b"".join(message(bytes([kind]) + content)))

    def _write(self, data: bytes) -> None:
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(data)


def attach(
    session: Session, view: WorkloadView, pod: PodView, path: str, mode: str = "pdb"
) -> DebugTerminal:
    """Attach this program's terminal, or its debug adapter, to a stopped program of a pod."""
    headers = {routes.CLIENT: _user(), routes.DEBUG_MODE: mode}
    return DebugTerminal(*stream.dial_agent(session, view, pod, path, headers))


def show_answers(terminals: Mapping[str, DebugTerminal]) -> None:
    """Wait until each program waits for a command or has ended, and show what it wrote."""
    for label, debug_terminal in terminals.items():
        for line in debug_terminal.collect().splitlines():
            # No line of one program is to look like a line of another one.
            _show(f"({label}) {terminal.printable(line.expandtabs())}\n")


def run(debug_terminal: DebugTerminal) -> None:
    """Debug until the session ends, or Ctrl-C."""
    with line_editor(debug_terminal):
        while debug_terminal.interact():
            continue
    debug_terminal.leave()


class CallerTerminals:
    """The debuggers of one call whose prompts its caller has."""

    def __init__(self, session: Session | None, service: tuple[str, str]) -> None:
        self._session = session
        self._service = service
        self._terminals: dict[str, DebugTerminal] = {}
        # The session that has asked for a command last; empty before the first one has.
        self._speaking = ""
        # Sessions to which this program could not attach.
        self._refused: set[str] = set()

    def handle(self, line: frames.Log) -> bool:
        """Handle what a line says of a debugger; false if the line is to be shown."""
        assert line.debug is not None
        debug_session, kind = line.debug.session, line.debug.kind
        has_prompt = line.debug.mode == "pdb"  # else `kt debug` brings a page or a debug adapter
        is_here = debug_session not in self._refused and has_prompt and is_at_terminal()
        if kind == frames.OVER:
            debug_terminal = self._terminals.pop(debug_session, None)
            if debug_terminal is None:
                return False
            debug_terminal.leave()
            return True
        if kind == frames.HINT or not is_here:
            return is_here
        debug_terminal = self._terminals.get(debug_session)
        try:
            if debug_terminal is None:
                if not line.text:  # another terminal is at this prompt
                    return False
                debug_terminal = self._terminals[debug_session] = self._attach(line, debug_session)
            if not debug_terminal.is_over:
                self._introduce(line, debug_session)
                with line_editor(debug_terminal):
                    debug_terminal.interact()
        except KubetorchError as error:
            self._refused.add(debug_session)
            terminal.say(f"no debugger here: {error}")
            return False
        return True

    def _attach(self, line: frames.Log, debug_session: str) -> DebugTerminal:
        session = self._session or backend.session()
        view = session.get_workload(*self._service)
        pod = next((pod for pod in view.pods if pod.name == line.pod), None)
        if pod is None:
            raise AgentDiedError(line.pod, "the pod of the debugger is gone")
        path = routes.debug_terminal(debug_session, is_caller=True)
        debug_terminal = attach(session, view, pod, path)
        debug_terminal.find_others = lambda: self._others(debug_session)
        return debug_terminal

    def _introduce(self, line: frames.Log, debug_session: str) -> None:
        """Say whose prompt comes next, unless that was the last one's."""
        label = pod_label(line.pod, line.rank)
        if not self._speaking:
            terminal.say(f"{label} has stopped: c goes on, q ends the debugger")
        elif self._speaking != debug_session:
            terminal.say(f"{label} has stopped")
        self._speaking = debug_session

    def _others(self, debug_session: str) -> dict[str, DebugTerminal]:
        """The terminals of the call's other stops, attached if nobody else is."""
        session = self._session or backend.session()
        view = session.get_workload(*self._service)
        stops = [(stop, pod) for pod in view.pods for stop in stops_of(session, view, pod)]
        calls = [stop.call for stop, _ in stops if stop.session == debug_session]
        labels = labels_of(stop for stop, _ in stops)
        terminals = {}
        for stop, pod in stops:
            other = self._terminals.get(stop.session)
            if stop.session == debug_session or stop.call not in calls:
                continue
            if other is None and not stop.user and stop.session not in self._refused:
                path = routes.debug_terminal(stop.session, is_caller=True)
                other = self._terminals[stop.session] = attach(session, view, pod, path)
                other.find_others = partial(self._others, stop.session)
                other.collect()  # where it has stopped, which its own prompt shows again
            if other is not None and not other.is_over:
                terminals[labels[stop.session]] = other
        return terminals


def labels_of(stops: Iterable[DebugView]) -> dict[str, str]:
    """The labels of these stops by session; several stops of one process have numbers, too."""
    labels = {stop.session: pod_label(stop.pod, stop.rank) for stop in stops}
    counts = Counter(labels.values())
    return {
        session: f"{label} #{session.rpartition('-')[2]}" if counts[label] > 1 else label
        for session, label in labels.items()
    }


def stops_of(session: Session, view: WorkloadView, pod: PodView) -> list[DebugView]:
    """The calls of a pod that have stopped."""
    with (
        pod_transport.client(
            session.transport,
            session.address(view, pod),
            session.call_token(view),
            timeout=TIMING.pod_question_seconds,
        ) as http,
        http.request("GET", routes.DEBUGGER) as response,
    ):
        body = response.read(LIMITS.pod_answer_bytes)
    if response.status != 200:
        raise exceptions.rebuild(exceptions.parse_json(body))
    return messages.decode(list[DebugView], body)


def is_at_terminal() -> bool:
    """True if the user can be asked for commands here: at a terminal, or in a notebook."""
    if inpod.runs_calls() or threading.current_thread() is not threading.main_thread():
        return False
    if terminal.is_terminal(sys.stdin) and terminal.is_terminal(sys.stdout):
        return True
    shell = modules.ipython_shell()
    return shell is not None and hasattr(shell, "kernel")


@contextlib.contextmanager
def line_editor(debug_terminal: DebugTerminal) -> Iterator[None]:
    """Edit commands with their own history and completion, and leave those of the program alone."""
    if not terminal.is_terminal(sys.stdin):
        yield
        return
    try:
        import readline  # noqa: PLC0415  # not every Python has it
    except ImportError:
        yield
        return
    programs_lines = [
        readline.get_history_item(number)
        for number in range(1, readline.get_current_history_length() + 1)
    ]
    completer, delimiters = readline.get_completer(), readline.get_completer_delims()
    file = Path("~/.kt/debug_history").expanduser()
    readline.clear_history()
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_completer_delims(" \t\n`@#$%^&*()=+[{]}\\|;:'\",<>?")
    readline.set_completer(_Completer(debug_terminal, readline).complete)
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        readline.set_history_length(LIMITS.debug_history_lines)
        with contextlib.suppress(OSError):
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            readline.write_history_file(file)
            file.chmod(0o600)
        readline.clear_history()
        for line in programs_lines:
            readline.add_history(line)
        readline.set_completer(completer)
        readline.set_completer_delims(delimiters)


class _Completer:
    def __init__(self, debug_terminal: DebugTerminal, readline: Any) -> None:  # noqa: ANN401  # a module
        self._terminal = debug_terminal
        self._readline = readline
        self._names: list[str] = []

    def complete(self, text: str, state: int) -> str | None:
        if state == 0:
            buffer: str = self._readline.get_line_buffer()
            line = buffer.lstrip()
            stripped = len(buffer) - len(line)
            begin = self._readline.get_begidx() - stripped
            end = self._readline.get_endidx() - stripped
            self._names = self._terminal.complete(text, line, begin, end)
        return self._names[state] if state < len(self._names) else None


class TerminalGroup:
    """Sends each command to all programs of a group, and shows their answers with their labels.

    Args:
        terminals: The connections to the programs, by label.
    """

    def __init__(self, terminals: Mapping[str, DebugTerminal]) -> None:
        self._terminals = terminals

    def run(self, commands: Iterable[str]) -> None:
        """Run these commands, or fewer if all programs run to their end; then all go on."""
        try:
            show_answers(self._terminals)
            for command in commands:
                waiting_terminals = self._waiting_terminals()
                for debug_terminal in waiting_terminals.values():
                    debug_terminal.answer(command)
                show_answers(waiting_terminals)
                if not self._waiting_terminals():
                    break
        except KeyboardInterrupt:  # while a command runs
            terminal.say("the debugger is left: the calls go on")
        finally:
            for debug_terminal in self._terminals.values():
                debug_terminal.leave()

    def _waiting_terminals(self) -> dict[str, DebugTerminal]:
        return {label: each for label, each in self._terminals.items() if not each.is_over}


def commands_of_user() -> Iterator[str]:
    """The commands that the user types, up to the end of the input or Ctrl-C."""
    while True:
        try:
            yield input(_GROUP_PROMPT)
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            return


def _names(content: bytes) -> list[str]:
    import json  # noqa: PLC0415  # where a name is completed alone

    try:
        names = json.loads(content)
    except (ValueError, RecursionError):
        return []
    return [terminal.printable(name) for name in names if isinstance(name, str)]


def _show(text: str) -> None:
    text = terminal.shown(text, sys.stdout)
    if _is_coloured():
        text = _POSITION.sub(rf"{_YELLOW}\1{_RESET}", text)
    with contextlib.suppress(OSError, ValueError):  # a broken pipe, a closed file
        sys.stdout.write(text)
        sys.stdout.flush()


def _coloured_prompt(prompt: str) -> str:
    prompt = terminal.printable(prompt)
    # The marks say to readline that colours take no columns.
    return f"\x01{_CYAN}\x02{prompt}\x01{_RESET}\x02" if _is_coloured() else prompt


def _is_coloured() -> bool:
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not is_plain and terminal.is_terminal(sys.stdout) and terminal.is_terminal(sys.stdin)


def _has_default_interrupt() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _user() -> str:
    """The user and the machine, for another user who finds the debugger taken."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError):
        name = "somebody"
    return f"{name}@{socket.gethostname()}".encode("ascii", "replace").decode()
