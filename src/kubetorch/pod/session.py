"""The agent's session with the controller: the WebSocket, and the address and token for it.

The session is opened again whenever it breaks, for as long as the agent lives: a pod serves calls
without a controller too. The agent's reports are state, not a queue: at each connect the agent
sends the generation that it serves, the outcome of the last reload, and its reports of spawned
calls. So no report depends on an earlier connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from msgspec import structs

from kubetorch.errors import ProtocolError
from kubetorch.lib import async_http, backoff, deadlines, websocket, websocket_protocol
from kubetorch.lib.tasks import start_task
from kubetorch.lib.websocket import Connection, Endpoint
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.wire import frames, messages, routes, versions
from kubetorch.wire.podenv import PodEnv

_log = logging.getLogger(__name__)
#: True if calls run; when a call last began or ended; the app; true if the agent stops; programs
#: that stand in a debugger.
_ActivityEdge = tuple[bool, float, messages.AppView | None, bool, int]


class ControllerAddress(msgspec.Struct, frozen=True):
    """URL and token of the controller. Read again for each connection: both may have changed."""

    fixed_url: str = ""
    url_file: str = ""
    fixed_token: str = ""
    token_file: str = ""

    @classmethod
    def of_pod(cls, pod: PodEnv, session: str) -> ControllerAddress:
        """The address for a pod; `session` is the token on the local backend."""
        if pod.backend == "local":
            return cls(url_file=pod.controller_file, fixed_token=session)
        return cls(pod.controller_url, fixed_token=pod.token, token_file=pod.token_file)

    @property
    def is_lost(self) -> bool:
        """True if the local controller's folder is gone; in a cluster, Kubernetes ends the pod."""
        return bool(self.url_file) and not Path(self.url_file).parent.is_dir()

    def url(self) -> str:
        url = Path(self.url_file).read_text().strip() if self.url_file else self.fixed_url
        return url.rstrip("/")

    def token(self) -> str:
        """The token for the session and for blobs; Kubernetes replaces the file before it ends."""
        return Path(self.token_file).read_text().strip() if self.token_file else self.fixed_token


class Session(msgspec.Struct, eq=False, kw_only=True, dict=True):
    address: ControllerAddress
    hello: Callable[[], messages.Hello]
    activity: Callable[[], messages.Activity]
    on_message: Callable[[messages.FromController], None]
    on_settled: Callable[[str], None]
    on_abandoned: Callable[[], None]
    #: The load, if the controller wants it.
    load: Callable[[], messages.PodLoad | None] = lambda: None

    def __post_init__(self) -> None:
        self._endpoint: _SessionEndpoint | None = None
        self._heartbeat = TIMING.heartbeat_seconds
        self._observed: messages.Observed | None = None
        # The present stage of a reload that goes on.
        self._stage: messages.StageReport | None = None
        # Reports by call, each with the time at which it was written to a session.
        self._reports: dict[str, tuple[messages.CallReport, float | None]] = {}
        self._edge_timer: asyncio.TimerHandle | None = None
        # The activity that was reported to the controller last.
        self._last_edge: _ActivityEdge = (False, 0.0, None, False, 0)
        self._logs_left = 0
        self._probes: set[asyncio.Task[None]] = set()

    # --------------------------------------------------------------------------------- to send

    def report_observed(self, message: messages.Observed) -> None:
        self._observed, self._stage = message, None
        self.send(message)

    def report_stage(self, message: messages.StageReport) -> None:
        """Report the progress of a reload; the last step is repeated on later sessions."""
        self._logs_left = LIMITS.load_log_lines
        message = structs.replace(message, message=message.message[: LIMITS.report_text_characters])
        if not message.warning:
            self._stage = message
        self.send(message)

    def report_line(self, message: messages.LogReport) -> None:
        """A line of a loading worker; lost without a session, and beyond a limit per stage."""
        self._logs_left -= 1
        if self._logs_left == 0:
            text = f"… more than {LIMITS.load_log_lines} lines; kt logs has the others"
            self.send(
                messages.LogReport(
                    generation=message.generation, text=text, source=frames.KUBETORCH
                )
            )
        elif self._logs_left > 0:
            self.send(structs.replace(message, text=message.text[: LIMITS.report_text_characters]))

    def report_call(self, message: messages.CallReport) -> None:
        """Report a spawned call; the report is sent on later sessions too, until it has arrived."""
        is_sent = self.send(message)
        self._reports[message.id] = (message, time.monotonic() if is_sent else None)

    def beat(self, interval: float) -> None:
        """Send heartbeats in this interval from now on."""
        is_sooner, self._heartbeat = interval < self._heartbeat, interval
        if is_sooner and self._endpoint is not None:
            self._endpoint.wake()

    def probe(self, message: messages.Probe) -> None:
        start_task(self._probe(message), self._probes)

    async def _probe(self, message: messages.Probe) -> None:
        is_reached = False
        with contextlib.suppress(OSError, TimeoutError, asyncio.TimeoutError, ProtocolError):
            async with (
                deadlines.timeout(TIMING.sibling_probe_seconds),
                async_http.fetch(
                    "GET",
                    message.url + routes.HEALTH,
                    {},
                    connect_timeout=TIMING.sibling_probe_seconds,
                    timeout=TIMING.sibling_probe_seconds,
                ) as answer,
            ):
                is_reached = answer.status > 0
        self.send(messages.Probed(id=message.id, is_reached=is_reached))

    def activity_changed(self) -> None:
        if self._edge_timer is None and self._endpoint is not None:
            loop = asyncio.get_running_loop()
            self._edge_timer = loop.call_later(TIMING.activity_edge_seconds, self._send_edge)

    def report_activity(self) -> None:
        """Report at once that the app began or ended, or that the agent stops."""
        if self._edge_timer is not None:
            self._edge_timer.cancel()
        self._send_edge()

    def _send_edge(self) -> None:
        self._edge_timer = None
        activity = self.activity()
        # A call that began and ended since then counts as well: its service was used.
        if _activity_edge(activity) != self._last_edge:
            self._last_edge = _activity_edge(activity)
            self.send(activity)

    def send(self, message: messages.FromAgent) -> bool:
        """Send a message; false without a session."""
        return self._endpoint is not None and self._endpoint.send(message)

    def _forget_settled(self) -> None:
        now = time.monotonic()
        for call_id, (report, sent) in list(self._reports.items()):
            is_over = report.ended is not None
            if is_over and sent is not None and now - sent > TIMING.report_settled_seconds:
                del self._reports[call_id]
                self.on_settled(call_id)

    # --------------------------------------------------------------------------------- to run

    async def run(self) -> None:
        """Keep a session until this is cancelled, or the controller is lost for good."""
        delays, last_reason = _delays(), ""
        while not self.address.is_lost:
            try:
                if await self._run_once():
                    delays, last_reason = _delays(), ""
            except websocket_protocol.UpgradeRefusedError as error:
                reason = error.body[:500].decode("utf-8", "replace")
                # A pod may wait for days until the service that it belongs to is deployed.
                level = logging.DEBUG if reason == last_reason else logging.WARNING
                _log.log(level, "session refused status=%s body=%s", error.status, reason)
                last_reason = reason
            except (
                OSError,
                TimeoutError,
                asyncio.TimeoutError,
                websocket_protocol.WebSocketError,
            ) as error:
                _log.info("no session error=%s", error)
            await asyncio.sleep(next(delays))
        self.on_abandoned()

    async def _run_once(self) -> bool:
        """Run one session to its end; true if the controller sent anything."""
        endpoint = _SessionEndpoint(self._on_text)
        await websocket.connect(
            self.address.url() + routes.SESSIONS,
            endpoint,
            headers={
                routes.AUTHORIZATION: f"Bearer {self.address.token()}",
                routes.PROTOCOL: str(versions.PROTOCOL),
            },
            max_message=LIMITS.controller_message_bytes,
            timeout=TIMING.session_connect_seconds,
            dial_timeout=TIMING.session_dial_seconds,
        )
        endpoint.send(structs.replace(self.hello(), calls=tuple(self._reports)))
        if self._observed is not None:
            endpoint.send(self._observed)
        if self._stage is not None:
            endpoint.send(self._stage)
        self._endpoint = endpoint
        for report, _ in list(self._reports.values()):
            self.report_call(report)
        load = self.load()
        if load is not None:
            endpoint.send(load)
        try:
            while not endpoint.is_closed:
                activity = self.activity()
                self._last_edge = _activity_edge(activity)
                endpoint.send(activity)
                self._forget_settled()
                await endpoint.wait_closed(self._heartbeat)
        finally:
            self._endpoint = None
            endpoint.close()
        _log.info("session ended reason=%s", endpoint.reason)
        return endpoint.has_received

    def _on_text(self, text: memoryview) -> None:
        message: messages.FromController
        try:
            message = messages.decode(messages.FromController, text)  # type: ignore[arg-type]  # a union
        except ProtocolError as error:  # a newer controller may send unknown messages
            _log.warning("message ignored error=%s", error)
            return
        self.on_message(message)


class _SessionEndpoint(Endpoint):
    def __init__(self, on_text: Callable[[memoryview], None]) -> None:
        self._on_text = on_text
        self._connection: Connection | None = None
        self._woken = asyncio.Event()
        self.is_closed = False
        self.reason = ""
        #: True once a message came: a controller that does not know the pod only closes.
        self.has_received = False

    async def wait_closed(self, timeout: float) -> None:
        """Wait until the session has ended or `wake` is called, at most so many seconds."""
        waiter = asyncio.ensure_future(self._woken.wait())
        try:
            await asyncio.wait([waiter], timeout=timeout)
        finally:
            waiter.cancel()
            self._woken.clear()

    def wake(self) -> None:
        self._woken.set()

    def send(self, message: messages.FromAgent) -> bool:
        """Write a message; false without a session."""
        connection = self._connection
        if connection is None or not connection.is_open:
            return False
        connection.send(messages.encode(message), opcode=websocket_protocol.TEXT)
        return True

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close(websocket_protocol.GOING_AWAY)

    def on_open(self, connection: Connection) -> None:
        self._connection = connection

    def on_message(self, opcode: int, payload: memoryview) -> None:
        self.has_received = True
        self._on_text(payload)

    def on_close(self, reason: str) -> None:
        self.reason = reason
        self.is_closed = True
        self.wake()


def _activity_edge(activity: messages.Activity) -> _ActivityEdge:
    calls, stopped = bool(activity.calls), activity.stopped
    return calls, activity.last, activity.app, activity.is_stopping, stopped


def _delays() -> Iterator[float]:
    first, limit = TIMING.session_first_delay_seconds, TIMING.session_longest_delay_seconds
    return backoff.jittered(first=first, limit=limit)
