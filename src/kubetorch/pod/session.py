"""The agent's end of its session: the WebSocket to the controller.

The session is opened again whenever it breaks, for as long as the agent lives: a pod serves calls
without a controller too. What the controller must know is kept as state, not as a queue: on each
connect the agent says what it serves, what the last reload came to, and what it knows of spawned
calls. So nothing depends on what an earlier connection delivered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator

from msgspec import structs

from kubetorch.errors import ProtocolError
from kubetorch.lib import backoff, upgrading, websocket
from kubetorch.lib.connections import Connection
from kubetorch.pod.contact import Contact
from kubetorch.wire import messages, routes, versions
from kubetorch.wire.apps import AppView
from kubetorch.wire.messages import (
    Activity,
    CallReport,
    FromAgent,
    FromController,
    Hello,
    LogReport,
    Observed,
    StageReport,
)

#: Seconds between two signs of life.
HEARTBEAT = 5.0
#: Least seconds between two reports that the pod became busy or idle.
EDGE_INTERVAL = 0.2
#: First and longest delay until the next attempt to connect, in seconds.
DELAYS = (0.1, 2.0)
#: Seconds until an attempt to connect is given up.
CONNECT_TIMEOUT = 10.0
#: The same for its connection alone: packets to a controller that is gone may just be dropped.
DIAL_TIMEOUT = 1.5
#: Seconds after which a report that was written to a session has certainly arrived.
REPORT_SETTLED = 30.0
#: Longest message of a controller.
MESSAGE_LIMIT = 16 * 1024 * 1024
#: Lines of a loading worker that wait for the session.
LOG_LIMIT = 1000

_log = logging.getLogger(__name__)

#: Whether calls run, when one began or ended, and the app.
_Said = tuple[bool, float, AppView | None]


class Session:
    """Keeps the session.

    Args:
        contact: Where the controller is.
        hello: Says what the agent runs now.
        activity: Says how busy it is now.
        on_message: Told what the controller wants.
        on_settled: Told the id of a call whose end the controller certainly knows.
        on_abandoned: Told that the controller is lost, and so everybody who could end this agent.
    """

    def __init__(
        self,
        *,
        contact: Contact,
        hello: Callable[[], Hello],
        activity: Callable[[], Activity],
        on_message: Callable[[FromController], None],
        on_settled: Callable[[str], None],
        on_abandoned: Callable[[], None],
    ) -> None:
        self._contact = contact
        self._hello = hello
        self._activity = activity
        self._on_message = on_message
        self._on_settled = on_settled
        self._on_abandoned = on_abandoned
        self._link: _Link | None = None
        self._observed: Observed | None = None
        # Reports by call, and when they were written to a session.
        self._reports: dict[str, tuple[CallReport, float | None]] = {}
        self._edge: asyncio.TimerHandle | None = None
        # What the controller was told last.
        self._said: _Said = (False, 0.0, None)
        self._logs_left = 0

    # --------------------------------------------------------------------------------- to send

    def observed(self, message: Observed) -> None:
        """What a reload came to."""
        self._observed = message
        self._send(message)

    def stage(self, message: StageReport) -> None:
        """How far a reload is; lost without a session."""
        self._logs_left = LOG_LIMIT
        self._send(message)

    def log(self, message: LogReport) -> None:
        """A line of a loading worker; lost without a session, and beyond a limit per stage."""
        self._logs_left -= 1
        if self._logs_left == 0:
            text = f"… more than {LOG_LIMIT} lines; kt logs has the others"
            self._send(LogReport(generation=message.generation, text=text, source="stderr"))
        elif self._logs_left > 0:
            self._send(message)

    def call(self, message: CallReport) -> None:
        """News of a spawned call; repeated on later sessions until it has certainly arrived."""
        is_sent = self._send(message)
        self._reports[message.id] = (message, time.monotonic() if is_sent else None)

    def activity_changed(self) -> None:
        """The number of running calls changed."""
        if self._edge is None and self._link is not None:
            loop = asyncio.get_running_loop()
            self._edge = loop.call_later(EDGE_INTERVAL, self._send_edge)

    def app_changed(self) -> None:
        """The app began or ended."""
        if self._edge is not None:
            self._edge.cancel()
        self._send_edge()

    def _send_edge(self) -> None:
        self._edge = None
        activity = self._activity()
        # A call that began and ended since then counts as well: its service was used.
        if _said(activity) != self._said:
            self._said = _said(activity)
            self._send(activity)

    def _send(self, message: FromAgent) -> bool:
        return self._link is not None and self._link.send(message)

    def _forget_settled(self) -> None:
        now = time.monotonic()
        for call_id, (report, sent) in list(self._reports.items()):
            is_over = report.ended is not None
            if is_over and sent is not None and now - sent > REPORT_SETTLED:
                del self._reports[call_id]
                self._on_settled(call_id)

    # --------------------------------------------------------------------------------- to run

    async def run(self) -> None:
        """Keep a session until this is cancelled, or there can be none any more."""
        delays, refusal = _delays(), ""
        while not self._contact.is_lost:
            try:
                if await self._run_once():
                    delays, refusal = _delays(), ""
            except upgrading.UpgradeRefusedError as error:
                said = error.body[:500].decode("utf-8", "replace")
                # A pod may wait for days until a service is deployed that it is one of.
                level = logging.DEBUG if said == refusal else logging.WARNING
                _log.log(level, "session refused status=%s body=%s", error.status, said)
                refusal = said
            except (OSError, TimeoutError, asyncio.TimeoutError, websocket.WebSocketError) as error:
                _log.info("no session error=%s", error)
            await asyncio.sleep(next(delays))
        self._on_abandoned()

    async def _run_once(self) -> bool:
        """One session, from its connect to its end; whether the controller took part in it."""
        link = _Link(self._on_text)
        await upgrading.connect(
            self._contact.url() + routes.SESSIONS,
            link,
            headers={
                routes.AUTHORIZATION: f"Bearer {self._contact.token()}",
                routes.PROTOCOL: str(versions.PROTOCOL),
            },
            max_message=MESSAGE_LIMIT,
            timeout=CONNECT_TIMEOUT,
            dial_timeout=DIAL_TIMEOUT,
        )
        link.send(structs.replace(self._hello(), calls=tuple(self._reports)))
        if self._observed is not None:
            link.send(self._observed)
        self._link = link
        for report, _ in list(self._reports.values()):
            self.call(report)
        try:
            while not link.is_closed:
                activity = self._activity()
                self._said = _said(activity)
                link.send(activity)
                self._forget_settled()
                await link.wait_closed(HEARTBEAT)
        finally:
            self._link = None
            link.close()
        _log.info("session ended reason=%s", link.reason)
        return link.was_heard

    def _on_text(self, text: memoryview) -> None:
        message: FromController
        try:
            message = messages.decode(FromController, text)  # type: ignore[arg-type]  # a union
        except ProtocolError as error:  # a newer controller may say what this agent does not know
            _log.warning("message ignored error=%s", error)
            return
        self._on_message(message)


class _Link:
    """The endpoint of one session."""

    def __init__(self, on_text: Callable[[memoryview], None]) -> None:
        self._on_text = on_text
        self._connection: Connection | None = None
        self._closed = asyncio.Event()
        self.reason = ""
        #: Whether anything came: a controller that does not know the pod only closes.
        self.was_heard = False

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    async def wait_closed(self, timeout: float) -> None:
        """Wait until the session has ended, at most so many seconds."""
        waiter = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait([waiter], timeout=timeout)
        finally:
            waiter.cancel()

    def send(self, message: FromAgent) -> bool:
        """Whether it was written."""
        connection = self._connection
        if connection is None or not connection.is_open:
            return False
        connection.send(messages.encode(message), opcode=websocket.TEXT)
        return True

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close(websocket.GOING_AWAY)

    def on_open(self, connection: Connection) -> None:
        self._connection = connection

    def on_message(self, opcode: int, payload: memoryview) -> None:
        self.was_heard = True
        self._on_text(payload)

    def on_large(self, head: memoryview, length: int) -> memoryview | None:
        return None

    def on_placed(self, head: bytes, rest: memoryview) -> None:
        self.was_heard = True
        self._on_text(memoryview(head + rest))

    def on_writable(self) -> None:
        return None

    def on_close(self, reason: str) -> None:
        self.reason = reason
        self._closed.set()


def _said(activity: Activity) -> _Said:
    return bool(activity.calls), activity.last, activity.app


def _delays() -> Iterator[float]:
    first, limit = DELAYS
    return backoff.jittered(backoff.exponential(first=first, limit=limit))
