"""A client of the debug adapter protocol, which sends what VS Code sends."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Mapping

from tests.local.debugger.sessions import DEADLINE


class ProtocolClient:
    """A client of the debug adapter at a port."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.lines: list[str] = []
        self._number = 0
        self._events: list[dict] = []

    def connect(self) -> None:
        assert self.port, "".join(self.lines)
        self._socket = socket.create_connection(("127.0.0.1", self.port), DEADLINE)
        self._stream = self._socket.makefile("rwb")

    def attach(self, breakpoints: Mapping[str, list[int]], **arguments) -> list[dict]:
        """The requests of VS Code up to the first stop; returns the breakpoints that were set."""
        self.connect()
        self.request("initialize", adapterID="debugpy", clientID="vscode", pathFormat="path")
        attach = self._send("attach", {"justMyCode": False, **arguments})
        self.event("initialized")
        set_breakpoints = []
        for path, lines in breakpoints.items():
            source = {"path": path}
            answer = self.request(
                "setBreakpoints", source=source, breakpoints=[{"line": line} for line in lines]
            )
            set_breakpoints += answer["breakpoints"]
        self.request("setExceptionBreakpoints", filters=["uncaught"])
        self.request("configurationDone")
        self._answer(attach)
        return set_breakpoints

    def stop(self) -> tuple[int, list[dict]]:
        """Wait for a stop; returns its thread and frames, the innermost first."""
        thread = self.event("stopped")["threadId"]
        return thread, self.request("stackTrace", threadId=thread)["stackFrames"]

    def variables(self, frame: int) -> dict[str, str]:
        scopes = self.request("scopes", frameId=frame)["scopes"]
        reference = next(s for s in scopes if s["name"] == "Locals")["variablesReference"]
        found = self.request("variables", variablesReference=reference)["variables"]
        return {v["name"]: v["value"] for v in found if v["name"] != "special variables"}

    def request(self, command: str, **arguments) -> dict:
        return self._answer(self._send(command, arguments))

    def _send(self, command: str, arguments: dict) -> int:
        self._number += 1
        message = {"seq": self._number, "type": "request", "command": command}
        data = json.dumps({**message, "arguments": arguments}).encode()
        self._stream.write(b"Content-Length: %d\r\n\r\n%s" % (len(data), data))
        self._stream.flush()
        return self._number

    def _answer(self, number: int) -> dict:
        while (message := self._receive()).get("request_seq") != number:
            self._events.append(message)
        assert message["success"], message
        return message.get("body", {})

    def event(self, name: str) -> dict:
        """Wait for an event; those before it are forgotten."""
        while True:
            message = self._events.pop(0) if self._events else self._receive()
            if message.get("event") == name:
                return message.get("body", {})

    def messages_until(self, name: str) -> list[dict]:
        """All messages that come before an event, which was not waited for yet."""
        messages = self._events
        while not any(message.get("event") == name for message in messages):
            messages.append(self._receive())
        return messages

    def _receive(self) -> dict:
        length = 0
        while (line := self._stream.readline().strip()) or not length:
            assert line or length, f"the connection is closed: {self.lines}"
            length = int(line.split(b":")[1])
        return json.loads(self._stream.read(length))

    def terminated(self) -> None:
        """Wait for the end of the session, and leave as VS Code does."""
        self.event("terminated")
        self.request("disconnect", terminateDebuggee=False)
        self.leave()

    def leave(self) -> None:
        if hasattr(self, "_socket"):
            self._stream.close()
            self._socket.close()


class AdapterClient(ProtocolClient):
    """A client of `kt debug --vscode`, and the program."""

    def __init__(self, *words: str, folder: str, environ: Mapping[str, str]) -> None:
        self.program = subprocess.Popen(
            ["kt", "debug", *words, "--vscode", "--local-port", "0"],
            cwd=folder,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        super().__init__(0)
        for line in self.program.stdout:
            self.lines.append(line)
            if match := re.search(r"The debug adapter is at 127\.0\.0\.1:(\d+)", line):
                self.port = int(match[1])
                break

    def end(self) -> str:
        """Wait for the end of the program; returns all that it wrote."""
        rest, _ = self.program.communicate(timeout=DEADLINE)
        return "".join(self.lines) + rest

    def close(self) -> None:
        self.program.kill()
        self.program.communicate()
        self.leave()
