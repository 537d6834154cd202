"""The siblings of a pod and the world of a distributed service, as the controller reports them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kubetorch.lib.changes import Changes
from kubetorch.pod.tuning import TIMING
from kubetorch.wire.messages import Member, Members, Regroup, World


class Membership:
    """The siblings of this pod; `send` sends a request to the controller."""

    def __init__(self, send: Callable[[Regroup], object] = lambda message: None) -> None:
        self._send = send
        self._members: dict[int, Member] = {}
        # The epoch in which each request for a new world was made, by the request's identity.
        self._request_epochs: dict[str, int] = {}
        self._listeners: dict[Callable[[], None], None] = {}
        # The epoch of the latest world that processes were started for here, and when at first.
        self._started = 0, 0.0
        #: The world that is formed at present.
        self.world: World | None = None
        #: Ordinals of the pods that each call goes to, where a selector has found them.
        self.pool: tuple[int, ...] = ()
        #: Notified of every change.
        self.changes = Changes()

    def update(self, message: Members) -> None:
        self._members = {member.ordinal: member for member in message.members}
        self.world, self.pool = message.world, message.pool
        for on_change in list(self._listeners):
            on_change()
        self.changes.notify()

    def subscribe(self, on_change: Callable[[], None]) -> Callable[[], None]:
        """Call a function at every change, at once; the returned function ends that."""
        self._listeners[on_change] = None
        return lambda: self._listeners.pop(on_change, None)

    @property
    def members(self) -> list[Member]:
        """The pods of the workload by ordinal."""
        return [self._members[ordinal] for ordinal in sorted(self._members)]

    def find(self, ordinal: int) -> Member | None:
        return self._members.get(ordinal)

    def world_of(self, generation: int) -> World | None:
        """The world that processes of this generation belong to, once it is formed."""
        world = self.world
        return world if world is not None and world.generation == generation else None

    def starts(self, world: World) -> float:
        """Note a start of a world's processes; returns the time of the first one (`time.time`)."""
        if self._started[0] != world.epoch:
            self._started = world.epoch, time.time()
        return self._started[1]

    async def wait_for_world(self, generation: int) -> World:
        while (world := self.world_of(generation)) is None:
            await self.changes.wait()
        return world

    def regroup(self, request: str, timeout: float, *, is_quorum_awaited: bool) -> int:
        """Request a newer world, once; returns the epoch in which the request was made."""
        if request not in self._request_epochs:
            epoch = self.world.epoch if self.world is not None else 0
            self._request_epochs[request] = epoch
            loop = asyncio.get_running_loop()
            message = Regroup(id=request, epoch=epoch, is_quorum_awaited=is_quorum_awaited)
            self._send_until_formed(message, loop.time() + timeout)
        return self._request_epochs[request]

    def forget_request(self, request: str) -> None:
        """Forget a request that is answered, or that no call waits for any more."""
        self._request_epochs.pop(request, None)

    def _send_until_formed(self, request: Regroup, until: float) -> None:
        loop = asyncio.get_running_loop()
        epoch = self._request_epochs.get(request.id)
        if epoch is None or (self.world is not None and self.world.epoch > epoch):
            return
        if loop.time() < until:
            self._send(request)
            loop.call_later(
                TIMING.world_request_interval_seconds, self._send_until_formed, request, until
            )
