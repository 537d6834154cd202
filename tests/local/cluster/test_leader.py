"""Two processes that want to lead."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from pathlib import Path

from kubetorch.controller.cluster import leader
from local.candidate import PERIOD
from local.fake_apiserver import FakeApiServer
from local.object_server import ObjectServer

PROGRAM = Path(__file__).parents[1] / "candidate.py"
#: Seconds that a lease is good for: those that tests wait for, and those that they must not.
SHORT, LONG = 6.0, 300.0


class Candidate:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def says(self, event: str, seconds: float = 40.0) -> float:
        """When it said so."""
        assert self.process.stdout is not None
        line = (await asyncio.wait_for(self.process.stdout.readline(), seconds)).decode()
        word, moment = line.split()
        assert word == event
        return float(moment)


@contextlib.asynccontextmanager
async def candidate(url: str, pod: str, duration: float = SHORT) -> AsyncIterator[Candidate]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(PROGRAM), url, "install", pod, str(duration)),
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
        resource = leader.LEASES
        server = ObjectServer((resource.api_version, resource.plural, resource.kind))
        async with FakeApiServer(server) as listening:
            await body(listening.url, server)

    asyncio.run(asyncio.wait_for(main(), 110))


async def hands_over(first: Candidate, second: Candidate) -> None:
    """Stop the one; the other follows at once."""
    first.process.terminate()
    stopped = await first.says("stops")
    assert await second.says("leads") - stopped < 30


def test_one_that_stops_is_followed_at_once() -> None:
    async def body(url: str, _: ObjectServer) -> None:
        async with candidate(url, "a", LONG) as first:
            await first.says("leads")
            async with candidate(url, "b", LONG) as second:
                await asyncio.sleep(0.5)
                await hands_over(first, second)

    run(body)


def test_one_that_stops_is_followed_although_its_lease_has_another_version() -> None:
    async def body(url: str, server: ObjectServer) -> None:
        async with candidate(url, "a", LONG) as first:
            await first.says("leads")
            async with candidate(url, "b", LONG) as second:
                await asyncio.sleep(0.7)  # the second begins to watch
                ((collection, _), lease) = next(iter(server.objects.items()))
                server.put(collection, lease)
                await hands_over(first, second)

    run(body)


def test_one_that_is_killed_is_followed_once_its_lease_is_over() -> None:
    async def body(url: str, server: ObjectServer) -> None:
        async with candidate(url, "a") as first:
            await first.says("leads")
            async with candidate(url, "b") as second:
                await asyncio.sleep(1)
                first.process.kill()
                (lease,) = server.objects.values()
                renewed = datetime.fromisoformat(lease["spec"]["renewTime"].replace("Z", "+00:00"))
                took = await second.says("leads") - renewed.timestamp()
                assert SHORT - 0.1 < took < SHORT + 30

    run(body)


def test_one_that_is_killed_and_starts_again_leads_at_once() -> None:
    async def body(url: str, _: ObjectServer) -> None:
        async with candidate(url, "a", LONG) as first:
            await first.says("leads")
            first.process.kill()
        async with candidate(url, "a", LONG) as restarted:
            await restarted.says("leads")

    run(body)


def test_one_that_stood_still_finds_that_it_has_lost() -> None:
    async def body(url: str, _: ObjectServer) -> None:
        async with candidate(url, "a") as first:
            await first.says("leads")
            async with candidate(url, "b") as second:
                await asyncio.sleep(0.5)
                os.kill(first.process.pid, signal.SIGSTOP)
                await second.says("leads")
                os.kill(first.process.pid, signal.SIGCONT)
                await first.says("lost")

    run(body)


def test_while_the_api_server_is_away_nobody_takes_over() -> None:
    async def body(url: str, server: ObjectServer) -> None:
        async with candidate(url, "a") as first:
            await first.says("leads")
            async with candidate(url, "b"):
                await asyncio.sleep(0.5)
                server.go_away()
                await asyncio.sleep(SHORT + 3)
                server.is_away = False
                await asyncio.sleep(PERIOD + 2)
                (lease,) = server.objects.values()
                assert lease["spec"]["holderIdentity"].startswith("a_")
                assert first.process.returncode is None
                first.process.terminate()
                await first.says("stops")

    run(body)
