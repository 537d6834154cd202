"""All pods of one simulated workload, and the user who deploys it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from benchmarks.programs.simulated_controller import USER_TOKEN, session
from benchmarks.simulation.backend import pod_name
from benchmarks.simulation.pods import DEADLINE, OPENING, Answer, Pods
from kubetorch.controller.access import PodIdentity
from kubetorch.lib import deadlines, websocket_protocol
from kubetorch.lib.websocket_protocol import UpgradeRefusedError
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.distribution import DistributionSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import messages, routes, versions
from kubetorch.wire.messages import Activity, Deploy, FromController, Hello, Observed, Reload

NAMESPACE = "team"
#: Seconds between two signs of life of a pod, and how many groups of pods take turns.
_HEARTBEAT, _TURNS = 5.0, 50
#: Seconds after which a pod that was refused tries again.
_RETRY = 0.1


class Swarm:
    """The pods of one workload.

    Args:
        port: Where the controller listens.
        name: The workload.
        pods: How many.
        answer: What each says to a message.
        distribution: How a call runs on them.
        heartbeat: Seconds between two signs of life of each.
    """

    def __init__(
        self,
        port: int,
        name: str,
        pods: int,
        *,
        answer: Answer | None = None,
        distribution: DistributionSpec | None = None,
        heartbeat: float = _HEARTBEAT,
    ) -> None:
        self._port = port
        self._name = name
        self._count = pods
        self._version = 0
        self._distribution = distribution
        self._heartbeat = heartbeat
        self._pods = Pods(answer or answer_of)
        self._beating: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Deploy, and open all sessions."""
        self._beating = asyncio.create_task(self._beat())
        async with self._deployed():
            gate = asyncio.Semaphore(OPENING)
            await asyncio.gather(*(self._open(number, gate) for number in range(self._count)))

    async def reload(self) -> dict[str, float]:
        """Seconds from a deploy until every pod was told, and until it says that it is ready."""
        arrived = self._pods.expect(self._count)
        began = time.perf_counter()
        async with self._deployed():
            received = await asyncio.wait_for(arrived, DEADLINE)
        return {"told": received - began, "ready": time.perf_counter() - began}

    async def heard_by(self, count: int, cause: Callable[[], object]) -> float:
        """Seconds from what causes a message until so many pods have it."""
        arrived = self._pods.expect(count)
        began = time.perf_counter()
        cause()
        return await asyncio.wait_for(arrived, DEADLINE) - began

    async def close(self) -> None:
        """Open no more, and say nothing any more."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)

    async def _open(self, ordinal: int, gate: asyncio.Semaphore) -> None:
        pod = pod_name(self._name, ordinal)
        token = session(PodIdentity(NAMESPACE, self._name, pod))
        headers = {
            routes.AUTHORIZATION: f"Bearer {token}",
            routes.PROTOCOL: str(versions.PROTOCOL),
        }
        hello = Hello(
            namespace=NAMESPACE,
            workload=self._name,
            pod=pod,
            incarnation=pod,
            url="http://10.0.0.1:32300",
            protocol=versions.PROTOCOL,
            version="0",
        )
        url = f"http://127.0.0.1:{self._port}{routes.SESSIONS}"
        async with gate, deadlines.timeout(DEADLINE):
            while True:
                try:
                    await self._pods.open(url, headers, messages.encode(hello))
                except UpgradeRefusedError:
                    await asyncio.sleep(_RETRY)  # its workload is not there yet
                else:
                    return

    async def _beat(self) -> None:
        """Give signs of life, as agents do, all through the measurement."""
        heartbeat = messages.encode(Activity(calls=0, last=0.0))
        while True:
            for turn in range(_TURNS):
                for end in self._pods.ends[turn::_TURNS]:
                    end.send(heartbeat, opcode=websocket_protocol.TEXT)
                # Agents were not all started at once, so they do not all beat at once.
                await asyncio.sleep(self._heartbeat / _TURNS)

    @contextlib.asynccontextmanager
    async def _deployed(self) -> AsyncIterator[None]:
        """Begin a deploy; when this is left, wait until it is ready."""
        self._version += 1
        deploy = Deploy(
            id=f"{self._name} {self._version}",
            spec=_spec(self._name, self._count, self._version, self._distribution),
            protocol=versions.PROTOCOL,
            version="0",
        )
        body = messages.encode(deploy) + b"\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**26)
        path = f"{routes.WORKLOADS}/{NAMESPACE}/{self._name}/deploy"
        writer.write(
            f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{self._port}\r\n"
            f"authorization: Bearer {USER_TOKEN}\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        reading = asyncio.create_task(_ready(reader))
        try:
            yield
            async with deadlines.timeout(DEADLINE):
                await reading
        finally:
            reading.cancel()
            writer.close()


async def _ready(answer: asyncio.StreamReader) -> None:
    """Read the events of a deploy to the last one, as a client does."""
    while True:
        line = await answer.readline()
        if b'"type":"ready"' in line:
            return
        if not line or b'"type":"error"' in line or line.startswith(b"HTTP/1.1 4"):
            raise AssertionError(f"the deploy failed: {line!r} {await answer.read(2000)!r}")


def _spec(
    name: str, pods: int, version: int, distribution: DistributionSpec | None = None
) -> WorkloadSpec:
    """A workload as programs have them."""
    environment = tuple((f"VARIABLE_{number}", "x" * 40) for number in range(10))
    return WorkloadSpec(
        NAMESPACE,
        name,
        CallableRef("fn", "train", "package.module", "train", project="project"),
        ComputeSpec(
            cpus="1", memory="1Gi", replicas=pods, env_vars=environment, distribution=distribution
        ),
        instance=f"version {version}",
    )


def reload_message() -> bytes:
    """What reaches each pod."""
    return messages.encode(Reload(generation=1, spec=_spec("large", 5000, 1)))


def answer_of(payload: memoryview) -> bytes | None:
    """What a pod answers that is told to load a generation."""
    if b'"type":"reload"' not in bytes(payload[:64]):
        return None
    message: FromController = messages.decode(FromController, payload)  # type: ignore[arg-type]  # a union
    assert isinstance(message, Reload)
    return messages.encode(Observed(message.generation, message.generation))
