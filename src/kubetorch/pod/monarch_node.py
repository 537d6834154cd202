"""The Monarch host of a pod: a worker loop, which the program on the first pod attaches to.

https://meta-pytorch.org/monarch/api/monarch.actor.html. A host starts the processes that programs
spawn on it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

from kubetorch.errors import ResourceNotAvailableError, StartupError
from kubetorch.pod.node_process import NodeProcess

#: Printed once Monarch is imported.
_IMPORTED = "monarch is imported"
_HOST = f"""
import sys
from monarch.actor import run_worker_loop_forever
print({_IMPORTED!r}, flush=True)
run_worker_loop_forever(address=sys.argv[1], ca="trust_all_connections")
"""
#: Seconds between two attempts to reach a host that does not listen yet.
_AGAIN = 0.1


class MonarchNode:
    """A host of Monarch, as the processes below its worker loop."""

    def __init__(self, python: str, env: Mapping[str, str], on_line: Callable[[str], None]) -> None:
        self._python = python
        self._on_line = on_line
        self._process = NodeProcess(env, self._tell)

    async def start(self, addresses: Sequence[str], node: int) -> None:
        """Start the host with this number; on the first pod, wait for those of the other pods.

        Raises:
            ResourceNotAvailableError: The interpreter of the workers cannot import Monarch.
            StartupError: The host does not start.
        """
        address = addresses[node]
        if not await self._process.start((self._python, "-c", _HOST, address), _IMPORTED):
            said = self._process.lines
            raise ResourceNotAvailableError(
                f"{self._python} cannot import Monarch, which a service that is distributed as "
                f"monarch needs: {said[-1] if said else 'it says nothing'}",
                hint='kt.Image().pip_install(["torchmonarch"]) installs it, for Linux on x86_64',
            )
        for awaited in [address, *(addresses if node == 0 else ())]:
            while not await _listens(awaited):
                if self._process.has_ended:
                    said = "\n".join(self._process.lines)
                    raise StartupError(f"the Monarch host at {address} did not start:\n{said}")
                await asyncio.sleep(_AGAIN)

    def _tell(self, line: str) -> None:
        if line != _IMPORTED:
            self._on_line(line)

    @property
    def is_alive(self) -> bool:
        return not self._process.has_ended

    async def kill(self) -> None:
        """End the host, and all that was spawned on it."""
        await self._process.kill()


async def _listens(address: str) -> bool:
    found = urlsplit(address)
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection(found.hostname, found.port)
        writer.close()
        return True
    return False
