"""The server's end of an upgrade that is decided later, on a transport that is a test's own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from kubetorch.lib import websocket, websocket_protocol
from kubetorch.lib.http_server import Connections, Upgrade
from kubetorch.lib.websocket import Connection

HEADERS = [
    (b"upgrade", b"websocket"),
    (b"sec-websocket-version", b"13"),
    (b"sec-websocket-key", b"AAAAAAAAAAAAAAAAAAAAAA=="),
]
#: A text of two letters, masked with zeroes.
HELLO = bytes([0x81, 0x82, 0, 0, 0, 0]) + b"hi"


class Transport:
    """Delivers what the peer says at once when it is read again."""

    def __init__(self) -> None:
        self.protocol: Connection | None = None
        self.written = b""
        self.is_paused = False

    def write(self, data: bytes) -> None:
        self.written += data

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def set_protocol(self, protocol: Connection) -> None:
        self.protocol = protocol

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False
        assert self.protocol is not None
        self.protocol.get_buffer(-1)[: len(HELLO)] = HELLO
        self.protocol.buffer_updated(len(HELLO))


class Listener:
    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def on_open(self, connection: Connection) -> None:
        pass

    def on_message(self, opcode: int, payload: memoryview) -> None:
        self.messages.append(bytes(payload))

    def on_large(self, head: memoryview, length: int) -> memoryview | None:
        return None

    def on_placed(self, head: bytes, rest: memoryview) -> None:
        pass

    def on_writable(self) -> None:
        pass

    def on_close(self, reason: str) -> None:
        pass


def test_what_a_peer_says_as_soon_as_it_is_let_in_is_heard() -> None:
    listener = Listener()

    async def accept(path: str, headers: Mapping[str, str]) -> Listener:
        await asyncio.sleep(0)
        return listener

    async def main() -> None:
        transport = Transport()
        upgrade = websocket.upgrader(accept, max_message=1024)
        successor = upgrade(Upgrade(b"/v1/sessions", HEADERS))
        assert successor is not None
        connections = Connections(10)
        successor.take_over(transport, b"", connections)  # type: ignore[arg-type]
        assert len(connections) == 1
        for _ in range(5):
            await asyncio.sleep(0)
        accept_key = websocket_protocol.accept_key("AAAAAAAAAAAAAAAAAAAAAA==").encode()
        assert accept_key in transport.written
        assert listener.messages == [b"hi"]
        connection = transport.protocol
        assert isinstance(connection, Connection)
        assert connections == {connection}
        connection.close()
        connection.connection_lost(None)
        assert not connections

    asyncio.run(main())
