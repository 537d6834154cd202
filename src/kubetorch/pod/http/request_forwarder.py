"""A request that any pod may answer: the pod that gets it passes it on to a less busy sibling.

    client ── agent ──┬── its own workers, or its own app
                      └── agent of the sibling with the fewest calls, which keeps it

The pod asks its siblings for the numbers of their calls, at most once in
`sibling_loads_valid_seconds`, and counts the requests that it passes on meanwhile. In a cluster a
Service spreads requests already, so a pod without calls answers its requests itself. On one machine
all requests come to one pod, which takes turns with pods that are as busy.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from urllib.parse import urlsplit

import msgspec

from kubetorch.errors import AgentDiedError
from kubetorch.lib import deadlines, proxy, transports
from kubetorch.lib.asgi import ClientGoneError, Receive, Scope, Send
from kubetorch.lib.async_http import HttpPool, Request
from kubetorch.lib.http1 import Header
from kubetorch.lib.http_server import Message
from kubetorch.lib.proxy import Mount, Target
from kubetorch.pod.membership import Membership
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.wire import routes
from kubetorch.wire.messages import Member

_ALONE = routes.ALONE.lower().encode()
_SAME_PATHS = Mount(outside="", inside="")


def is_alone(headers: Iterable[Header]) -> bool:
    """True if another pod has passed a request on: this pod answers it."""
    return any(name == _ALONE for name, _ in headers)


class RequestForwarder(msgspec.Struct, eq=False, kw_only=True, dict=True):
    pod_name: str
    members: Membership
    token: Callable[[], str | None]
    #: The number of calls of this pod.
    load: Callable[[], int]
    #: True if all requests come to one pod of several.
    takes_turns: bool
    #: False under a scaler, which counts the requests of each pod.
    is_on: bool = True

    def __post_init__(self) -> None:
        self._pool = HttpPool(connect_timeout=TIMING.sibling_load_answer_seconds)
        self._loads_lock = asyncio.Lock()
        self._loads_time = -TIMING.sibling_loads_valid_seconds
        # Calls of siblings by pod: the numbers that they reported, and requests passed on since.
        self._loads: Counter[str] = Counter()
        # Requests of this pod that a sibling has.
        self._forwarded: Counter[str] = Counter()
        # When each pod was chosen last, as numbers.
        self._turns: Counter[str] = Counter()
        self._numbers = itertools.count(1)

    @property
    def running(self) -> int:
        """Requests of this pod that siblings answer."""
        return self._forwarded.total()

    async def close(self) -> None:
        await self._pool.close()

    # -------------------------------------------------------------------------------- the choice

    async def choose(self) -> Member | None:
        """The sibling that is to answer a request; `None`: this pod."""
        if not self.is_on or not self._siblings or not (self.load() or self.takes_turns):
            return None
        await self._refresh_loads()
        siblings = {member.pod: member for member in self._siblings if member.pod in self._loads}
        loads = {self.pod_name: self.load(), **{pod: self._loads[pod] for pod in siblings}}

        def order(pod: str) -> tuple[int, int]:
            is_elsewhere = pod != self.pod_name
            return loads[pod], self._turns[pod] if self.takes_turns else is_elsewhere

        chosen = min(loads, key=order)
        self._turns[chosen] = next(self._numbers)
        return siblings.get(chosen)

    def choose_by(self, key: str, ordinals: Sequence[int]) -> Member | None:
        """The sibling that answers all requests with a key; every client chooses the same."""
        member = self.members.find(ordinals[zlib.crc32(key.encode()) % len(ordinals)])
        is_sibling = member is not None and member.url and member.pod != self.pod_name
        return member if self.is_on and is_sibling else None

    @property
    def _siblings(self) -> list[Member]:
        return [
            member for member in self.members.members if member.url and member.pod != self.pod_name
        ]

    async def _refresh_loads(self) -> None:
        loop = asyncio.get_running_loop()
        async with self._loads_lock:
            if loop.time() - self._loads_time < TIMING.sibling_loads_valid_seconds:
                return
            siblings = self._siblings
            if len(siblings) > LIMITS.asked_siblings:
                siblings = random.sample(siblings, LIMITS.asked_siblings)
            counts = await asyncio.gather(*map(self._load_of, siblings))
            self._loads.clear()
            for member, calls in zip(siblings, counts, strict=True):
                if calls is not None:
                    self._loads[member.pod] = max(calls, self._forwarded[member.pod])
            self._loads_time = loop.time()

    async def _load_of(self, member: Member) -> int | None:
        """The number of calls of a sibling; `None` if it does not serve."""
        parts = urlsplit(member.url)
        route = transports.Route(parts.hostname or "", parts.port or 80)
        request = Request("GET", routes.LOAD, ((routes.AUTHORIZATION, f"Bearer {self.token()}"),))
        try:
            async with deadlines.timeout(TIMING.sibling_load_answer_seconds):
                answer = await self._pool.send(
                    route, request, timeout=TIMING.sibling_load_answer_seconds
                )
                text = await answer.read(
                    LIMITS.sibling_load_answer_bytes, timeout=TIMING.sibling_load_answer_seconds
                )
            return int(json.loads(text)["calls"]) if answer.status == 200 else None
        except (OSError, TimeoutError, asyncio.TimeoutError, ValueError, KeyError):
            return None

    # -------------------------------------------------------------------------------- the request

    def begin(self, member: Member) -> Callable[[], None]:
        """Count one more request of a sibling, until the returned function is called."""
        pod, is_over = member.pod, False
        self._loads[pod] += 1
        self._forwarded[pod] += 1

        def end() -> None:
            nonlocal is_over
            if not is_over:
                self._loads[pod] -= self._loads[pod] > 0
                self._forwarded[pod] -= 1
            is_over = True

        return end

    def target(self, member: Member) -> Target:
        """The address of a sibling."""
        parts = urlsplit(member.url)
        return Target(parts.hostname or "", parts.port or 80, _SAME_PATHS)

    @staticmethod
    def headers(headers: Sequence[Header]) -> list[Header]:
        return [*headers, (_ALONE, b"1")]

    async def relay(
        self, member: Member, scope: Scope, headers: Sequence[Header], receive: Receive, send: Send
    ) -> bool:
        """Let a sibling answer a request; false if it cannot be reached, and has read nothing."""
        has_begun = has_read = False

        async def receive_on() -> Message:
            nonlocal has_read
            has_read = True
            return await receive()

        async def send_on(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            if any(name == b"content-length" for name, _ in message.get("headers", ())):
                end()  # it is answered as a whole, and the client may send the next one at once
            await send(message)

        end = self.begin(member)
        try:
            passed = self.headers(headers)
            await proxy.relay(scope, passed, receive_on, send_on, self.target(member))
        except (OSError, TimeoutError, asyncio.TimeoutError) as error:
            if has_begun:
                raise ClientGoneError from error
            if has_read:
                raise AgentDiedError(member.pod, "AgentDied") from error
            return False
        finally:
            end()
        return True
