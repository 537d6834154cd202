"""The way from the thread that reads a stream to the coroutines that wait for its calls."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kubetorch.sdk.streams.pending import Event

if TYPE_CHECKING:
    import asyncio


class Mailbox:
    """Events for the coroutines of one event loop, which is woken once for many of them.

    Args:
        loop: The loop.
        due: Mailboxes that the reading thread is to `post` after what it is reading now.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, due: list[Mailbox]) -> None:
        self._loop = loop
        self._due = due
        self._events: deque[Event] = deque()
        self._is_due = False

    def put(self, event: Event) -> None:
        """Called by the reading thread."""
        self._events.append(event)
        if not self._is_due:
            self._is_due = True
            self._due.append(self)

    def post(self) -> None:
        """Wake the loop; called by the reading thread."""
        try:
            self._loop.call_soon_threadsafe(self._hand_out)
        except RuntimeError:  # the loop is closed: nobody waits any more
            self._events.clear()

    def _hand_out(self) -> None:
        # First this, so that an event that comes from now on wakes the loop again.
        self._is_due = False
        events = self._events
        while events:
            event = events.popleft()
            event.call.context.put(event)


class Mailboxes:
    """The mailboxes of one stream, one for each event loop that calls on it."""

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, Mailbox] = {}
        # Those that were put something into since the last `post`.
        self._due: list[Mailbox] = []

    def of(self, loop: asyncio.AbstractEventLoop) -> Mailbox:
        """Where to deliver events for coroutines of this loop."""
        mailbox = self._by_loop.get(loop)
        if mailbox is None:
            for old in [old for old in self._by_loop if old.is_closed()]:
                del self._by_loop[old]
            mailbox = self._by_loop[loop] = Mailbox(loop, self._due)
        return mailbox

    def post(self) -> None:
        """Wake the loops that there is something for."""
        while self._due:
            self._due.pop().post()


class Events:
    """The events of one call, for one coroutine at a time."""

    __slots__ = ("_events", "_loop", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        """Called in the loop."""
        self._events.append(event)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def get(self) -> Event:
        """The next event."""
        while not self._events:
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._events.popleft()
