"""debugpy's debug adapter on this machine, between VS Code and a stopped program of a pod.

    VS Code ── port ── AdapterServer ── stdio ── adapter ── port ── AdapterServer ── DebugTerminal

`AdapterServer` takes one client, of this user alone, on loopback. The adapter has no port for
clients. It has one for debugpy, which any program of this machine may reach first: requests of the
client after `attach` are held back until that connection is known to be the one of this process.
debugpy in the pod obeys only an adapter that has the token.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from kubetorch.errors import CallRefusedError, ProtocolError, SpecError
from kubetorch.lib import terminal
from kubetorch.lib.files import write_atomically
from kubetorch.lib.sockets import LOOPBACK
from kubetorch.sdk.debugger import local_peers
from kubetorch.sdk.debugger.terminal import DebugTerminal
from kubetorch.sdk.tuning import LIMITS, TIMING
from kubetorch.wire import debugger as wire
from kubetorch.wire import tuning as wire_tuning

_TOKEN = "KT_DEBUG_ADAPTER_TOKEN"
# The token is not among the words of the command, which every user of the machine can read.
_ADAPTER = (
    "import os, runpy, sys; "
    f"sys.argv = ['debugpy.adapter', '--server-access-token', os.environ.pop('{_TOKEN}')]; "
    "runpy.run_module('debugpy.adapter', run_name='__main__')"
)
#: The events that a client gets. A pod may send more: by `debugpyAttach` VS Code starts a program.
_EVENTS = re.compile(
    "breakpoint|capabilities|continued|exited|initialized|invalidated|loadedSource|memory|module|"
    "output|process|progressEnd|progressStart|progressUpdate|stopped|terminated|thread"
)
#: The beginning of a message, which no page in a browser can send: its first word is a method.
_BEGINNING = b"Content-Length:"

Message = dict[str, Any]


def debugpy_version() -> str:
    """The version of debugpy on this machine.

    Raises:
        SpecError: It is not installed, or too old.
    """
    try:
        version = importlib.metadata.version("debugpy")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    numbers = [[int(text) for text in re.findall(r"\d+", v)] for v in (version, wire.DEBUGPY)]
    if numbers[0] < numbers[1]:
        state = f"debugpy {version} is too old" if version else "debugpy is not installed here"
        raise SpecError(
            state, hint=f"pip install 'kubetorch[debug]' brings {wire.DEBUGPY} or a later one"
        )
    return version


class AdapterServer:
    """Serves one client of the debug adapter protocol, until the debugger is over.

    Args:
        debug_terminal: The connection to the stopped program.
        folder: The project of the program on this machine.
        source_file: The path of the callable's file in the project, if that is known.
    """

    def __init__(self, debug_terminal: DebugTerminal, folder: Path, source_file: str) -> None:
        self._terminal = debug_terminal
        self._folder = folder
        self._source_file = source_file
        self._remote_folder = ""
        self._token = secrets.token_hex(32)
        self._client: socket.socket | None = None
        self._adapter: subprocess.Popen[bytes] | None = None
        #: The connection to the adapter, which takes this process for debugpy.
        self._adapter_socket: socket.socket | None = None
        self._adapter_reached = threading.Event()
        self._is_attached = threading.Event()
        self._problem = ""

    def run(self, port: int, report: Callable[[str], None]) -> None:
        """Serve the client that comes to this port, until the debugger is over.

        Raises:
            SpecError: debugpy is not installed here, or the port is taken.
            CallRefusedError: The pod does not have debugpy, or the call has ended before a client
                came.
        """
        version = debugpy_version()
        try:
            server = socket.create_server((LOOPBACK, port))
        except OSError as error:
            raise SpecError(
                f"port {port} of this machine cannot be used: {error.strerror}",
                hint="--local-port takes another one; launch.json must name the same",
            ) from error
        with server:
            self._start_debugpy(version)
            report(f"The debug adapter is at {LOOPBACK}:{server.getsockname()[1]}")
            client = self._accept(server)
        try:
            self._serve(client)
        finally:
            self._close()
        if self._problem:
            raise CallRefusedError(self._problem)

    def _start_debugpy(self, version: str) -> None:
        start_request = wire.encode({"token": self._token, "version": version})
        has_stopped = False
        while (message := self._terminal.receive())[0] != wire.READY:
            if message[0] == wire.STOPPED and not has_stopped:
                has_stopped = True
                self._terminal.send(wire.START, start_request)
            self._show(*message)
        content = message[1]
        paths = wire.decode(content)
        file, suffix = str(paths.get("file", "")), f"/{self._source_file}"
        is_file_known = bool(self._source_file) and file.endswith(suffix)
        folder = file.removesuffix(suffix) if is_file_known else str(paths.get("folder", ""))
        self._remote_folder = folder

    def _show(self, kind: int, content: bytes) -> None:
        """Show output, and raise at the end of the session."""
        text = content.decode(errors="replace")
        if kind == wire.OUTPUT:
            terminal.say(text.rstrip("\n"))
        elif kind == wire.ENDED:
            raise CallRefusedError(text or "the debugger is over")

    def _accept(self, server: socket.socket) -> socket.socket:
        server.settimeout(TIMING.debug_client_poll_seconds)
        while not self._terminal.is_over:
            with contextlib.suppress(TimeoutError):
                client, _ = server.accept()
                if not local_peers.is_of_this_user(client):
                    terminal.say_once("refused a program of another user at the port of VS Code")
                elif not _speaks_the_protocol(client):
                    terminal.say_once("refused a program that is no client at the port of VS Code")
                else:
                    return client
                client.close()
        while True:
            self._show(*self._terminal.receive())

    # ------------------------------------------------------------------------------- the relays

    def _serve(self, client: socket.socket) -> None:
        self._client = client
        self._adapter = subprocess.Popen(
            [sys.executable, "-c", _ADAPTER],
            env={**os.environ, _TOKEN: self._token},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C ends it by way of this program
        )
        relay_threads = [
            threading.Thread(target=self._guarded, args=(relay,), daemon=True)
            for relay in (self._relay_requests, self._relay_answers, self._relay_to_pod)
        ]
        for thread in relay_threads:
            thread.start()
        while True:
            kind, content = self._terminal.receive()
            if kind == wire.ADAPTER:
                if not self._adapter_reached.wait(TIMING.debug_adapter_seconds):
                    raise ProtocolError("debugpy in the pod answers before the adapter has asked")
                with contextlib.suppress(OSError):
                    assert self._adapter_socket is not None
                    self._adapter_socket.sendall(content)
            elif kind == wire.ENDED:
                if content:  # else there is a problem, which is raised
                    terminal.say(content.decode(errors="replace"))
                break
            else:
                self._show(kind, content)
        if (
            self._adapter_socket is not None
        ):  # the adapter tells its client that the session has ended
            with contextlib.suppress(OSError):
                self._adapter_socket.shutdown(socket.SHUT_RDWR)
        relay_threads[0].join(TIMING.debug_farewell_seconds)

    def _guarded(self, relay: Callable[[], None]) -> None:
        """Run a relay; the session ends with the client, with the adapter, and by a problem."""
        try:
            relay()
        except ProtocolError as error:
            self._problem = error.message
            self._terminal.end("")
        except (OSError, ValueError):  # closed by the other end, or by `_close`
            pass
        except Exception as error:  # noqa: BLE001  # else the session would go on without a relay
            self._problem = f"the debug adapter failed: {error!r}"
            self._terminal.end("")
        if relay != self._relay_to_pod:
            self._terminal.end("the debug adapter is closed: the call goes on")

    def _relay_requests(self) -> None:
        assert self._client is not None
        assert self._adapter is not None
        assert self._adapter.stdin is not None
        with self._client.makefile("rb") as requests:
            while (message := read(requests)) is not None:
                command = message.get("command")
                write(self._adapter.stdin, self._for_adapter(message))
                if command == "attach" and not self._is_attached.wait(TIMING.debug_adapter_seconds):
                    raise ProtocolError(
                        "the debug adapter did not attach to the pod: another program of this "
                        "machine may have dialled its port first"
                    )

    def _for_adapter(self, message: Message) -> Message:
        """Change a request of the client for the adapter."""
        arguments = message.get("arguments") or {}
        if not isinstance(arguments, dict):
            raise ProtocolError(f"the arguments of a request are no object: {arguments!r:.80}")
        if message.get("command") == "attach":
            for name in ("connect", "host", "port", "processId", "subProcessId"):
                arguments.pop(name, None)
            arguments["listen"] = {"host": LOOPBACK, "port": 0}
            # The terminal shows the lines of the call; children of the program are not debugged.
            arguments["redirectOutput"] = arguments["subProcess"] = False
            mapping = {"localRoot": str(self._folder), "remoteRoot": self._remote_folder}
            arguments["pathMappings"] = arguments.get("pathMappings") or [mapping]
        elif message.get("command") in ("disconnect", "terminate"):
            # However a debugger ends, the call goes on.
            message = {**message, "command": "disconnect"}
            arguments = {"terminateDebuggee": False}
        return {**message, "arguments": arguments}

    def _relay_answers(self) -> None:
        assert self._client is not None
        assert self._adapter is not None
        assert self._adapter.stdout is not None
        with self._client.makefile("wb") as answers:
            while (message := read(self._adapter.stdout)) is not None:
                event = message.get("event")
                # Only the first is the adapter's own: it passes on what events the pod makes up.
                if event == "debugpyWaitingForServer" and self._adapter_socket is None:
                    self._adapter_socket = socket.create_connection(
                        (LOOPBACK, message["body"]["port"]), TIMING.debug_adapter_seconds
                    )
                    self._adapter_socket.settimeout(None)
                    self._adapter_reached.set()
                kind = message.get("type")
                if kind == "response" or (kind == "event" and _EVENTS.fullmatch(str(event))):
                    write(answers, message)

    def _relay_to_pod(self) -> None:
        if not self._adapter_reached.wait(TIMING.debug_client_seconds):
            raise ProtocolError(
                f"the client has not asked to attach within {TIMING.debug_client_seconds:g} s"
            )
        assert self._adapter_socket is not None
        chunk_bytes = wire_tuning.LIMITS.debug_message_bytes - 1  # its kind counts
        with self._adapter_socket.makefile("rb") as requests:
            while (message := read(requests)) is not None:
                data = _packed(message)
                for begin in range(0, len(data), chunk_bytes):
                    self._terminal.send(wire.ADAPTER, data[begin : begin + chunk_bytes])
                if message.get("command") == "attach":
                    self._is_attached.set()

    def _close(self) -> None:
        self._terminal.leave()
        for connection in (self._client, self._adapter_socket):
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()
        if self._adapter is not None:
            self._adapter.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the system
                self._adapter.wait(TIMING.debug_adapter_seconds)
            for pipe in (self._adapter.stdin, self._adapter.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()


# ------------------------------------------------------------------------------------- the protocol


def read(stream: IO[bytes]) -> Message | None:
    """Read the next message of the debug adapter protocol; `None` at the end of the stream.

    Raises:
        ProtocolError: The bytes are no such message, but for example a request of a browser.
    """
    length = -1
    while line := stream.readline(LIMITS.debug_adapter_header_bytes):
        name, _, value = line.strip().partition(b":")
        if name == b"Content-Length" and value.strip().isdigit():
            length = int(value)
        elif name == b"" and 0 <= length <= LIMITS.debug_adapter_message_bytes:
            content = stream.read(length)
            return _parse(content) if len(content) == length else None
        elif name != b"Content-Type" or length < 0:
            break
    if not line:
        return None
    raise ProtocolError(f"no message of the debug adapter protocol begins with {line[:40]!r}")


def _parse(content: bytes) -> Message:
    try:
        message = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a message of the debug adapter is no JSON: {error}") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"a message of the debug adapter is no object: {content[:40]!r}")
    return message


def write(stream: IO[bytes], message: Message) -> None:
    stream.write(_packed(message))
    stream.flush()


def _packed(message: Message) -> bytes:
    data = json.dumps(message).encode()
    return b"Content-Length: %d\r\n\r\n" % len(data) + data


def _speaks_the_protocol(client: socket.socket) -> bool:
    """True if a connection begins with a message; it waits for that, and reads nothing."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, len(_BEGINNING))
    client.settimeout(TIMING.debug_client_begin_seconds)
    try:
        return client.recv(len(_BEGINNING), socket.MSG_PEEK) == _BEGINNING
    except OSError:
        return False
    finally:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        client.settimeout(None)


# --------------------------------------------------------------------------------------- VS Code


def launch_configuration(name: str, port: int) -> Message:
    """The configuration of VS Code that attaches to `AdapterServer`, which maps the paths."""
    return {
        "name": f"kubetorch: {name}",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": LOOPBACK, "port": port},
        "justMyCode": False,
    }


def write_launch_json(folder: Path, configuration: Message) -> Path:
    """Add a configuration to the `.vscode/launch.json` of a folder, in the place of its former one.

    Raises:
        SpecError: The file cannot be written, or not be read, for example because it has comments.
    """
    file = folder / ".vscode" / "launch.json"
    document: Message = {"version": "0.2.0", "configurations": []}
    try:
        if file.exists():
            document = json.loads(file.read_text(encoding="utf-8"))
        entries = document.setdefault("configurations", [])
        entries[:] = [entry for entry in entries if entry.get("name") != configuration["name"]]
        entries.append(configuration)
        text = json.dumps(document, indent=4, ensure_ascii=False) + "\n"
        file.parent.mkdir(exist_ok=True)
        mode = file.stat().st_mode & 0o777 if file.exists() else 0o644
        write_atomically(file.resolve(), text.encode(), mode=mode)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise SpecError(
            f"{file} cannot be changed: {error}",
            hint=f"add this to its configurations: {json.dumps(configuration)}",
        ) from error
    return file
