"""Streams into pods: programs in containers (exec), and connections to ports; and their logs.

Several channels share one WebSocket, as Kubernetes defines it: the first byte of a message is the
channel. Received messages are kept until they are read, up to a bound; then the connection is not
read any more, so that the writing program in the pod has to wait.

Programs speak `v5.channel.k8s.io`, with which standard input can end, or `v4` with a server before
1.30.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kubetorch.errors import (
    KubernetesError,
    KubernetesNotFoundError,
    KubernetesRequestError,
    KubernetesUnavailableError,
)
from kubetorch.k8s import failures
from kubetorch.k8s.client import Client
from kubetorch.k8s.failures import Action
from kubetorch.k8s.resources import Ref
from kubetorch.k8s.session import Call
from kubetorch.k8s.tuning import LIMITS
from kubetorch.lib import deadlines, websocket
from kubetorch.lib.changes import Changes
from kubetorch.lib.websocket import Endpoint

#: Bytes of one sent message.
PIECE = 32 * 1024


class Channels(Endpoint):
    """The client's end (a `websocket.Endpoint`). Belongs to one event loop."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._connection: websocket.Connection | None = None
        self._received: deque[tuple[int, bytes]] = deque()
        self._size = 0
        self._changes = Changes()

    async def receive(self) -> tuple[int, bytes] | None:
        """Channel and content of the next message; `None` when there will be none."""
        while not self._received:
            if self.reason is not None:
                return None
            await self._changes.wait()
        channel, data = self._received.popleft()
        self._size -= len(data)
        if self._size <= LIMITS.unread_low_bytes and self._connection is not None:
            self._connection.read_on(True)
        return channel, data

    async def send(self, channel: int, data: bytes) -> None:
        """Send on a channel; returns when the connection takes more."""
        prefix = bytes([channel])
        for start in range(0, len(data), PIECE):
            connection = await self._writable()
            connection.send(prefix, data[start : start + PIECE])
        await self._writable()

    def send_now(self, channel: int, data: bytes) -> None:
        """Send a short message, even an empty one, without waiting; a closed one drops it."""
        if self._connection is not None:
            self._connection.send(bytes([channel]), data)

    async def close(self) -> None:
        if self._connection is not None:
            self._connection.read_on(True)
            self._connection.close()
        while self.reason is None:  # the connection bounds the time until it is closed
            await self._changes.wait()

    async def _writable(self) -> websocket.Connection:
        while True:
            connection = self._connection
            if connection is None or not connection.is_open:
                raise ConnectionResetError(self.reason or "the connection is closed")
            if not connection.is_congested:
                return connection
            await self._changes.wait()

    # ------------------------------------------------------------------------ the connection calls

    def on_open(self, connection: websocket.Connection) -> None:  # Endpoint's
        self._connection = connection

    def on_message(self, opcode: int, payload: memoryview) -> None:  # Endpoint's
        if not payload:
            return
        self._received.append((payload[0], bytes(payload[1:])))
        self._size += len(payload) - 1
        if self._size > LIMITS.unread_high_bytes and self._connection is not None:
            self._connection.read_on(False)
        self._changes.notify()

    def on_writable(self) -> None:  # Endpoint's
        self._changes.notify()

    def on_close(self, reason: str) -> None:  # Endpoint's
        self.reason = reason
        self._changes.notify()


STDIN, STDOUT, STDERR = 0, 1, 2
_STATUS, _RESIZE, _CLOSE = 3, 4, 255
_V5, _V4 = "v5.channel.k8s.io", "v4.channel.k8s.io"


@dataclass(frozen=True)
class Completed:
    exit_code: int
    stdout: bytes
    stderr: bytes


class Process(Channels):
    """The client's side of a program in a container; an asynchronous context manager.

    Leaving the context closes the streams, which does not end the program: Kubernetes cannot end
    it, but most programs end when their streams do.
    """

    def __init__(self, action: Action) -> None:
        super().__init__()
        self._action = action
        self._exit_code: int | None = None

    async def __aenter__(self) -> Process:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def write(self, data: bytes) -> None:
        """Write to its standard input, as fast as it reads."""
        try:
            await self.send(STDIN, data)
        except ConnectionResetError as error:
            raise self._broken() from error

    def end_input(self) -> None:
        if self._connection is None or self._connection.subprotocol != _V5:
            raise KubernetesError(
                f"cannot end the standard input of {self._action}: the server does not speak {_V5}",
                hint="upgrade the cluster to Kubernetes 1.30 or later",
            )
        self.send_now(_CLOSE, bytes([STDIN]))

    def resize(self, columns: int, rows: int) -> None:
        size = json.dumps({"Width": columns, "Height": rows}).encode()
        self.send_now(_RESIZE, size)

    async def output(self) -> AsyncGenerator[tuple[int, bytes], None]:
        """The output as it comes, to its end: pairs of `STDOUT` or `STDERR` and bytes."""
        while (received := await self.receive()) is not None:
            channel, data = received
            if channel in (STDOUT, STDERR) and data:
                yield channel, data
            elif channel == _STATUS:
                self._exit_code = exit_code(self._action, data)
        if self._exit_code is None:
            raise self._broken()

    async def wait(self) -> int:
        """Wait for the exit code; output that was not read is dropped."""
        async for _ in self.output():
            pass
        assert self._exit_code is not None
        return self._exit_code

    def _broken(self) -> KubernetesUnavailableError:
        reason = self.reason or "the connection is closed"
        return KubernetesUnavailableError(
            f"cannot {self._action}: the connection ended before the program did: {reason}",
            hint="whether the program still runs is not known; look in the pod",
        )


def exit_code(action: Action, data: bytes) -> int:
    status = failures.parse_status(data) or _loose_status(data)
    if status.get("status") == "Success":
        return 0
    details = status.get("details") or {}
    for cause in details.get("causes") or []:
        if cause.get("reason") == "ExitCode" and str(cause.get("message")).isdigit():
            return int(cause["message"])
    server_message = "" if status else data[:300].decode(errors="replace")
    raise failures.refused_by(action, status, server_message=server_message)


def _loose_status(data: bytes) -> dict[str, Any]:
    """A `Status` of a kubelet, which leaves out the field `kind`."""
    try:
        status = json.loads(data)
    except ValueError:
        return {}
    return status if isinstance(status, dict) and "status" in status else {}


async def start(
    client: Client,
    pod: Ref,
    command: Sequence[str],
    *,
    container: str | None = None,
    stdin: bool = False,
    tty: bool = False,
) -> Process:
    options = {
        "container": container or "",
        "stdin": "1" if stdin else "",
        "stdout": "1",
        "stderr": "" if tty else "1",  # a terminal has one output
        "tty": "1" if tty else "",
    }
    query = [("command", part) for part in command]
    query += [(name, value) for name, value in options.items() if value]
    ref = replace(pod, subresource="exec")
    action = client.action("get", ref)
    process = Process(action)
    call = Call(action, "GET", client.path(ref), tuple(query))
    await client.session.open_channel(call, process, (_V5, _V4))
    return process


async def run(
    client: Client,
    pod: Ref,
    command: Sequence[str],
    *,
    container: str | None = None,
    timeout: float,
    limit: int = LIMITS.command_output_bytes,
) -> Completed:
    outputs = {STDOUT: bytearray(), STDERR: bytearray()}
    async with (
        deadlines.timeout(timeout),
        await start(client, pod, command, container=container) as process,
    ):
        async for stream, data in process.output():
            outputs[stream] += data[: limit - len(outputs[stream])]
        code = await process.wait()
    return Completed(code, bytes(outputs[STDOUT]), bytes(outputs[STDERR]))


# ------------------------------------------------------------------------------------------ ports

#: Channels of a port.
PORT_DATA, PORT_ERROR = 0, 1


async def connect_port(client: Client, pod: Ref, port: int, endpoint: Endpoint) -> Action:
    """Open a connection to a port of a pod whose messages go to an endpoint.

    Each connection is a WebSocket of its own, so a slowly read connection holds up no other. The
    first byte of a message is `PORT_DATA` or `PORT_ERROR`; the first message of each channel only
    repeats the port. Whether a program listens there is known only when a message is received.
    """
    ref = replace(pod, subresource="portforward")
    action = client.action("get", ref)
    call = Call(action, "GET", client.path(ref), (("ports", str(port)),))
    await client.session.open_channel(call, endpoint, ("v4.channel.k8s.io",))
    return action


# ------------------------------------------------------------------------------------------- logs

#: A kubelet's answer, with status 200, for a container that it has removed.
_REMOVED_CONTAINER = b"unable to retrieve container logs for "
#: A kubelet's answer, with status 200, for a log that it has just removed for the next run's.
_REMOVED_LOG = b"failed to try resolving symlinks in path "


@dataclass(frozen=True)
class LogOptions:
    container: str | None = None
    previous: bool = False
    tail: int | None = None
    timestamps: bool = False

    def query(self) -> tuple[tuple[str, str], ...]:
        parameters = {
            "container": self.container,
            "previous": "true" if self.previous else None,
            "tailLines": self.tail,
            "timestamps": "true" if self.timestamps else None,
        }
        return tuple((name, str(value)) for name, value in parameters.items() if value is not None)


async def read_log(
    client: Client,
    pod: Ref,
    options: LogOptions | None = None,
    *,
    limit: int = LIMITS.pod_log_bytes,
) -> bytes:
    """Read the log as it is now."""
    ref, parameters = replace(pod, subresource="log"), (options or LogOptions()).query()
    query = (*parameters, ("limitBytes", str(limit)))
    call = Call(client.action("get", ref), "GET", client.path(ref), query)
    log = await client.session.fetch(call)
    if log.startswith(_REMOVED_CONTAINER):
        raise KubernetesNotFoundError(
            f"{call.action}: {log.decode('utf-8', 'replace').strip()}",
            hint="the container is not there any more; its next run may have a log",
        )
    return log


async def read_ended_log(client: Client, pod: Ref, options: LogOptions) -> bytes:
    """The log of a container's former run, or of its present run if the former log is removed."""
    try:
        log = await read_log(client, pod, replace(options, previous=True))
    except KubernetesRequestError:  # 400: there was none; 404: it was removed
        log = b""
    if log and not log.startswith(_REMOVED_LOG):
        return log
    return await read_log(client, pod, replace(options, previous=False))
