"""Everything that a controller consists of, put together."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable

from kubetorch.controller.access import Access, Principal
from kubetorch.controller.app import App
from kubetorch.controller.audit import Audit
from kubetorch.controller.backends.base import Backend
from kubetorch.controller.calls import Calls
from kubetorch.controller.depots import Depots
from kubetorch.controller.garbage import Garbage
from kubetorch.controller.recovery import Recovery
from kubetorch.controller.relay import Relay
from kubetorch.controller.routes.blobs import BlobRoutes
from kubetorch.controller.routes.calls import CallRoutes
from kubetorch.controller.routes.secrets import SecretRoutes
from kubetorch.controller.routes.service import ServiceRoutes
from kubetorch.controller.routes.table import Table
from kubetorch.controller.routes.volumes import VolumeRoutes
from kubetorch.controller.routes.workloads import WorkloadRoutes
from kubetorch.controller.sessions import MESSAGE_LIMIT, Session
from kubetorch.controller.state import Kept
from kubetorch.controller.workloads import Workloads
from kubetorch.lib.clock import Clock
from kubetorch.lib.connections import upgrade_class
from kubetorch.lib.serving import Server, Tunnels

#: Seconds that requests have to end when the controller stops.
CLOSE_GRACE = 1.0

_log = logging.getLogger(__name__)


class Controller:
    """A controller on one listening socket.

    Args:
        backend: Runs pods.
        state: What survives it.
        depots: Where the blobs are.
        clock: The time.
        secret: Secret of the installation.
        new_access: Makes what checks who asks, given the workloads.
        stop: Called when a request asks it to stop; told whether the pods stop too. Without it
            requests cannot.
    """

    def __init__(
        self,
        *,
        backend: Backend,
        state: Kept,
        depots: Depots,
        clock: Clock,
        secret: bytes,
        new_access: Callable[[Workloads], Access],
        stop: Callable[[bool], None] | None = None,
    ) -> None:
        calls = Calls(state.calls, depots, clock)
        self._clock = clock
        self._backend = backend
        self._sessions: set[Session] = set()
        self._last_request = clock.time()
        self.workloads = Workloads(
            backend=backend,
            state=state.workloads,
            depots=depots,
            calls=calls,
            clock=clock,
            secret=secret,
        )
        self._recovery = Recovery(depots, clock)
        self._garbage = Garbage(
            depots,
            specs=self.workloads.specs,
            results=calls.results,
            expire=calls.expire,
            clock=clock,
        )
        depots.on_full = self._garbage.hurry
        service = ServiceRoutes(
            self.workloads, backend=backend.name, started=clock.time(), stop=stop
        )
        found = [
            *service.routes(),
            *WorkloadRoutes(self.workloads, depots).routes(),
            *BlobRoutes(depots).routes(),
            *CallRoutes(calls, self.workloads, depots).routes(),
            *SecretRoutes(backend.stores.secrets, self.workloads).routes(),
            *VolumeRoutes(backend.stores.volumes, self.workloads).routes(),
        ]
        table = Table(route for route in found if stop is not None or not route.is_local)
        service.described = table.routes
        self._access = new_access(self.workloads)
        relay = Relay(self.workloads.get, secret=secret, clock=clock.time)
        self.app = App(
            table,
            self._access,
            relay,
            new_session=self._new_session,
            on_request=self._note_request,
            # The service of one user has nobody to tell apart.
            audit=None if stop is not None else Audit(clock.time),
        )
        upgrade = upgrade_class(self.app.accept, max_message=MESSAGE_LIMIT)
        passed_on = Tunnels(relay.takes, relay.open)
        self._server = Server(self.app, upgrade=upgrade, tunnels=passed_on)

    async def start(self, listener: socket.socket) -> None:
        """Take up what an earlier controller left, and serve."""
        await self.workloads.start()
        await self._server.start(listener)
        self._garbage.start()
        _log.info("controller started pid=%s workloads=%s", os.getpid(), len(self.workloads))

    async def close(self, *, pods: bool) -> None:
        """Stop serving.

        Args:
            pods: Whether the pods stop too, until the next start.
        """
        await self._garbage.close()
        await self.workloads.close(pods=pods)
        await self._backend.close(pods=pods)
        for session in list(self._sessions):
            session.close("the controller stops")
        await self._server.close(CLOSE_GRACE)

    def idle_seconds(self) -> float:
        """For how long nothing was deployed and nobody asked; 0 when that is not so."""
        if self._server.open_requests or not self.workloads.is_empty:
            self._last_request = self._clock.time()
        return self._clock.time() - self._last_request

    def _note_request(self) -> None:
        self._last_request = self._clock.time()

    def _new_session(self, principal: Principal) -> Session:
        session = Session(
            principal,
            access=self._access,
            registry=self.workloads,
            on_begin=lambda workload, session: self._recovery.ask(workload, session.send),
            clock=self._clock,
            on_end=self._sessions.discard,
        )
        self._sessions.add(session)
        return session
