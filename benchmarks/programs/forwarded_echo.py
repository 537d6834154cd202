"""Bytes there and back through a port-forward of the API server, with nothing around it.

forwarded_echo NAMESPACE POD PORT SIZE
"""

from __future__ import annotations

import asyncio

from benchmarks import port_stream
from benchmarks.programs import driving
from benchmarks.programs.answering import answer, arguments
from kubetorch.k8s import kubeconfig
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import PODS, Ref


def main() -> None:
    """Answer; each measurement has a connection of its own."""
    namespace, pod, port, size = arguments()
    ref, payload = Ref(PODS, pod, namespace), bytes(int(size))

    async def measure(seconds: float) -> dict[str, float]:
        async with (
            Client(kubeconfig.find()) as client,
            await port_stream.connect(client, ref, int(port)) as stream,
        ):

            async def call() -> None:
                await stream.write(payload)
                remaining_bytes = len(payload)
                while remaining_bytes:
                    received = len(await stream.read())
                    assert received, "the connection has ended"
                    remaining_bytes -= received

            return await driving.latency_async(call, seconds)

    answer({"latency": lambda seconds: asyncio.run(measure(seconds))})


if __name__ == "__main__":
    main()
