"""The pods' ends of sessions, all in one process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from kubetorch.lib import websocket, websocket_protocol
from kubetorch.lib.websocket import Connection, Endpoint

#: Connections that are opened at the same time.
OPENING = 200
#: Seconds after which something does not come any more.
DEADLINE = 120.0
#: Longest message that is taken.
MESSAGE_LIMIT = 16 * 1024 * 1024

#: What a pod answers to a message; nothing to most. An empty answer is counted and not sent.
Answer = Callable[[memoryview], bytes | None]


class Pods:
    """Pods that count what reaches them.

    Attributes:
        ends: Those that are connected.

    Args:
        answer: What each answers; what is answered is counted.
    """

    def __init__(self, answer: Answer) -> None:
        self.ends: list[Connection] = []
        self._answer = answer
        self._missing_answers = 0
        self._arrived: asyncio.Future[float] | None = None

    def expect(self, count: int) -> asyncio.Future[float]:
        """The moment at which so many answers were counted, of `time.perf_counter`."""
        self._missing_answers = count
        self._arrived = asyncio.get_running_loop().create_future()
        return self._arrived

    async def open(self, url: str, headers: Mapping[str, str], first: bytes) -> None:
        """Connect one more, which says this first."""
        end = await websocket.connect(
            url, _Pod(self), headers=headers, max_message=MESSAGE_LIMIT, timeout=DEADLINE
        )
        end.send(first, opcode=websocket_protocol.TEXT)
        self.ends.append(end)

    def receive(self, connection: Connection, payload: memoryview) -> None:
        """Answer a message, and count the answer."""
        answer = self._answer(payload)
        if answer is None:
            return
        if answer:
            connection.send(answer, opcode=websocket_protocol.TEXT)
        self._missing_answers -= 1
        if self._missing_answers == 0 and self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(time.perf_counter())


class _Pod(Endpoint):
    """The endpoint of one connection."""

    def __init__(self, pods: Pods) -> None:
        self._pods = pods
        self._connection: Connection | None = None

    def on_open(self, connection: Connection) -> None:
        self._connection = connection

    def on_message(self, opcode: int, payload: memoryview) -> None:
        if self._connection is not None:
            self._pods.receive(self._connection, payload)

    def on_large(self, head: memoryview, length: int) -> memoryview | None:
        return None

    def on_placed(self, head: bytes, rest: memoryview) -> None:
        # Who the others are: each pod of a cluster reads that on a machine of its own.
        return

    def on_writable(self) -> None:
        return

    def on_close(self, reason: str) -> None:
        self._connection = None
