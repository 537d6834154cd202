"""Two processes that want to lead."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from kubetorch.controller.cluster import lease
from local.candidate import TIMES
from local.fake_apiserver import FakeApiServer
from local.object_server import ObjectServer

PROGRAM = Path(__file__).with_name("candidate.py")


class Candidate:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def says(self, what: str, seconds: float = 10.0) -> float:
        """When it said so."""
        assert self.process.stdout is not None
        line = (await asyncio.wait_for(self.process.stdout.readline(), seconds)).decode()
        word, moment = line.split()
        assert word == what
        return float(moment)


@contextlib.asynccontextmanager
async def candidate(url: str, place: str) -> AsyncIterator[Candidate]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(PROGRAM), url, "install", place),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Candidate(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
            process.kill()
        await process.wait()


def run(body: Callable[[str, ObjectServer], Awaitable[None]]) -> None:
    async def main() -> None:
        resource = lease.LEASES
        server = ObjectServer((resource.api_version, resource.plural, resource.kind))
        async with FakeApiServer(server) as listening:
            await body(listening.url, server)

    asyncio.run(asyncio.wait_for(main(), 60))


async def hands_over(first: Candidate, second: Candidate) -> None:
    """Stop the one; the other follows at once."""
    first.process.terminate()
    stopped = await first.says("stops")
    assert await second.says("leads") - stopped < 1.0


@pytest.mark.alone
def test_one_that_stops_is_followed_within_a_second() -> None:
    async def body(url: str, _: ObjectServer) -> None:
        async with candidate(url, "a") as first:
            await first.says("leads")
            async with candidate(url, "b") as second:
                await asyncio.sleep(0.5)
                await hands_over(first, second)

    run(body)


@pytest.mark.alone
def test_one_that_stops_is_followed_although_its_lease_has_another_version() -> None:
    async def body(url: str, server: ObjectServer) -> None:
        async with candidate(url, "a") as first:
            await first.says("leads")
            async with candidate(url, "b") as second:
                await asyncio.sleep(0.7)  # the second begins to watch
                ((collection, _), held) = next(iter(server.objects.items()))
                server.put(collection, held)
                await hands_over(first, second)

    run(body)


def test_one_that_is_killed_is_followed_once_its_lease_is_over() -> None:
    async def body(url: str, _: ObjectServer) -> None:
        async with candidate(url, "a") as first:
            await first.says("leads")
            async with candidate(url, "b") as second:
                await asyncio.sleep(1)
                first.process.kill()
                killed = time.time()
                took = await second.says("leads", 20) - killed
                assert TIMES.duration - TIMES.period - 1 < took < TIMES.duration + 2

    run(body)


def test_one_that_is_killed_and_starts_again_leads_at_once() -> None:
    async def body(url: str, _: ObjectServer) -> None:
        async with candidate(url, "a") as first:
            await first.says("leads")
            first.process.kill()
        async with candidate(url, "a") as again:
            await again.says("leads", 5)

    run(body)


def test_one_that_stood_still_finds_that_it_has_lost() -> None:
    async def body(url: str, _: ObjectServer) -> None:
        async with candidate(url, "a") as first:
            await first.says("leads")
            async with candidate(url, "b") as second:
                await asyncio.sleep(0.5)
                os.kill(first.process.pid, signal.SIGSTOP)
                await second.says("leads", 20)
                os.kill(first.process.pid, signal.SIGCONT)
                await first.says("lost", 10)

    run(body)


def test_while_the_api_server_is_away_nobody_takes_over() -> None:
    async def body(url: str, server: ObjectServer) -> None:
        async with candidate(url, "a") as first:
            await first.says("leads")
            async with candidate(url, "b"):
                await asyncio.sleep(0.5)
                server.go_away()
                await asyncio.sleep(TIMES.duration + 3)
                server.is_away = False
                await asyncio.sleep(TIMES.period + 2)
                (held,) = server.objects.values()
                assert held["spec"]["holderIdentity"].startswith("a_")
                assert first.process.returncode is None
                first.process.terminate()
                await first.says("stops")

    run(body)
