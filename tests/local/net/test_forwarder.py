"""A port of this machine that forwards to a server which may be another one the next time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kubetorch.lib import sockets
from kubetorch.lib import tuning as lib_tuning
from kubetorch.lib.http1 import Header
from kubetorch.lib.proxy import Forwarder, Mount, NoTargetError, Target


class MovingServer:
    """What is found when a request comes, and the heads that the server got."""

    def __init__(self, *headers: Header) -> None:
        self._headers = headers
        self.heads: list[str] = []
        self.find_calls: list[bool] = []
        self.is_missing = False
        self.is_moved = False
        self.port = 0

    async def find(self, path: bytes, anew: bool) -> Target:
        self.find_calls.append(anew)
        if self.is_missing:
            raise NoTargetError("no pod is ready")
        port = 1 if self.is_moved and not anew else self.port
        return Target(sockets.LOOPBACK, port, Mount("", ""), self._headers)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode().lower())
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        writer.close()


class Client:
    def __init__(self, port: int) -> None:
        self._port = port

    async def get(self, **headers: str) -> str:
        """The answer to a request of a page, or of a program."""
        reader, writer = await asyncio.open_connection(sockets.LOOPBACK, self._port)
        sent = {"Host": f"localhost:{self._port}", "Connection": "close", **headers}
        lines = [f"{name.replace('_', '-')}: {value}" for name, value in sent.items()]
        writer.write("\r\n".join(["GET /x HTTP/1.1", *lines, "", ""]).encode())
        answer = (await reader.read()).decode()
        writer.close()
        return answer


@asynccontextmanager
async def forwarding(server: MovingServer) -> AsyncIterator[Client]:
    listening = await asyncio.start_server(server.serve, sockets.LOOPBACK, 0)
    server.port = listening.sockets[0].getsockname()[1]
    listener = sockets.listen(sockets.LOOPBACK, 0)
    forwarder = Forwarder(server.find, [(b"x-added", b"1")])
    await forwarder.server.start(listener)
    try:
        yield Client(listener.getsockname()[1])
    finally:
        await forwarder.server.close(lib_tuning.TIMING.listener_goodbye_seconds)
        listening.close()


def test_a_server_that_has_moved_is_looked_for_again() -> None:
    async def scenario() -> None:
        server = MovingServer()
        async with forwarding(server) as client:
            assert (await client.get()).endswith("ok")
            server.is_moved = True
            assert (await client.get()).endswith("ok")
            assert server.find_calls == [False, False, True]
            assert all("x-added: 1" in head for head in server.heads)

    asyncio.run(scenario())


def test_without_a_server_the_reason_is_the_answer() -> None:
    async def scenario() -> None:
        server = MovingServer()
        async with forwarding(server) as client:
            server.is_missing = True
            answer = await client.get()
            assert answer.startswith("HTTP/1.1 503")
            assert "no pod is ready" in answer
            server.is_missing, server.port = False, 1
            assert (await client.get()).startswith("HTTP/1.1 502")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Host": "evil.example"},
        {"Sec_Fetch_Site": "cross-site"},
    ],
)
def test_pages_of_other_sites_get_nowhere(headers: dict[str, str]) -> None:
    async def scenario() -> None:
        server = MovingServer()
        async with forwarding(server) as client:
            assert (await client.get(**headers)).startswith("HTTP/1.1 403")
            assert (server.find_calls, server.heads) == ([], [])

    asyncio.run(scenario())


@pytest.mark.parametrize("added", [(), ((b"host", b"kt.example.com"),)])
def test_a_server_by_another_name_is_asked_as_a_program_asks(added: tuple[Header, ...]) -> None:
    async def scenario() -> None:
        server = MovingServer(*added)
        async with forwarding(server) as client:
            page = {"Origin": "http://localhost:1", "Sec_Fetch_Site": "same-origin"}
            assert (await client.get(**page)).endswith("ok")
            (head,) = server.heads
            assert ("\r\norigin: " in head) is not bool(added)
            assert ("sec-fetch-site" in head) is not bool(added)
            assert ("host: kt.example.com" in head) is bool(added)

    asyncio.run(scenario())
