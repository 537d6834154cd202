"""The controller in a cluster, from its start to its end.

    listen, as standby ──► lead ──► read the state ──► serve ──► SIGTERM, or the lead is lost
                            ▲                                         │
                            └──────────── another pod ◄───────────────┘

A standby answers that it lives, and goes on with that until it serves. Whoever leads marks its own
pod, and the Service chooses pods by that mark. A leader that has lost the lead ends its process at
once, also while it starts: what another one does by now must not be done twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Mapping

import uvloop

from kubetorch.controller import database
from kubetorch.controller.access import Access
from kubetorch.controller.backends.kubernetes.attaching import Attaching
from kubetorch.controller.backends.kubernetes.backend import KubernetesBackend
from kubetorch.controller.backends.kubernetes.namespaces import Namespaces
from kubetorch.controller.backends.kubernetes.preparing import Preparing
from kubetorch.controller.backends.kubernetes.secrets import SecretObjects
from kubetorch.controller.backends.kubernetes.volumes import VolumeClaims
from kubetorch.controller.cluster import installation, leading
from kubetorch.controller.cluster.access import Clocks, ClusterAccess
from kubetorch.controller.cluster.leader import Election
from kubetorch.controller.cluster.pods import KnownPods
from kubetorch.controller.cluster.podtokens import PodTokens
from kubetorch.controller.cluster.resource import WORKLOADS
from kubetorch.controller.cluster.reviews import Reviews
from kubetorch.controller.cluster.settings import NAME, Settings
from kubetorch.controller.cluster.standby import Standby
from kubetorch.controller.cluster.state import KubernetesState
from kubetorch.controller.controller import Controller
from kubetorch.controller.depots import Depots
from kubetorch.controller.state import Kept, SqliteState
from kubetorch.controller.workloads import Workloads
from kubetorch.datastore.blobs import Room
from kubetorch.errors import KubetorchError
from kubetorch.k8s import locating
from kubetorch.k8s.access import Access as KubernetesAccess
from kubetorch.k8s.client import Client
from kubetorch.lib import descriptors
from kubetorch.lib.clock import SystemClock
from kubetorch.manifests.kinds import Manifest

#: Connections that wait to be accepted.
BACKLOG = 1024
#: What to tell who deploys when there is no room for it.
ROOM = Room(
    "the controller's blob store",
    "tear down services that nobody uses and deploy again some minutes later, or have an "
    "administrator give it more: kt upgrade --set blobs.emptyDir.sizeLimit=40Gi, or a larger "
    "volume (blobs.persistence)",
)

_log = logging.getLogger(__name__)


def main(environ: Mapping[str, str]) -> int:
    """Run the controller; its exit status."""
    try:
        settings = Settings.read(environ)
        access = locating.find()
        listener = socket.create_server((settings.host, settings.port), backlog=BACKLOG)
    except (KubetorchError, OSError) as error:
        sys.stderr.write(f"the controller cannot start: {error}\n")
        return 1
    logging.basicConfig(
        stream=sys.stderr,
        level=settings.log_level,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    os.umask(0o077)
    # Each agent has a connection; many runtimes start containers with 1024.
    descriptors.raise_limit()
    try:
        return uvloop.run(_Service(settings, access, listener).run())
    except (KubetorchError, OSError):
        _log.exception("controller failed")
        return 1
    finally:
        listener.close()


class _Service:
    """The controller and what it consists of.

    Args:
        settings: What the chart says.
        access: Where the API server is, and as whom to ask it.
        listener: The socket that clients and pods connect to.
    """

    def __init__(
        self, settings: Settings, access: KubernetesAccess, listener: socket.socket
    ) -> None:
        self._settings = settings
        self._client = Client(access)
        # The lease is renewed in time whatever else is asked: it has connections and turns alone.
        self._leasing = Client(access)
        self._listener = listener
        self._is_stopped = asyncio.Event()

    async def run(self) -> int:
        """Wait to lead, lead, and stop; the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._is_stopped.set)
        standby = Standby()
        await standby.start(self._listener)
        settings = self._settings
        election = Election(
            self._leasing, namespace=settings.namespace, place=settings.identity, name=NAME
        )
        async with self._client, self._leasing, election:
            if not await self._first(election.won()):
                await standby.close()
                return 0
            ending = asyncio.create_task(self._end_when_lost(election))
            try:
                await self._lead(election, standby)
            finally:
                ending.cancel()
        return 0

    async def _end_when_lost(self, election: Election) -> None:
        await election.lost()
        _log.error("lead lost identity=%s", self._settings.identity)
        # Nothing is closed in good order: whoever leads now has begun already.
        os._exit(1)

    async def _lead(self, election: Election, standby: Standby) -> None:
        """Serve until the signal to stop, which may come while there is much to take up yet."""
        async with contextlib.AsyncExitStack() as stack:
            if await self._first(self._start(election, standby, stack)):
                await self._is_stopped.wait()

    async def _start(
        self, election: Election, standby: Standby, stack: contextlib.AsyncExitStack
    ) -> None:
        """Take up what there is, and serve; what is to be closed is put on the stack."""
        stack.push_async_callback(standby.close)
        settings = self._settings
        state = KubernetesState(
            self._client, namespaces=settings.watched, may_write=lambda: election.is_leading
        )
        await state.load()
        settings.blobs.mkdir(parents=True, exist_ok=True)
        file = settings.blobs / "calls.sqlite"
        calls = SqliteState(file, database.open_database(file))
        stack.callback(calls.close)
        stack.push_async_callback(state.close)
        controller = await self._build(state, calls)
        stack.push_async_callback(_close, controller)
        await controller.start(self._listener)
        # Not before: probes would find nobody, and end a process that has much to take up.
        await standby.close()
        mark = leading.Mark(self._client, settings.namespace, settings.identity, election.won)
        await stack.enter_async_context(mark)

    async def _build(self, state: KubernetesState, calls: SqliteState) -> Controller:
        settings, client = self._settings, self._client
        secret = await installation.secret(client, settings.namespace)
        clock = SystemClock()
        clocks = Clocks(clock.time, time.monotonic)
        watched = settings.watched
        attaching = Attaching(SecretObjects(client, watched), VolumeClaims(client, watched))
        pod_tokens = PodTokens(client, secret=secret, clocks=clocks)

        def new_access(workloads: Workloads) -> Access:
            return ClusterAccess(
                Reviews(client, watched),
                pods=KnownPods(workloads),
                tokens_of_namespaces=pod_tokens,
                stores=attaching.stores,
                secret=secret,
                clocks=clocks,
            )

        backend = KubernetesBackend(
            client,
            runtime=settings.runtime,
            stores=attaching.stores,
            preparing=Preparing(Namespaces(client), attaching, pod_tokens.ensure),
            owner=lambda namespace, name: _reference(state, namespace, name),
            watched=watched,
        )
        return Controller(
            backend=backend,
            state=Kept(state, calls),
            depots=Depots(settings.blobs / "blobs", room=ROOM),
            clock=clock,
            secret=secret,
            new_access=new_access,
        )

    async def _first(self, event: Awaitable[object]) -> bool:
        """Wait for something, or for the signal to stop; whether it was the former."""
        waiting = asyncio.ensure_future(event)
        stopped = asyncio.ensure_future(self._is_stopped.wait())
        try:
            await asyncio.wait({waiting, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if self._is_stopped.is_set():
                return False
            await waiting
            return True
        finally:
            waiting.cancel()
            stopped.cancel()
            await asyncio.gather(waiting, stopped, return_exceptions=True)


async def _close(controller: Controller) -> None:
    with contextlib.suppress(KubetorchError):
        await controller.close(pods=False)


def _reference(state: KubernetesState, namespace: str, name: str) -> Manifest | None:
    """What the objects of a workload go away with: its own object."""
    uid = state.uid(namespace, name)
    if not uid:
        return None
    metadata = {"name": name, "uid": uid}
    return {"apiVersion": WORKLOADS.api_version, "kind": WORKLOADS.kind, "metadata": metadata}
