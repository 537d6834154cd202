"""Servers in a pod that answer with the bytes that come: bare TCP, and HTTP.

They run on the pod's own runtime, for its event loop and its parser of HTTP.
"""

from __future__ import annotations

import asyncio

import httptools
import uvloop

TCP_PORT, HTTP_PORT = 7000, 7001


class Echo(asyncio.Protocol):
    """Sends back what comes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember whom to answer."""
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]  # uvloop's

    def data_received(self, data: bytes) -> None:
        """Send it back."""
        self.transport.write(data)


class HttpEcho(Echo):
    """Answers each request with its body."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to parse."""
        super().connection_made(transport)
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""

    def data_received(self, data: bytes) -> None:
        """Parse it."""
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._body += body

    def on_message_complete(self) -> None:
        """Answer."""
        body, self._body = self._body, b""
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(head % len(body) + body)


async def main() -> None:
    """Serve until the pod ends."""
    loop = asyncio.get_running_loop()
    await loop.create_server(Echo, "0.0.0.0", TCP_PORT)
    await loop.create_server(HttpEcho, "0.0.0.0", HTTP_PORT)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
