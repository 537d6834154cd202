"""Whether an app answers on its port.

Nothing tells another process that a port was opened, so it is tried, with growing pauses.
"""

from __future__ import annotations

import asyncio

import httptools

from kubetorch.lib import backoff, deadlines

#: An app may listen on one of them only.
ADDRESSES = ("127.0.0.1", "::1")
#: First and longest pause between two attempts, in seconds.
_PAUSES = (0.02, 0.25)
#: Seconds that one attempt may take.
_ATTEMPT = 5.0
_PIECE = 4096


async def wait(port: int, path: str | None) -> str:
    """Wait until a server on this port answers; the address that it listens on.

    Args:
        port: Its port.
        path: What it has to answer with 200; an open port is enough without one.
    """
    pauses = backoff.exponential(first=_PAUSES[0], limit=_PAUSES[1])
    while True:
        for address in ADDRESSES:
            try:
                async with deadlines.timeout(_ATTEMPT):
                    if await _answers(address, port, path):
                        return address
            except (OSError, TimeoutError, asyncio.TimeoutError, httptools.HttpParserError):
                continue
        await asyncio.sleep(next(pauses))


async def _answers(address: str, port: int, path: str | None) -> bool:
    reader, writer = await asyncio.open_connection(address, port)
    try:
        if path is None:
            return True
        host = f"[{address}]" if ":" in address else address
        head = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode("latin-1"))
        return await _status(reader) == 200
    finally:
        writer.transport.abort()


async def _status(reader: asyncio.StreamReader) -> int:
    parser = httptools.HttpResponseParser(object())
    while not (status := parser.get_status_code()):
        data = await reader.read(_PIECE)
        if not data:
            return 0
        parser.feed_data(data)
    return int(status)
