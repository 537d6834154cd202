"""A pod whose program is written by a test, at the other end of a terminal's connection."""

from __future__ import annotations

import contextlib
import json
import socket
import threading

from kubetorch.lib import websocket_protocol
from kubetorch.sdk.debugger.terminal import DebugTerminal
from kubetorch.wire import debugger as wire
from tests.local.debugger.sessions import DEADLINE


def frame(opcode: int, payload: bytes) -> bytes:
    return websocket_protocol.frame_header(opcode, len(payload), masked=False) + payload


def message(kind: int, content: str | bytes) -> bytes:
    data = content.encode() if isinstance(content, str) else content
    return frame(websocket_protocol.BINARY, bytes([kind]) + data)


class FakePod:
    """The end of the pod, and the terminal that is attached to it."""

    def __init__(self, rest: bytes = b"") -> None:
        self.socket, connection = socket.socketpair()
        self.socket.settimeout(DEADLINE)
        self.terminal = DebugTerminal(connection, rest)

    def send(self, kind: int, content: str | bytes = b"") -> None:
        self.socket.sendall(message(kind, content))

    def close(self) -> None:
        self.terminal.leave()
        self.socket.close()


class FakeDebugpy(FakePod):
    """A pod whose debugpy answers every request, and sends what a test has it send."""

    def __init__(self) -> None:
        super().__init__()
        self._data = bytearray()
        self._parser = websocket_protocol.Parser(self, masked=True, max_message=1 << 20)
        self.is_attached = threading.Event()
        self.send(wire.STOPPED, "{}")
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while size := self.socket.recv_into(self._parser.get_buffer()):
                self._parser.advance(size)

    def on_message(self, opcode: int, payload: memoryview) -> None:
        kind, content = payload[0], bytes(payload[1:])
        if kind == wire.START:
            self.send(wire.READY, json.dumps({"folder": "/kt/code/0/shop"}))
        elif kind == wire.ADAPTER:
            self._data += content
            while (end := self._data.find(b"\r\n\r\n")) >= 0:
                begin = end + 4
                size = int(bytes(self._data[:end]).partition(b":")[2])
                if len(self._data) < begin + size:
                    return
                request = json.loads(bytes(self._data[begin : begin + size]))
                del self._data[: begin + size]
                self._answer(request)

    def _answer(self, request: dict) -> None:
        command = request["command"]
        body = {"process": {"pid": 4711, "ppid": 1}} if command == "pydevdSystemInfo" else {}
        if command == "pydevdAuthorize":
            body = {"clientAccessToken": None}
        self.speak(
            type="response",
            request_seq=request["seq"],
            command=command,
            success=True,
            body=body,
        )
        if command == "attach":
            self.is_attached.set()

    def speak(self, **fields) -> None:
        """Send a message of the debug adapter protocol."""
        data = json.dumps({"seq": 1, **fields}).encode()
        self.send(wire.ADAPTER, b"Content-Length: %d\r\n\r\n%s" % (len(data), data))

    # Handler's, which the pod does not need.

    def on_large(self, head: memoryview, length: int) -> None:
        return None

    def on_placed(self, head: bytes, rest: memoryview) -> None:
        self.on_message(websocket_protocol.BINARY, memoryview(head + bytes(rest)))

    def on_control(self, opcode: int, payload: bytes) -> None:
        pass
