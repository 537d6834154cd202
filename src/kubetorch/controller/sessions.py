"""The controller's end of the pods' sessions: one WebSocket per connected agent.

An agent says who it is in `Hello`, and goes on to say what it does. When it has been silent for
longer than a few heartbeats, it counts as not ready, though its connection may still be there (a
stopped process, a machine that sleeps).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kubetorch.controller.access import Access, PodIdentity, Principal
from kubetorch.controller.workload import Workload
from kubetorch.controller.workloads import Workloads
from kubetorch.errors import ForbiddenError, KubetorchError, ProtocolError, UnauthorizedError
from kubetorch.lib import websocket_protocol
from kubetorch.lib.clock import Clock, Timer
from kubetorch.lib.websocket import Connection, Endpoint
from kubetorch.manifests.desired_pods import Mounted
from kubetorch.wire import messages, versions
from kubetorch.wire.messages import (
    Activity,
    CallReport,
    FromAgent,
    FromController,
    Hello,
    LogReport,
    Observed,
    Probed,
    Regroup,
    StageReport,
)

#: Seconds without a word after which a pod is not ready.
SILENCE = 15.0
#: Seconds that a connection has to say `Hello`.
HELLO_TIMEOUT = 10.0
#: Longest message of an agent, in bytes: a failure with its traceback.
MESSAGE_LIMIT = 4 * 1024 * 1024
#: Longest `Hello`, of somebody who may be anybody, and of a pod of a workload, which may know of
#: tens of thousands of spawned calls.
HELLO_LIMIT, POD_HELLO_LIMIT = 16 * 1024, 1024 * 1024
#: Sessions of one identity that have not said `Hello`.
WAITING_LIMIT = 4

_log = logging.getLogger(__name__)


class Session(Endpoint):
    """One session; the endpoint of its connection."""

    def __init__(
        self,
        principal: Principal,
        *,
        access: Access,
        workloads: Workloads,
        on_begin: Callable[[Workload, Session], None],
        on_hello: Callable[[Session], None],
        clock: Clock,
        on_end: Callable[[Session], None],
    ) -> None:
        self.principal = principal
        self._access = access
        self._workloads = workloads
        self._on_begin = on_begin
        self._on_hello = on_hello
        self._clock = clock
        self._on_end = on_end
        self._connection: Connection | None = None
        self._pod: PodIdentity | None = None
        self._workload: Workload | None = None
        self._serving = 0
        # While what the pod has mounted is looked at, and what it says meanwhile.
        self._checking: asyncio.Task[None] | None = None
        self._early: list[bytes] = []
        self._silence: Timer | None = None
        self._heard = 0.0
        self._is_silent = False
        # What was said last, if it is only a sign of life when it is said again.
        self._sign: bytes | None = None

    # --------------------------------------------------------------------------- for a workload

    def send(self, message: FromController) -> None:
        self.send_text(messages.encode(message))

    def send_text(self, text: bytes) -> None:
        if self._connection is not None:
            self._connection.send(text, opcode=websocket_protocol.TEXT)

    def close(self, reason: str, code: int = websocket_protocol.GOING_AWAY) -> None:
        connection, self._connection = self._connection, None
        # Messages until the connection is gone are dropped, and silence is of no interest.
        self._stop_listening()
        if connection is not None:
            connection.close(code, reason)

    # ------------------------------------------------------------------------ for its connection

    def on_open(self, connection: Connection) -> None:  # Endpoint's
        self._connection = connection
        is_pod = self._access.namespace_of_pod(self.principal) is not None
        connection.limit(POD_HELLO_LIMIT if is_pod else HELLO_LIMIT)
        self._silence = self._clock.call_later(HELLO_TIMEOUT, self._on_silence)

    def on_message(self, opcode: int, payload: memoryview) -> None:  # Endpoint's
        if self._sign is not None and payload == self._sign:
            self._hear()  # thousands of pods say the same twice a second
        else:
            self._on_text(bytes(payload))

    def on_close(self, reason: str) -> None:  # Endpoint's
        self._connection = None
        self._stop_listening()
        if self._checking is not None:
            self._checking.cancel()
        if self._workload is not None and self._pod is not None:
            self._workload.disconnected(self._pod.pod, self)
            _log.info("session ended pod=%s reason=%s", self._pod.pod, reason)
        self._on_end(self)

    # ---------------------------------------------------------------------------------- messages

    def _on_text(self, text: bytes) -> None:
        if self._connection is None:
            return  # it was closed, and this was on its way
        if self._checking is not None:
            self._early.append(text)
            return
        try:
            message: FromAgent = messages.decode(FromAgent, text)  # type: ignore[arg-type]  # a union
            self._take(message)
            if isinstance(message, Activity):
                self._sign = text
        except KubetorchError as error:
            self._refuse(error)

    def _refuse(self, error: KubetorchError) -> None:
        _log.warning("session refused pod=%s error=%.200s", self._pod, error)
        code = websocket_protocol.POLICY_VIOLATION
        if isinstance(error, ProtocolError):
            code = websocket_protocol.PROTOCOL_ERROR
        self.close(str(error), code)

    def _take(self, message: FromAgent) -> None:
        if isinstance(message, Hello):
            self._begin(message)
        elif self._workload is None or self._pod is None:
            raise ProtocolError("the first message of a session must be hello")
        else:
            self._hear()
            if self._is_silent:
                self._is_silent = False
                self._workload.no_longer_silent(self._pod.pod, self._serving)
            self._dispatch(message, self._workload, self._pod)

    def _begin(self, hello: Hello) -> None:
        pod = PodIdentity(hello.namespace, hello.workload, hello.pod)
        if self._workload is not None:
            raise ProtocolError("a session says hello once")
        self._access.check_pod(self.principal, pod)
        versions.check(
            hello.protocol,
            peer=f"pod {hello.pod}",
            fix_peer=versions.FIX_PODS,
            fix_self="a newer controller takes it up",
        )
        workload = self._workloads.workload_of(pod)
        if workload is None:
            raise UnauthorizedError(f"there is no pod {hello.pod}")
        self._on_hello(self)
        if self._connection is not None:
            self._connection.limit(MESSAGE_LIMIT)
        mounted = workload.mounted(hello.pod)
        if not mounted:
            self._welcome(hello, pod, workload)
        elif self._connection is not None:
            # What has come already is kept, and more stays with the agent.
            self._connection.read_on(False)
            check = self._check(hello, pod, workload, mounted)
            self._checking = asyncio.get_running_loop().create_task(check)

    async def _check(
        self, hello: Hello, pod: PodIdentity, workload: Workload, mounted: Mounted
    ) -> None:
        """Admit the pod only if it may have its mounts."""
        try:
            await self._access.check_mounts(
                workload.spec, workload.grants, mounted, is_running=hello.generation > 0
            )
            self._checking = None
            if self._connection is not None and self._workloads.workload_of(pod) is workload:
                self._welcome(hello, pod, workload)
        except ForbiddenError as error:
            self._refuse(error)
            workload.refused(pod.pod, error)
        except KubetorchError as error:
            self._refuse(error)
        early, self._early = self._early, []
        for text in early:
            self._on_text(text)
        if self._connection is not None:
            self._connection.read_on(True)

    def _welcome(self, hello: Hello, pod: PodIdentity, workload: Workload) -> None:
        self._pod, self._workload, self._serving = pod, workload, hello.generation
        self._stop_listening()
        self._hear()
        _log.info("session began pod=%s generation=%s", hello.pod, hello.generation)
        welcome = self._access.welcome(pod)
        if welcome is not None:
            self.send(welcome)
        workload.connected(hello, self)
        if hello.calls is not None:
            self._workloads.on_calls(pod, hello.calls)
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
                self._workloads.on_call(pod, message)
            case Regroup():
                workload.regroup(pod.pod, message)
            case Probed():
                workload.probed(pod.pod, message)

    # ----------------------------------------------------------------------------------- silence

    def _stop_listening(self) -> None:
        self._sign = None
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def _hear(self) -> None:
        self._heard = self._clock.time()
        if self._silence is None:
            self._silence = self._clock.call_later(SILENCE, self._on_silence)
        if self._workload is not None and self._pod is not None:
            self._workload.heard(self._pod.pod)

    def _on_silence(self) -> None:
        self._silence = None
        # A clock that was set back makes it wait longer once.
        left = min(SILENCE, self._heard + SILENCE - self._clock.time())
        if self._workload is None or self._pod is None:
            self.close("no hello came", websocket_protocol.POLICY_VIOLATION)
        elif left > 0.0:
            self._silence = self._clock.call_later(left, self._on_silence)
        else:
            self._is_silent, self._sign = True, None
            self._workload.silent(self._pod.pod)
