"""The connections between a putter and its getters, over which they agree on who takes part."""

from __future__ import annotations

import hmac
import socket
import time
from collections.abc import Collection, Iterable
from typing import TypeVar

from kubetorch.datastore.tuning import LIMITS, TIMING
from kubetorch.errors import DataStoreError, ProtocolError
from kubetorch.wire import messages
from kubetorch.wire.transports import Greeting, Ready, Taken

_T = TypeVar("_T")


class Link:
    """One of these connections: a message is a line of JSON.

    Attributes:
        groups: The communicators that the getter's process still has.
    """

    groups: frozenset[str] = frozenset()

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()

    @property
    def own_host(self) -> str:
        """The address of this side."""
        return str(self._connection.getsockname()[0])

    def send(self, message: object) -> None:
        self._connection.settimeout(TIMING.transport_silence_seconds)
        self._connection.sendall(messages.encode(message) + b"\n")

    def receive(self, kind: type[_T], seconds: float) -> _T:
        """The next message.

        Raises:
            DataStoreError: It does not come, or is another one.
        """
        end = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            self._connection.settimeout(max(end - time.monotonic(), 0.001))
            piece = self._connection.recv(LIMITS.rendezvous_message_bytes)
            if not piece:
                raise _closed()
            self._buffer += piece
            if len(self._buffer) > LIMITS.rendezvous_message_bytes:
                raise ProtocolError("a message of a rendezvous is too long")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return messages.decode(kind, line)

    def has_message(self) -> bool:
        """Whether there is something to receive.

        Raises:
            DataStoreError: The other process has closed the connection, or has ended.
        """
        if self._buffer:
            return True
        self._connection.settimeout(0)
        try:
            if not self._connection.recv(1, socket.MSG_PEEK):
                raise _closed()
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        self._connection.close()


def _closed() -> DataStoreError:
    return DataStoreError("another process of the window has ended, or has given up")


def connect(address: str) -> Link:
    """Connect with a putter."""
    host, _, port = address.rpartition(":")
    seconds = TIMING.transport_connect_seconds
    return Link(socket.create_connection((host, int(port)), timeout=seconds))


def gather(listener: socket.socket, token: str, getters: Collection[str]) -> dict[str, Link]:
    """The getters that have come and are ready within `rendezvous_seconds`."""
    end = time.monotonic() + TIMING.rendezvous_seconds
    links: dict[str, Link] = {}
    try:
        while len(links) < len(getters) and (seconds := end - time.monotonic()) > 0:
            listener.settimeout(seconds)
            link = Link(listener.accept()[0])
            try:
                greeting = link.receive(Greeting, TIMING.greeting_seconds)
            except (DataStoreError, ProtocolError, OSError):
                link.close()
                continue
            is_getter = greeting.participant in getters and greeting.participant not in links
            if is_getter and hmac.compare_digest(greeting.token, token):
                link.groups = frozenset(greeting.groups)
                links[greeting.participant] = link
            else:
                link.close()
    except TimeoutError:
        pass
    return {name: link for name, link in links.items() if _is_ready(link, end)}


def await_taken(links: Iterable[Link]) -> None:
    """Wait until all getters have what was sent; raise when a getter ends before."""
    end = time.monotonic() + TIMING.transport_silence_seconds
    pending = set(links)
    while pending:
        for link in [link for link in pending if link.has_message()]:
            link.receive(Taken, TIMING.greeting_seconds)
            pending.remove(link)
        if time.monotonic() > end:
            raise DataStoreError("a getter does not say that it has all")
        time.sleep(TIMING.transport_poll_seconds if pending else 0)


def _is_ready(link: Link, end: float) -> bool:
    try:
        link.receive(Ready, end - time.monotonic())
    except (DataStoreError, ProtocolError, OSError):
        link.close()
        return False
    return True
