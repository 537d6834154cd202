"""Programs in containers: started (exec) or joined (attach), with their three streams.

Spoken is `v5.channel.k8s.io`, with which standard input can end, or `v4`, where a server (before
1.30) knows no better.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from kubetorch.errors import KubernetesError, KubernetesUnavailableError
from kubetorch.k8s import failures
from kubetorch.k8s.channels import Channels
from kubetorch.k8s.client import Client
from kubetorch.k8s.failures import Action
from kubetorch.k8s.resources import Ref
from kubetorch.k8s.session import Call
from kubetorch.lib import deadlines

STDIN, STDOUT, STDERR = 0, 1, 2
_STATUS, _RESIZE, _CLOSE = 3, 4, 255
_V5, _V4 = "v5.channel.k8s.io", "v4.channel.k8s.io"


@dataclass(frozen=True)
class Completed:
    """A program that has ended.

    Attributes:
        exit_code: What it ended with.
        stdout, stderr: What it wrote.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes


class Process:
    """A program in a container, seen from here; an asynchronous context manager.

    Leaving the context closes the streams. The program is not ended by that: Kubernetes cannot end
    one, but most end when their streams do.
    """

    def __init__(self, channels: Channels, action: Action) -> None:
        self._channels = channels
        self._action = action
        self._exit_code: int | None = None

    async def __aenter__(self) -> Process:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the streams."""
        self._channels.close()
        await self._channels.wait_closed()

    async def write(self, data: bytes) -> None:
        """Write to its standard input, as fast as it reads.

        Raises:
            KubernetesUnavailableError: The connection is gone.
        """
        try:
            await self._channels.send(STDIN, data)
        except ConnectionResetError as error:
            raise self._broken() from error

    def end_input(self) -> None:
        """Its standard input ends.

        Raises:
            KubernetesError: The server is too old for that.
        """
        if self._channels.subprotocol != _V5:
            raise KubernetesError(
                f"cannot end the standard input of {self._action}: the server does not speak {_V5}",
                hint="upgrade the cluster to Kubernetes 1.30 or later",
            )
        self._channels.send_now(_CLOSE, bytes([STDIN]))

    def resize(self, columns: int, rows: int) -> None:
        """The terminal has this size now."""
        size = json.dumps({"Width": columns, "Height": rows}).encode()
        self._channels.send_now(_RESIZE, size)

    async def output(self) -> AsyncGenerator[tuple[int, bytes], None]:
        """What it writes, as it comes: pairs of `STDOUT` or `STDERR` and bytes, until it ends.

        Raises:
            KubernetesRequestError: It could not be started.
            KubernetesUnavailableError: The connection broke before the program ended.
        """
        while (received := await self._channels.receive()) is not None:
            channel, data = received
            if channel in (STDOUT, STDERR) and data:
                yield channel, data
            elif channel == _STATUS:
                self._exit_code = exit_code(self._action, data)
        if self._exit_code is None:
            raise self._broken()

    async def wait(self) -> int:
        """Its exit code, when it has ended; output that was not read is dropped.

        Raises:
            KubernetesRequestError, KubernetesUnavailableError: As `output`.
        """
        async for _ in self.output():
            pass
        assert self._exit_code is not None
        return self._exit_code

    def _broken(self) -> KubernetesUnavailableError:
        reason = self._channels.reason or "the connection is closed"
        return KubernetesUnavailableError(
            f"cannot {self._action}: the connection ended before the program did: {reason}",
            hint="whether the program still runs is not known; look in the pod",
        )


def exit_code(action: Action, data: bytes) -> int:
    """What the status of a program says.

    Raises:
        KubernetesRequestError: It was not started.
    """
    status = failures.parse_status(data) or _loose_status(data)
    if status.get("status") == "Success":
        return 0
    details = status.get("details") or {}
    for cause in details.get("causes") or []:
        if cause.get("reason") == "ExitCode" and str(cause.get("message")).isdigit():
            return int(cause["message"])
    code = status.get("code")
    said = "" if status else data[:300].decode(errors="replace")
    raise failures.refused_by(action, code if isinstance(code, int) else 500, status, said=said)


def _loose_status(data: bytes) -> dict[str, Any]:
    """A `Status` of a kubelet, which leaves out what kind of object it is."""
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
    """Start a program in a container.

    Args:
        client: Asks the server.
        pod: The pod.
        command: The program, with its arguments; no shell reads it.
        container: The container; the pod's default one when not given.
        stdin: Whether it has a standard input.
        tty: Whether it has a terminal; everything comes as `STDOUT` then.
    """
    arguments = tuple(("command", part) for part in command)
    return await _open(client, pod, "exec", arguments + _streams(container, stdin, tty))


async def attach(
    client: Client,
    pod: Ref,
    *,
    container: str | None = None,
    stdin: bool = False,
    tty: bool = False,
) -> Process:
    """Join the first program of a container.

    Args:
        client: Asks the server.
        pod: The pod.
        container: The container; the pod's default one when not given.
        stdin: Whether to write to its standard input, which the container has to have.
        tty: Whether the container has a terminal.
    """
    return await _open(client, pod, "attach", _streams(container, stdin, tty))


async def run(
    client: Client,
    pod: Ref,
    command: Sequence[str],
    *,
    container: str | None = None,
    timeout: float,
    limit: int = 16 * 1024**2,
) -> Completed:
    """Run a program in a container to its end.

    Args:
        client: Asks the server.
        pod: The pod.
        command: The program, with its arguments; no shell reads it.
        container: The container; the pod's default one when not given.
        timeout: Seconds that it may take.
        limit: Bytes that are kept of each stream; what comes later is dropped.

    Raises:
        TimeoutError: It has not ended; it may still run.
    """
    kept = {STDOUT: bytearray(), STDERR: bytearray()}
    async with (
        deadlines.timeout(timeout),
        await start(client, pod, command, container=container) as process,
    ):
        async for stream, data in process.output():
            kept[stream] += data[: limit - len(kept[stream])]
        code = await process.wait()
    return Completed(code, bytes(kept[STDOUT]), bytes(kept[STDERR]))


def _streams(container: str | None, stdin: bool, tty: bool) -> tuple[tuple[str, str], ...]:
    wanted = {
        "container": container or "",
        "stdin": "1" if stdin else "",
        "stdout": "1",
        "stderr": "" if tty else "1",  # a terminal has one output
        "tty": "1" if tty else "",
    }
    return tuple((name, value) for name, value in wanted.items() if value)


async def _open(
    client: Client, pod: Ref, subresource: str, query: tuple[tuple[str, str], ...]
) -> Process:
    ref = replace(pod, subresource=subresource)
    action = client.action("get", ref)
    channels = Channels()
    call = Call(action, "GET", client.path(ref), query)
    await client.session.open_channel(call, channels, (_V5, _V4))
    return Process(channels, action)
