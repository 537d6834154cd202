"""Answers of apps through the agent and through the relay: bounded, framed, one to a request."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import clock_loop
from kubetorch.lib import proxy
from kubetorch.lib import tuning as lib_tuning
from kubetorch.lib.http1 import BrokenError
from shared import WHOLE
from tests.local.doors import PATIENCE, Door, opened

MIB = 1024 * 1024
FIRST = b"HTTP/1.1 200 OK\r\nContent-Length: 73\r\n\r\n" + b"f" * 73
SECOND = (
    b"HTTP/1.1 200 OK\r\nContent-Length: 76\r\nSet-Cookie: stolen=1\r\n\r\n".ljust(70)
    + b"SECOND" * 13
)
UPGRADE = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"


@pytest.fixture(scope="module")
def app(
    shared_service_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Door]]:
    with opened(tmp_path_factory.mktemp("raw") / "shop") as doors:
        yield doors


@pytest.fixture(params=["agent", "relay"])
def door(request: pytest.FixtureRequest, app: dict[str, Door]) -> Door:
    return app[request.param]


SPLITS = {
    "length": (b"GET", b"", [FIRST + SECOND]),
    "later": (b"GET", b"", [FIRST, SECOND]),
    "chunked": (
        b"GET",
        b"",
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nf\r\n0\r\n\r\n" + SECOND],
    ),
    "no body": (b"GET", b"", [b"HTTP/1.1 204 No Content\r\n\r\n" + SECOND]),
    "not modified": (
        b"GET",
        b"",
        [b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n" + SECOND],
    ),
    "head": (b"HEAD", b"", [b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n" + SECOND]),
    "hinted": (b"GET", b"", [b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + FIRST + SECOND]),
    "upgrade": (b"GET", UPGRADE, [FIRST + SECOND]),
    "upgrade later": (b"GET", UPGRADE, [FIRST, SECOND]),
    "upgrade bare": (b"GET", UPGRADE, [b"HTTP/1.1 204 No Content\r\n\r\n" + SECOND]),
    "upgrade hinted": (b"GET", UPGRADE, [b"HTTP/1.1 103 Early Hints\r\n\r\n" + FIRST + SECOND]),
    "upgrade chunked": (
        b"GET",
        UPGRADE,
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nf\r\n0\r\n\r\n", SECOND],
    ),
}


def at_once(asks: Iterable[tuple[Any, Callable[[], bytes]]]) -> list[tuple[Any, bytes]]:
    """What many requests at the same time are answered with."""
    named_asks = list(asks)
    with ThreadPoolExecutor(len(named_asks)) as threads:
        answers = [(name, threads.submit(ask)) for name, ask in named_asks]
        return [(name, answer.result()) for name, answer in answers]


def test_a_second_answer_behind_the_first_is_not_passed_on(door: Door) -> None:
    for kind, answer in at_once(
        (kind, partial(door.ask, door.path(*pieces), more, method=method))
        for kind, (method, more, pieces) in SPLITS.items()
    ):
        assert answer.startswith(b"HTTP/1.1 "), (kind, answer)
        assert b"SECOND" not in answer and b"stolen" not in answer, (kind, answer)


def test_connection_names_no_framing_header(door: Door) -> None:
    odd = b"HTTP/1.1 200 OK\r\nConnection: %s\r\nContent-Length: 4\r\n\r\nodd!"
    hidden = b"GET /hidden HTTP/1.1\r\n\r\n"
    framing = b"Connection: %s\r\nContent-Length: %d\r\n\r\n%s"
    names = [b"Content-Length", b"close, transfer-encoding", b"host"]
    for name, answer in at_once(
        ((name, more), partial(door.ask, door.path(odd % name), more))
        for name in names
        for more in (b"", UPGRADE)
    ):
        assert answer.startswith(b"HTTP/1.1 502 "), (name, answer)
    for name in names:
        more = framing % (name, len(hidden), hidden)
        answer = door.ask(door.path(FIRST), more, method=b"POST")
        assert answer.startswith(b"HTTP/1.1 400 "), (name, answer)


def test_what_follows_an_upgrade_goes_on_when_it_is_made(door: Door) -> None:
    head = b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\n%s\r\n"
    with door.connect() as sock:
        sock.sendall(head % (door.path(FIRST), UPGRADE) + b"GET /smuggled HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while sock.recv(65536):
                pass
    with door.connect() as sock:
        sock.sendall(head % (door.path(SWITCH + b"early", b"later"), UPGRADE) + b"quick")
        answer = b""
        while not answer.endswith(b"later"):
            answer += (piece := sock.recv(65536))
            assert piece, answer
        assert answer.startswith(b"HTTP/1.1 101 ") and b"\r\n\r\nearlylater" in answer
        deadline = time.monotonic() + PATIENCE
        while b"quick" not in (seen_bytes := door.ask(f"{door.prefix}/seen".encode())):
            assert time.monotonic() < deadline, seen_bytes
        assert b"smuggled" not in seen_bytes


def test_an_endless_head_ends_in_little_memory(door: Door) -> None:
    ok = b"HTTP/1.1 200 OK\r\nX-Long: "
    heads = [(ok, b"X-A: b\r\n" * 100), (ok, b"a" * 1000), (b"", b"HTTP/1.1 103 x\r\n\r\n" * 60)]
    before = door.rest()
    for kind, answer in at_once(
        ((head, more), partial(door.ask, door.path(*head, endless=True), more))
        for head in heads
        for more in (b"", UPGRADE)
    ):
        assert answer.startswith(b"HTTP/1.1 502 "), (kind, answer[:200])
    after = door.rest()
    print(f"endless heads at {door.prefix}: {before // 1024} KiB before, {after // 1024} after")
    assert after - before < 32 * MIB


def test_a_head_is_complete_in_time_however_late_it_begins() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            await clock_loop.pause(3600)
            writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n")
            await clock_loop.pause(3600)
            writer.write(b"HTTP/1.1 200 OK\r\nX: ")
            while not writer.is_closing():
                writer.write(b"x")
                await clock_loop.pause(1)
            writer.close()

        async def receive() -> Any:
            return await loop.create_future()

        async def send(message: Any) -> None:
            raise AssertionError(message)

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        scope = {"method": "GET", "raw_path": b"/", "query_string": b"", "headers": []}
        begun = loop.time()
        with pytest.raises(BrokenError, match="not complete 30 s after"):
            target = proxy.Target("127.0.0.1", port, proxy.Mount("", ""))
            await proxy.relay(scope, [], receive, send, target)
        assert 7200 + 29 < loop.time() - begun < 7200 + 32
        server.close()
        await clock_loop.pause(5)

    clock_loop.run(main())


@pytest.mark.skipif(not WHOLE, reason="waits for half a minute")
def test_a_head_is_complete_in_time_at_both_doors(app: dict[str, Door]) -> None:
    def drip(door: Door, more: bytes) -> bytes:
        with door.connect() as sock:
            path = door.path(b"HTTP/1.1 200 OK\r\nX-Begun: ")
            sock.sendall(b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\n%s\r\n" % (path, more))
            sock.settimeout(lib_tuning.TIMING.proxy_head_seconds + PATIENCE)
            return sock.recv(65536)

    begun = time.monotonic()
    for name, answer in at_once(
        ((name, more), partial(drip, door, more))
        for name, door in app.items()
        for more in (b"", UPGRADE)
    ):
        assert answer.startswith(b"HTTP/1.1 502 "), (name, answer)
    took = time.monotonic() - begun
    print(f"heads that are not completed were given up after {took:.1f} s")
    assert (
        lib_tuning.TIMING.proxy_head_seconds - 1
        < took
        < lib_tuning.TIMING.proxy_head_seconds + PATIENCE
    )
