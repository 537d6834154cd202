"""The app of the tests: a small ASGI server with a WebSocket; its argument is the port."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from kubetorch.lib import http_server, sockets
from kubetorch.lib.websocket import upgrader

VERSION = "one"
#: Bytes of the flood that were taken.
sent = [0]


async def answer(send, status, body, *headers):
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": body})


async def app(scope, receive, send):
    path = scope["path"]
    if path == "/":
        await answer(send, 200, VERSION.encode(), (b"content-type", b"text/plain"))
    elif path == "/about":
        about = {
            "method": scope["method"],
            "query": scope["query_string"].decode(),
            "headers": {k.decode(): v.decode() for k, v in scope["headers"]},
            "pid": os.getpid(),
            "cwd": str(Path.cwd()),
            "sent": sent[0],
            "env": {k: v for k, v in os.environ.items() if k.startswith(("KT_", "POD_"))},
        }
        await answer(send, 200, json.dumps(about).encode(), (b"x-app", b"yes"))
    elif path == "/redirect":
        await answer(send, 302, b"", (b"location", b"/about?x=1"))
    elif path == "/nothing":
        await answer(send, 204, b"")
    elif path == "/echo":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            message = await receive()
            more = message.get("more_body", False)
            await send({"type": "http.response.body", "body": message["body"], "more_body": True})
            if not more:
                break
        await send({"type": "http.response.body", "body": b""})
    elif path == "/flood":
        await flood(send, receive)
    elif path == "/exit":
        os._exit(9)
    elif path == "/killed":
        os.kill(os.getpid(), 9)
    elif path == "/cut":
        headers = [(b"content-length", b"1000")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        os._exit(9)
    else:
        await answer(send, 404, b"no such page")


async def flood(send, receive):
    """A body without end; says when its reader is gone."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    disconnected = asyncio.ensure_future(until_gone(receive))
    while not disconnected.done():
        await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        sent[0] += 65536
        await asyncio.sleep(0)
    print("reader gone", flush=True)


async def until_gone(receive):
    while (await receive())["type"] != "http.disconnect":
        pass


class Echo:
    """A WebSocket that says back what it hears."""

    def on_open(self, connection):
        self.connection = connection

    def on_message(self, opcode, payload):
        self.connection.send(bytes(payload), opcode=opcode)

    def on_large(self, head, length):
        return None

    def on_placed(self, head, rest):
        self.connection.send(head + bytes(rest))

    def on_writable(self):
        pass

    def on_close(self, reason):
        print("socket closed", flush=True)


async def main(port):
    sockets_only = upgrader(lambda path, headers: Echo(), max_message=1 << 24)
    server = http_server.Server(
        app, upgrade=lambda request: sockets_only(request) if request.path == "/ws" else None
    )
    await server.start(sockets.listen("127.0.0.1", port))
    print("listening", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
