"""An app that answers each request with the very bytes that its path has; its argument is the port.

`/<hex>/<hex>/...` are the pieces, 0.2 s apart; `*` says the piece before again, without an end. The
connection stays open. `/seen` shows what came on all connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

received_bytes = bytearray()


async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    path = head.split(b" ")[1].decode()
    if path in ("/", "/seen"):
        body = b"up" if path == "/" else bytes(received_bytes)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    else:
        received_bytes.extend(head)
        reading = asyncio.ensure_future(keep(reader))
        last = b""
        with contextlib.suppress(OSError):
            for piece in path.partition("?")[0].strip("/").split("/"):
                while piece == "*":
                    writer.write(last)
                    await writer.drain()
                last = bytes.fromhex(piece)
                writer.write(last)
                await asyncio.sleep(0.2)
        await reading
    writer.close()


async def keep(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            received_bytes.extend(data)


async def main() -> None:
    server = await asyncio.start_server(handle, "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()


asyncio.run(main())
