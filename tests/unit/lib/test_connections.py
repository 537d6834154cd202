"""The server's end of an upgrade that is decided later, on a transport that is a test's own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace

from kubetorch.lib import connections, websocket
from kubetorch.lib.connections import Connection

REQUEST = (
    b"GET /v1/sessions HTTP/1.1\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
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
        self.heard: list[bytes] = []

    def on_open(self, connection: Connection) -> None:
        pass

    def on_message(self, opcode: int, payload: memoryview) -> None:
        self.heard.append(bytes(payload))

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
        made = connections.upgrade_class(accept, max_message=1024)
        upgrade = made(None, SimpleNamespace(connections=set()), {})  # type: ignore[call-arg]
        assert isinstance(upgrade, Connection)
        upgrade.connection_made(transport)  # type: ignore[arg-type]
        upgrade.data_received(REQUEST)  # type: ignore[attr-defined]
        transport.protocol = upgrade
        for _ in range(5):
            await asyncio.sleep(0)
        assert websocket.accept_key("AAAAAAAAAAAAAAAAAAAAAA==").encode() in transport.written
        assert listener.heard == [b"hi"]
        upgrade.close()
        upgrade.connection_lost(None)

    asyncio.run(main())
