"""A controller on a listening socket that it is given, with a backend whose pods are not there.

simulated_controller SOCKET FOLDER: the socket's number, and where its files go. At SIGUSR1 the
pods of `LOSING` that have the highest ordinals are gone.

It has all modules of a controller in a cluster, since its memory is measured.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
from pathlib import Path

import uvloop

from benchmarks.simulation.backend import SimulatedBackend
from kubetorch.controller import database
from kubetorch.controller.access import LocalAccess, PodIdentity
from kubetorch.controller.app import Controller
from kubetorch.controller.backends.process.stores import SecretFiles, VolumeFolders
from kubetorch.controller.blobs import BlobStores
from kubetorch.controller.cluster import service
from kubetorch.controller.state import SqliteState
from kubetorch.lib.clock import SystemClock
from kubetorch.wire import tokens

SECRET = b"a secret of the benchmark's own"
USER_TOKEN = "the user's token"
#: The workload that loses pods, and how many.
LOSING, LOST = ("team", "ranks"), 500


def session(pod: PodIdentity) -> str:
    """The token of a pod for its session, which never ends."""
    audience = tokens.audience(pod.namespace, pod.workload)
    claims = tokens.Claims(audience, 1e12, f"pod:{pod.pod}")
    return tokens.sign(tokens.workload_key(SECRET, audience), claims)


async def main(listener: socket.socket, folder: Path) -> None:
    """Serve until it is told to stop."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    clock = SystemClock()
    user = tokens.fingerprint(USER_TOKEN)
    file = folder / "state.sqlite"
    state = SqliteState(file, database.open_database(file))
    secrets = SecretFiles(folder / "secrets", clock.time)
    backend = SimulatedBackend(secrets, VolumeFolders(folder / "volumes", clock.time))
    loop.add_signal_handler(signal.SIGUSR1, backend.lose, *LOSING, LOST)
    controller = Controller(
        backend=backend,
        state=state,
        call_state=state,
        blob_stores=BlobStores(folder / "blobs"),
        keys=folder / "keys",
        clock=clock,
        secret=SECRET,
        new_access=lambda workloads: LocalAccess(
            user=user,
            secret=SECRET,
            clock=clock.time,
            session_token_of=lambda pod: session(pod) if workloads.workload_of(pod) else "",
        ),
    )
    await controller.start(listener)
    gc.freeze()
    await stopped.wait()
    await controller.close(pods=False)
    state.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    assert service.__doc__  # it is what a cluster runs
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        uvloop.run(main(listener, Path(sys.argv[2])))
