"""Messages between a program that stops for a debugger and the terminal that debugs the program.

    stopped program ── Unix socket ── agent ── WebSocket ── terminal

The program dials the agent: no process but the agent listens, and the agent asks a terminal for the
token of a shell. The agent passes messages on, and reads those that say how the session stands.

    program     HELLO, then for each stop STOPPED, (OUTPUT | PROMPT | COMPLETIONS)*, RUNS;  ENDED
    agent       ATTACHED when a terminal is there; LEFT when the debugger is over, with the reason
    terminal    LINE after a PROMPT | COMPLETE | QUIT

A terminal that brings a debug adapter says so when it attaches (`DAP`). Then debugpy in the program
and the adapter talk with each other, after

    terminal    START with the access token that debugpy demands of the adapter
    program     READY with the folder of the project
    both        ADAPTER: bytes of the debug adapter protocol

On the Unix socket a message has a header, on the WebSocket it is a binary message that begins with
its kind. ADAPTER are bytes, LINE, OUTPUT, PROMPT, ENDED and LEFT are text, the others are JSON.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from kubetorch.errors import ProtocolError
from kubetorch.wire.tuning import LIMITS

HELLO: Final = 1
STOPPED: Final = 2
OUTPUT: Final = 3
PROMPT: Final = 4
RUNS: Final = 5
COMPLETIONS: Final = 6
ENDED: Final = 7
READY: Final = 8
ATTACHED: Final = 16
LEFT: Final = 17
LINE: Final = 18
COMPLETE: Final = 19
QUIT: Final = 20
START: Final = 21
#: Of both ends.
ADAPTER: Final = 32

#: Kinds that the agent accepts from a program, and from a terminal.
FROM_PROGRAM: Final = frozenset(
    {HELLO, STOPPED, OUTPUT, PROMPT, RUNS, COMPLETIONS, ENDED, READY, ADAPTER}
)
FROM_TERMINAL: Final = frozenset({LINE, COMPLETE, QUIT, START, ADAPTER})

_HEADER: Final = struct.Struct("<BI")

#: Environment variable with the path of the agent's socket.
SOCKET: Final = "KT_DEBUGGER"
#: Environment variable with the seconds that a stop waits for a terminal.
WAIT: Final = "KT_DEBUG_WAIT"
#: Environment variable with the mode of debuggers that name none.
MODE: Final = "KT_DEBUG_MODE"
MODES: Final = ("pdb", "pdb-ui", "dap")
#: The mode of terminals that bring a debug adapter.
DAP: Final = "dap"
PORT: Final = 5678
#: The oldest version of debugpy that serves, in pods too.
DEBUGPY: Final = "1.8.22"


class Debugging(NamedTuple):
    """The debugger of a call.

    Attributes:
        stops: The call stops before the first line of the user's function.
        post_mortem: The call stops where an exception was raised that leaves the function.
        node: In a distributed service the node whose last local process stops at the first line.
    """

    mode: str = "pdb"
    port: int = PORT
    stops: bool = False
    post_mortem: bool = False
    node: int | None = None


#: The sentence before the line with the command that attaches.
ACTIVATED: Final = (
    "Distributed breakpoint activated. To attach a debugger, run the following command:"
)

#: The end of a debugger that was left.
LEFT_NORMALLY: Final = "PDB session ended normally: the call goes on"
#: The end of a debugger of code outside of calls, which was not left, and may stop again.
RUNS_ON: Final = "the program goes on"


def attach_command(pod: str, port: int, namespace: str, mode: str, host: str = "") -> str:
    """The command that attaches to a stop; programs parse this line."""
    line = f"kt debug {pod} --port {port} --namespace {namespace} --mode {mode}"
    return f"{line} --pod-ip {host}" if host and mode == "pdb" else line


def pack(kind: int, content: str | bytes | dict[str, Any] | list[str] = b"") -> bytes:
    """A message for the Unix socket."""
    data = encode(content)
    return _HEADER.pack(kind, len(data)) + data


def encode(content: str | bytes | dict[str, Any] | list[str]) -> bytes:
    if isinstance(content, str):
        return content.encode(errors="surrogateescape")
    return content if isinstance(content, bytes) else json.dumps(content).encode()


def decode(content: bytes) -> dict[str, Any]:
    """The fields of a message that is a JSON object."""
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a message of a debugger: {error}") from error
    if not isinstance(fields, dict):
        raise ProtocolError("a message of a debugger that is no object")
    return fields


class Messages:
    """The messages in the bytes of the Unix socket."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """The messages that are complete with these bytes."""
        buffer = self._buffer
        buffer += data
        while len(buffer) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(buffer)
            if length > LIMITS.debug_message_bytes:
                raise ProtocolError(f"a message of a debugger that claims {length} bytes")
            end = _HEADER.size + length
            if len(buffer) < end:
                return
            content = bytes(buffer[_HEADER.size : end])
            del buffer[:end]
            yield kind, content
