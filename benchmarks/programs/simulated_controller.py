"""A controller on a listening socket that it is given, with a backend whose pods are not there.

simulated_controller SOCKET FOLDER: the socket's number, and where its files go.

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
from kubetorch.controller.access import LocalAccess
from kubetorch.controller.backends.secret_files import SecretFiles
from kubetorch.controller.backends.volume_folders import VolumeFolders
from kubetorch.controller.cluster import service
from kubetorch.controller.controller import Controller
from kubetorch.controller.depots import Depots
from kubetorch.controller.state import Kept, SqliteState
from kubetorch.lib.clock import SystemClock
from kubetorch.wire import tokens

SECRET = b"a secret of the benchmark's own"
USER_TOKEN = "the user's token"


async def main(listener: socket.socket, folder: Path) -> None:
    """Serve until it is told to stop."""
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    clock = SystemClock()
    user = tokens.fingerprint(USER_TOKEN)
    file = folder / "state.sqlite"
    state = SqliteState(file, database.open_database(file))
    secrets = SecretFiles(folder / "secrets", clock.time)
    controller = Controller(
        backend=SimulatedBackend(secrets, VolumeFolders(folder / "volumes", clock.time)),
        state=Kept(state, state),
        depots=Depots(folder / "blobs"),
        clock=clock,
        secret=SECRET,
        new_access=lambda workloads: LocalAccess(
            user=user, secret=SECRET, clock=clock.time, is_known=workloads.is_pod
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
    with socket.socket(fileno=int(sys.argv[1])) as given:
        uvloop.run(main(given, Path(sys.argv[2])))
