"""The floor of a reload: the same bytes from one server to 5,000 WebSockets, and an answer of each.

broadcast
"""

from __future__ import annotations

import asyncio
import time

import uvloop

from benchmarks.programs.answering import answer
from benchmarks.programs.kubetorch_sessions import PODS
from benchmarks.simulation.pods import DEADLINE, OPENING, Pods
from benchmarks.simulation.servers import server
from benchmarks.simulation.swarm import answer_of, reload_message
from kubetorch.lib import websocket_protocol


class Listeners:
    """The other end of all.

    Args:
        port: Where the server listens.
    """

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._pods = Pods(answer_of)
        self._done: asyncio.Future[float] | None = None
        self._control = Pods(self._on_done)

    async def start(self) -> None:
        """Connect all."""
        gate = asyncio.Semaphore(OPENING)

        async def connect() -> None:
            async with gate:
                await self._pods.open(f"{self._url}/pod", {}, b"hello")

        await asyncio.gather(*(connect() for _ in range(PODS)))
        await self._control.open(f"{self._url}/control", {}, b"hello")
        await asyncio.sleep(1.0)  # what was said until now is over

    async def broadcast(self) -> dict[str, float]:
        """Seconds until every one was told, and until the server has heard all answers."""
        arrived = self._pods.expect(PODS)
        self._done = asyncio.get_running_loop().create_future()
        began = time.perf_counter()
        self._control.ends[0].send(reload_message(), opcode=websocket_protocol.TEXT)
        received = await asyncio.wait_for(arrived, DEADLINE)
        done = await asyncio.wait_for(self._done, DEADLINE)
        return {"told": received - began, "ready": done - began}

    def _on_done(self, payload: memoryview) -> bytes | None:
        if bytes(payload) == b"done" and self._done is not None:
            self._done.set_result(time.perf_counter())
        return None


def main() -> None:
    """Start, then answer."""
    loop = uvloop.new_event_loop()
    with server("broadcast_server") as (port, _):
        listeners = Listeners(port)
        loop.run_until_complete(listeners.start())
        answer({"sessions": lambda: loop.run_until_complete(listeners.broadcast())})


if __name__ == "__main__":
    main()
