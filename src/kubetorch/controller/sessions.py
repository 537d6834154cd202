"""The controller's end of the pods' sessions: one WebSocket per connected agent.

An agent says who it is in `Hello`, and goes on to say what it does. When it has been silent for
longer than a few heartbeats, it counts as not ready, though its connection may still be there (a
stopped process, a machine that sleeps).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Protocol

from kubetorch.controller.access import Access, PodIdentity, Principal
from kubetorch.controller.workload import Workload
from kubetorch.errors import KubetorchError, ProtocolError, UnauthorizedError
from kubetorch.lib import websocket
from kubetorch.lib.clock import Clock, Timer
from kubetorch.lib.connections import Connection
from kubetorch.wire import messages, versions
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

#: Seconds without a word after which a pod is not ready.
SILENCE = 15.0
#: Seconds that a connection has to say `Hello`.
HELLO_TIMEOUT = 10.0
#: Longest message of an agent, in bytes: a failure with its traceback.
MESSAGE_LIMIT = 4 * 1024 * 1024

_log = logging.getLogger(__name__)


class Registry(Protocol):
    """Where sessions find what they belong to."""

    def workload_of(self, pod: PodIdentity) -> Workload | None:
        """The workload of a pod, if there is such a pod."""

    def on_call(self, pod: PodIdentity, report: CallReport) -> None:
        """News of a spawned call."""

    def on_calls(self, pod: PodIdentity, ids: Collection[str]) -> None:
        """The agent of a pod knows of no other spawned calls that run."""


class Session:
    """One session; the endpoint of its connection.

    Args:
        principal: Whose token opened it.
        access: Says whether they are the pod that they say they are, and what it is told first.
        registry: Finds its workload.
        on_begin: Called once it is known that it is a pod's that serves.
        clock: Notices silence.
        on_end: Called once it is over.
    """

    def __init__(
        self,
        principal: Principal,
        *,
        access: Access,
        registry: Registry,
        on_begin: Callable[[Workload, Session], None],
        clock: Clock,
        on_end: Callable[[Session], None],
    ) -> None:
        self._principal = principal
        self._access = access
        self._registry = registry
        self._on_begin = on_begin
        self._clock = clock
        self._on_end = on_end
        self._connection: Connection | None = None
        self._pod: PodIdentity | None = None
        self._workload: Workload | None = None
        self._serving = 0
        self._silence: Timer | None = None
        self._is_silent = False

    # --------------------------------------------------------------------------- for a workload

    def send(self, message: FromController) -> None:
        """Tell the agent; dropped when the session is over."""
        self.send_text(messages.encode(message))

    def send_text(self, text: bytes) -> None:
        """Tell the agent what is encoded already; dropped when the session is over."""
        if self._connection is not None:
            self._connection.send(text, opcode=websocket.TEXT)

    def close(self, reason: str, code: int = websocket.GOING_AWAY) -> None:
        """End the session."""
        connection, self._connection = self._connection, None
        # What it says until the connection is gone is not listened to, nor is its silence.
        self._stop_listening()
        if connection is not None:
            connection.close(code, reason)

    # ------------------------------------------------------------------------ for its connection

    def on_open(self, connection: Connection) -> None:  # noqa: D102  # Endpoint's
        self._connection = connection
        self._silence = self._clock.call_later(HELLO_TIMEOUT, self._on_silence)

    def on_message(self, opcode: int, payload: memoryview) -> None:  # noqa: D102  # Endpoint's
        self._on_text(bytes(payload))

    def on_large(self, head: memoryview, length: int) -> memoryview | None:  # noqa: D102
        return None

    def on_placed(self, head: bytes, rest: memoryview) -> None:  # noqa: D102  # Endpoint's
        self._on_text(head + bytes(rest))

    def on_writable(self) -> None:  # noqa: D102  # Endpoint's
        return

    def on_close(self, reason: str) -> None:  # noqa: D102  # Endpoint's
        self._connection = None
        self._stop_listening()
        if self._workload is not None and self._pod is not None:
            self._workload.disconnected(self._pod.pod, self)
            _log.info("session ended pod=%s reason=%s", self._pod.pod, reason)
        self._on_end(self)

    # ---------------------------------------------------------------------------------- messages

    def _on_text(self, text: bytes) -> None:
        if self._connection is None:
            return  # it was closed, and this was on its way
        try:
            self._take(_decode(text))
        except KubetorchError as error:
            _log.warning("session refused pod=%s error=%s", self._pod, error)
            is_protocol = isinstance(error, ProtocolError)
            code = websocket.PROTOCOL_ERROR if is_protocol else websocket.POLICY_VIOLATION
            self.close(str(error), code)

    def _take(self, message: FromAgent) -> None:
        if isinstance(message, Hello):
            self._begin(message)
        elif self._workload is None or self._pod is None:
            raise ProtocolError("the first message of a session must be hello")
        else:
            self._hear(self._workload, self._pod.pod)
            self._dispatch(message, self._workload, self._pod)

    def _begin(self, hello: Hello) -> None:
        pod = PodIdentity(hello.namespace, hello.workload, hello.pod)
        if self._workload is not None:
            raise ProtocolError("a session says hello once")
        self._access.check_pod(self._principal, pod)
        versions.check(
            hello.protocol,
            peer=f"pod {hello.pod}",
            fix_peer=versions.FIX_PODS,
            fix_self="a newer controller takes it up",
        )
        workload = self._registry.workload_of(pod)
        if workload is None:
            raise UnauthorizedError(f"there is no pod {hello.pod}")
        self._pod, self._workload, self._serving = pod, workload, hello.generation
        self._restart_silence()
        _log.info("session began pod=%s generation=%s", hello.pod, hello.generation)
        welcome = self._access.welcome(pod)
        if welcome is not None:
            self.send(welcome)
        workload.connected(hello, self)
        if hello.calls is not None:
            self._registry.on_calls(pod, hello.calls)
        if hello.generation:
            self._on_begin(workload, self)

    def _dispatch(self, message: FromAgent, workload: Workload, pod: PodIdentity) -> None:
        match message:
            case Observed():
                self._serving = message.serving
                workload.observed(pod.pod, message)
            case StageReport():
                workload.staged(pod.pod, message)
            case LogReport():
                workload.logged(pod.pod, message)
            case Activity():
                workload.active(pod.pod, message)
            case CallReport():
                self._registry.on_call(pod, message)

    # ----------------------------------------------------------------------------------- silence

    def _hear(self, workload: Workload, pod: str) -> None:
        self._restart_silence()
        if self._is_silent:
            self._is_silent = False
            workload.heard_again(pod, self._serving)

    def _stop_listening(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def _restart_silence(self) -> None:
        self._stop_listening()
        self._silence = self._clock.call_later(SILENCE, self._on_silence)

    def _on_silence(self) -> None:
        self._silence = None
        if self._workload is None or self._pod is None:
            self.close("no hello came", websocket.POLICY_VIOLATION)
        else:
            self._is_silent = True
            self._workload.silent(self._pod.pod)


def _decode(text: bytes) -> FromAgent:
    message: FromAgent = messages.decode(FromAgent, text)  # type: ignore[arg-type]  # a union
    return message
