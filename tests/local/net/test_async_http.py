"""The asynchronous HTTP client against servers that write whatever a test wants."""

import asyncio
import contextlib
import time

import pytest

import clock_loop
from kubetorch.lib import async_http, transports
from kubetorch.lib import tuning as lib_tuning
from kubetorch.lib.async_http import HttpPool, Request
from kubetorch.lib.http1 import BrokenError
from local.fake_apiserver import FakeApiServer

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


def replies(*raw, then_close=False):
    async def handler(exchange):
        for piece in raw:
            if isinstance(piece, float):
                await asyncio.sleep(piece)
            else:
                exchange.writer.write(piece)
                await exchange.writer.drain()
        if then_close:
            exchange.writer.close()

    return handler


@contextlib.asynccontextmanager
async def pool_of(handler):
    async with FakeApiServer(handler) as server:
        pool = HttpPool()
        route = transports.Route("127.0.0.1", server.port)
        try:
            yield pool, route, server
        finally:
            await pool.close()


async def get(pool, route, *, limit=1000, timeout=30.0):
    async with await pool.send(route, Request("GET", "/x"), timeout=timeout) as answer:
        return await answer.read(limit, timeout=timeout)


@pytest.mark.parametrize(
    ("head", "is_kept"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", False),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", True),
    ],
)
def test_a_connection_is_kept_when_both_sides_may(head, is_kept):
    async def scenario():
        async with pool_of(replies(head)) as (pool, route, server):
            for _ in range(2):
                assert await get(pool, route) == b"hello"
            assert server.connections == (1 if is_kept else 2)
            request = server.requests[0]
            assert request.header("host") == f"127.0.0.1:{server.port}"

    asyncio.run(scenario())


def test_a_body_without_a_length_ends_with_the_connection():
    async def scenario():
        head = b"HTTP/1.1 200 OK\r\n\r\n"
        async with pool_of(replies(head, b"hel", 0.05, b"lo", then_close=True)) as (pool, route, _):
            assert await get(pool, route) == b"hello"

    asyncio.run(scenario())


def test_an_answer_that_is_too_large_is_not_read_on():
    async def scenario():
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 2000\r\n\r\n" + bytes(2000)
        async with pool_of(replies(head)) as (pool, route, _):
            with pytest.raises(async_http.TooLargeError):
                await get(pool, route, limit=1999)

    asyncio.run(scenario())


def test_a_line_that_is_too_long_is_not_read_on():
    async def scenario():
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\n" + b"short\n" + b"x" * 24
        async with (
            pool_of(replies(head)) as (pool, route, _),
            await pool.send(route, Request("GET", "/"), timeout=30) as answer,
        ):
            with pytest.raises(async_http.TooLargeError):
                _ = [line async for line in answer.lines(limit=20, timeout=30)]

    asyncio.run(scenario())


def test_a_server_that_drips_is_given_up_when_the_time_for_all_is_over():
    async def scenario():
        drops = [part for _ in range(600) for part in (b"x", 0.1)]
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 600\r\n\r\n"
        async with pool_of(replies(head, *drops)) as (pool, route, _):
            begun = time.monotonic()
            with pytest.raises(async_http.SilentError):
                await get(pool, route, timeout=0.4)
            assert time.monotonic() - begun < 30

    asyncio.run(scenario())


def test_a_kept_connection_that_the_server_closed_is_not_used():
    async def scenario():
        async with pool_of(replies(OK, then_close=True)) as (pool, route, server):
            for _ in range(3):
                await get(pool, route)
                for _ in range(5):  # however late this wakes up, the loop has seen the end
                    await asyncio.sleep(0.01)
            assert server.connections == 3

    asyncio.run(scenario())


def test_an_answer_that_is_left_early_takes_its_connection_with_it():
    async def scenario():
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
        async with pool_of(replies(head)) as (pool, route, server):
            async with await pool.send(route, Request("GET", "/"), timeout=30):
                pass
            assert await get(pool, route) == b"hello"
            assert server.connections == 2

    asyncio.run(scenario())


def test_closing_the_pool_breaks_what_is_being_read():
    async def scenario():
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhe"
        async with pool_of(replies(head, 60.0)) as (pool, route, _):
            answer = await pool.send(route, Request("GET", "/"), timeout=30)
            reading = asyncio.create_task(answer.read(100, timeout=60))
            await asyncio.sleep(0.05)
            await pool.close()
            with pytest.raises(BrokenError):
                await reading
            with pytest.raises(transports.UnreachableError, match="closed"):
                await get(pool, route)

    asyncio.run(scenario())


def test_a_connection_that_nobody_uses_is_closed():
    async def scenario():
        async with pool_of(replies(OK)) as (pool, route, server):
            await get(pool, route)
            await clock_loop.put_ahead(lib_tuning.TIMING.pooled_connection_seconds - 5)
            await get(pool, route)
            assert server.connections == 1
            await clock_loop.put_ahead(lib_tuning.TIMING.pooled_connection_seconds + 1)
            await get(pool, route)
            assert server.connections == 2

    clock_loop.run(scenario(), clock_loop.AheadLoop)


def test_a_connection_that_is_used_again_may_take_its_time():
    async def scenario():
        is_long = False

        async def handler(exchange):
            if is_long:
                await clock_loop.put_ahead(lib_tuning.TIMING.pooled_connection_seconds + 1)
            exchange.writer.write(OK)

        async with pool_of(handler) as (pool, route, server):
            await get(pool, route)
            is_long = True
            async with await pool.send(route, Request("GET", "/"), timeout=None) as answer:
                assert await answer.read(100, timeout=2) == b""
            assert server.connections == 1

    clock_loop.run(scenario(), clock_loop.AheadLoop)


def test_no_more_idle_connections_are_kept_than_the_limit():
    async def scenario():
        count = lib_tuning.LIMITS.pooled_connections + 3
        exchanges, all_ask = [], asyncio.Event()

        async def handler(exchange):
            exchanges.append(exchange)
            if len(exchanges) % count == 0:
                all_ask.set()
            await all_ask.wait()
            exchange.writer.write(OK)

        async with pool_of(handler) as (pool, route, server):
            for _ in range(2):
                all_ask.clear()
                await asyncio.gather(*(get(pool, route) for _ in range(count)))
            assert server.connections == count + 3

    asyncio.run(scenario())
