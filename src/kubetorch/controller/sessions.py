"""The controller's end of the pods' sessions: one WebSocket per connected agent.

An agent names its pod in `Hello`, and reports what it does from then on. When it has been silent
for longer than a few heartbeats, its pod counts as not ready, though its connection may still be
open (a stopped process, a machine that sleeps).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kubetorch.controller.access import Access, PodIdentity, Principal
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.controller.workload import Workload
from kubetorch.controller.workloads import Workloads
from kubetorch.errors import ForbiddenError, KubetorchError, ProtocolError, UnauthorizedError
from kubetorch.lib import websocket_protocol
from kubetorch.lib.clock import Clock, Timer
from kubetorch.lib.websocket import Connection, Endpoint
from kubetorch.manifests.desired_pods import MountedNames
from kubetorch.wire import messages, versions

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
        # The task that checks what the pod has mounted, and the messages that arrive meanwhile.
        self._mount_check: asyncio.Task[None] | None = None
        self._early_messages: list[bytes] = []
        self._silence_timer: Timer | None = None
        self._last_message_time = 0.0
        self._is_silent = False
        # The last message, if the same message again is only a sign of life.
        self._repeated_text: bytes | None = None

    # --------------------------------------------------------------------------- for a workload

    def send(self, message: messages.FromController) -> None:
        self.send_text(messages.encode(message))

    def send_text(self, text: bytes) -> None:
        if self._connection is not None:
            self._connection.send(text, opcode=websocket_protocol.TEXT)

    def close(self, reason: str, code: int = websocket_protocol.GOING_AWAY) -> None:
        connection, self._connection = self._connection, None
        # Messages until the connection is closed are dropped, and silence does not matter any more.
        self._stop_listening()
        if connection is not None:
            connection.close(code, reason)

    # ------------------------------------------------------------------------ for its connection

    def on_open(self, connection: Connection) -> None:  # Endpoint's
        self._connection = connection
        is_pod = self._access.namespace_of_pod(self.principal) is not None
        connection.limit(LIMITS.pod_hello_bytes if is_pod else LIMITS.hello_bytes)
        self._silence_timer = self._clock.call_later(TIMING.session_hello_seconds, self._on_silence)

    def on_message(self, opcode: int, payload: memoryview) -> None:  # Endpoint's
        if self._repeated_text is not None and payload == self._repeated_text:
            self._note_message()  # thousands of pods send the same message twice a second
        else:
            self._on_text(bytes(payload))

    def on_close(self, reason: str) -> None:  # Endpoint's
        self._connection = None
        self._stop_listening()
        if self._mount_check is not None:
            self._mount_check.cancel()
        if self._workload is not None and self._pod is not None:
            self._workload.disconnected(self._pod.pod, self)
            _log.info("session ended pod=%s reason=%s", self._pod.pod, reason)
        self._on_end(self)

    # ---------------------------------------------------------------------------------- messages

    def _on_text(self, text: bytes) -> None:
        if self._connection is None:
            return  # it was closed, and this was on its way
        if self._mount_check is not None:
            self._early_messages.append(text)
            return
        try:
            message: messages.FromAgent = messages.decode(messages.FromAgent, text)  # type: ignore[arg-type]  # a union
            self._handle(message)
            if isinstance(message, messages.Activity):
                self._repeated_text = text
        except KubetorchError as error:
            self._refuse(error)

    def _refuse(self, error: KubetorchError) -> None:
        _log.warning("session refused pod=%s error=%.200s", self._pod, error)
        code = websocket_protocol.POLICY_VIOLATION
        if isinstance(error, ProtocolError):
            code = websocket_protocol.PROTOCOL_ERROR
        self.close(str(error), code)

    def _handle(self, message: messages.FromAgent) -> None:
        if isinstance(message, messages.Hello):
            self._begin(message)
        elif self._workload is None or self._pod is None:
            raise ProtocolError("the first message of a session must be hello")
        else:
            self._note_message()
            if self._is_silent:
                self._is_silent = False
                self._workload.silence_ended(self._pod.pod, self._serving)
            self._dispatch(message, self._workload, self._pod)

    def _begin(self, hello: messages.Hello) -> None:
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
            self._connection.limit(LIMITS.session_message_bytes)
        mounted = workload.mounted(hello.pod)
        if not mounted:
            self._welcome(hello, pod, workload)
        elif self._connection is not None:
            # What has come already is kept, and more stays with the agent.
            self._connection.read_on(False)
            check = self._check(hello, pod, workload, mounted)
            self._mount_check = asyncio.get_running_loop().create_task(check)

    async def _check(
        self, hello: messages.Hello, pod: PodIdentity, workload: Workload, mounted: MountedNames
    ) -> None:
        """Admit the pod only if it may have its mounts."""
        try:
            await self._access.check_mounts(
                workload.spec, workload.grants, mounted, is_running=hello.generation > 0
            )
            self._mount_check = None
            if self._connection is not None and self._workloads.workload_of(pod) is workload:
                self._welcome(hello, pod, workload)
        except ForbiddenError as error:
            self._refuse(error)
            workload.refused(pod.pod, error)
        except KubetorchError as error:
            self._refuse(error)
        early_messages, self._early_messages = self._early_messages, []
        for text in early_messages:
            self._on_text(text)
        if self._connection is not None:
            self._connection.read_on(True)

    def _welcome(self, hello: messages.Hello, pod: PodIdentity, workload: Workload) -> None:
        self._pod, self._workload, self._serving = pod, workload, hello.generation
        self._stop_listening()
        self._note_message()
        _log.info("session began pod=%s generation=%s", hello.pod, hello.generation)
        welcome = self._access.welcome(pod)
        if welcome is not None:
            self.send(welcome)
        workload.connected(hello, self)
        self._workloads.on_calls(pod, hello.calls)
        if hello.generation:
            self._on_begin(workload, self)

    def _dispatch(self, message: messages.FromAgent, workload: Workload, pod: PodIdentity) -> None:
        match message:
            case messages.Observed():
                self._serving = message.serving
                workload.observed(pod.pod, message)
            case messages.StageReport():
                workload.staged(pod.pod, message)
            case messages.LogReport():
                workload.logged(pod.pod, message)
            case messages.Activity():
                workload.active(pod.pod, message)
            case messages.PodLoad():
                workload.loaded(pod.pod, message)
            case messages.CallReport():
                self._workloads.on_call(pod, message)
            case messages.Regroup():
                workload.regroup(pod.pod, message)
            case messages.Probed():
                workload.probed(pod.pod, message)

    # ----------------------------------------------------------------------------------- silence

    def _stop_listening(self) -> None:
        self._repeated_text = None
        if self._silence_timer is not None:
            self._silence_timer.cancel()
            self._silence_timer = None

    def _note_message(self) -> None:
        self._last_message_time = self._clock.time()
        if self._silence_timer is None:
            self._silence_timer = self._clock.call_later(
                TIMING.session_silence_seconds, self._on_silence
            )
        if self._workload is not None and self._pod is not None:
            self._workload.message_received(self._pod.pod)

    def _on_silence(self) -> None:
        self._silence_timer = None
        # A clock that was set back makes it wait longer once.
        seconds_left = min(
            TIMING.session_silence_seconds,
            self._last_message_time + TIMING.session_silence_seconds - self._clock.time(),
        )
        if self._workload is None or self._pod is None:
            self.close("no hello came", websocket_protocol.POLICY_VIOLATION)
        elif seconds_left > 0.0:
            self._silence_timer = self._clock.call_later(seconds_left, self._on_silence)
        else:
            self._is_silent, self._repeated_text = True, None
            self._workload.silent(self._pod.pod)
