"""The siblings of a pod, and the world of a distributed service, as the controller says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kubetorch.lib.changes import Changes
from kubetorch.wire.messages import Member, Members, Regroup, World

#: Seconds until a request for a new world is sent again, since a session may lose it.
REPEAT = 2.0


class Membership:
    """Knows the siblings of this pod; `send` brings a request to the controller."""

    def __init__(self, send: Callable[[Regroup], object] = lambda message: None) -> None:
        self._send = send
        self._members: dict[int, Member] = {}
        # By the identity of each request for a new world, the epoch that it was made in.
        self._asked: dict[str, int] = {}
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
        """Have every change reported at once; what is returned ends that."""
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
        """Processes of a world start; returns when the first ones of it did, as `time.time`."""
        if self._started[0] != world.epoch:
            self._started = world.epoch, time.time()
        return self._started[1]

    async def wait_for_world(self, generation: int) -> World:
        while (world := self.world_of(generation)) is None:
            await self.changes.wait()
        return world

    def regroup(self, request: str, timeout: float, *, is_quorum_awaited: bool) -> int:
        """The epoch in which a request was made for a newer world; it is made if it was not."""
        if request not in self._asked:
            epoch = self.world.epoch if self.world is not None else 0
            self._asked[request] = epoch
            loop = asyncio.get_running_loop()
            message = Regroup(id=request, epoch=epoch, is_quorum_awaited=is_quorum_awaited)
            self._ask(message, loop.time() + timeout)
        return self._asked[request]

    def regrouped(self, request: str) -> None:
        """A request is answered, or nobody waits for it any more."""
        self._asked.pop(request, None)

    def _ask(self, request: Regroup, until: float) -> None:
        loop = asyncio.get_running_loop()
        epoch = self._asked.get(request.id)
        if epoch is None or (self.world is not None and self.world.epoch > epoch):
            return
        if loop.time() < until:
            self._send(request)
            loop.call_later(REPEAT, self._ask, request, until)
