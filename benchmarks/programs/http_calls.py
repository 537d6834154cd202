"""Calls over HTTP with keep-alive, as light as the standard library has them.

    http_calls PORT PATH BODY

Threads have an `http.client` connection each, asyncio tasks a stream each.
"""

from __future__ import annotations

import asyncio

from benchmarks.programs import driving, posting
from benchmarks.programs.answering import answer, arguments


class Target:
    """Where the calls go, and what they send."""

    def __init__(self, port: str, path: str, body: str) -> None:
        self.port = int(port)
        self.path = path
        self.body = body.encode()

    def connect(self) -> driving.Call:
        """A blocking call on a connection of its own."""
        post = posting.connect(self.port)
        return lambda: post(self.path, self.body, posting.JSON)

    async def connect_async(self) -> driving.AsyncCall:
        """An awaitable call on a connection of its own."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(self.body)}\r\n\r\n"
        )
        request = head.encode() + self.body

        async def call() -> bytes:
            writer.write(request)
            lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
            if b" 200 " not in lines[0]:
                raise RuntimeError(lines[0].decode())
            length = next(line for line in lines if line.startswith(b"content-length:"))
            return await reader.readexactly(int(length.partition(b":")[2]))

        return call


def main() -> None:
    """Connect, then answer."""
    target = Target(*arguments())
    call = target.connect()
    call()

    def calls(seconds: float, callers: int) -> dict[str, float]:
        return {
            **driving.latency(call, seconds),
            "threads": driving.threads(target.connect, callers, seconds),
            "tasks": driving.tasks(target.connect_async, callers, seconds),
        }

    answer({"calls": calls})


if __name__ == "__main__":
    main()
