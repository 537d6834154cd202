"""Following a spawned call to its end: on the stream that opened it, by ATTACH, from its blob.

    following ── the stream is lost, or was never there ──► lost ──┬── runs: ATTACH ──► following
                                                                   └── ended: its blob ──► known

`work` takes what has arrived and never blocks; `find` asks controller and pod, and blocks. Whoever
waits does both until the outcome is known; several threads and coroutines may.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kubetorch.errors import CallLostError, CallRefusedError, ResultExpiredError
from kubetorch.sdk.calls.invocation import Invocation
from kubetorch.sdk.calls.route import Route
from kubetorch.sdk.logs import CallLines
from kubetorch.sdk.streams.connecting import Backoff, Location
from kubetorch.sdk.streams.pending import LOST, SENT, Event, PendingCall
from kubetorch.sdk.streams.stream import Stream
from kubetorch.specs.logging import LoggingConfig
from kubetorch.wire import calls, failures, frames
from kubetorch.wire.frames import Kind
from kubetorch.wire.messages import CallView

if TYPE_CHECKING:
    from kubetorch.sdk.session import Session

#: Seconds in which pod and controller have to agree on what became of a call.
_AGREEMENT = 10.0


class Following:
    """One spawned call, as far as this process knows it.

    Args:
        call_id: Its identity.
        session: Gives the way to ask the controller.

    Attributes:
        outcome: How it ended.
        is_sent: Its arguments are on their way.
    """

    def __init__(self, call_id: str, session: Callable[[], Session]) -> None:
        self.call_id = call_id
        self.outcome: calls.Outcome | None = None
        self.is_sent = False
        self._session = session
        self._arrived: deque[Event] = deque()
        self._wakers: list[Callable[[], None]] = []
        self._working = threading.Lock()
        self._finding = threading.Lock()
        self._stream: Stream | None = None
        self._call: PendingCall | None = None
        self._lines: CallLines | None = None
        # Connected by this object for an ATTACH, and so to be closed by it.
        self._route: Route | None = None
        self._patience: Backoff | None = None

    # ----------------------------------------------------------------------------- waiting

    def add_waker(self, waker: Callable[[], None]) -> None:
        """Call this, from any thread, whenever there is something to `work` on."""
        self._wakers.append(waker)

    def remove_waker(self, waker: Callable[[], None]) -> None:
        """Undo `add_waker`."""
        self._wakers.remove(waker)

    @property
    def is_lost(self) -> bool:
        """Whether it is time to `find` the call."""
        return self.outcome is None and self._call is None

    def work(self) -> None:
        """Take what has arrived: show lines, note the outcome."""
        with self._working:
            while self._arrived:
                self._take(self._arrived.popleft())
        if self.outcome is not None:
            self._wake()

    # ----------------------------------------------------------------------------- following

    def start(self, invocation: Invocation) -> None:
        """Open the call.

        Raises:
            KubetorchError: No pod can be reached.
        """
        stream = invocation.route.stream() or invocation.route.connect(invocation.patience)
        self._lines = invocation.lines
        self._stream = stream
        self._call = call = stream.prepare(self._put)
        invocation.start(stream, call)
        self.is_sent = call.upload is None

    def find(self) -> None:
        """Ask the controller for the call, and its pod if it still runs there.

        Raises:
            ResultExpiredError: It is unknown, or its result is not kept any more.
            KubetorchError: Controller or pod cannot be reached.
        """
        with self._finding:
            if not self.is_lost:
                return
            view = self._session().ask(lambda controller: controller.get_call(self.call_id))
            if view.state == "running":
                self._attach(view)
            else:
                data = self._session().ask(lambda controller: controller.get_result(view.id))
                self.outcome = calls.unpack_outcome(data)
                self._close()
        self._wake()

    def view(self) -> CallView:
        """What the controller knows of the call.

        Raises:
            ResultExpiredError: It is unknown, or forgotten.
        """
        return self._session().ask(lambda controller: controller.get_call(self.call_id))

    def cancel(self) -> None:
        """Have the call end, if it still runs."""
        stream, call = self._stream, self._call
        if stream is not None and call is not None and stream.accepts_calls:
            stream.cancel(call, abandons=False)
        elif self.outcome is None:
            self._session().ask(lambda controller: controller.cancel_call(self.call_id))

    # ------------------------------------------------------------------------------- events

    def _put(self, event: Event) -> None:
        self._arrived.append(event)
        self._wake()

    def _wake(self) -> None:
        for waker in list(self._wakers):
            waker()

    def _take(self, event: Event) -> None:
        if event.call is not self._call or self._stream is None:
            return
        kind = event.kind
        if kind == Kind.LOG and self._lines is not None:
            self._lines.log(event.meta)
            self._stream.took(event)
        elif kind == Kind.PROGRESS and self._lines is not None and event.call.reports:
            self._lines.progress(self._stream.pod, event.call.reports.popleft())
        elif kind == Kind.RESULT:
            self._end(calls.returned(event.meta, event.payload or b""))
        elif kind == Kind.ERROR:
            self._fail(calls.raised(event.payload or b""))
        elif kind == LOST:
            self._lose(event)
        elif kind == SENT:
            self.is_sent = True

    def _fail(self, raised: calls.Raised) -> None:
        if raised.failure.code == ResultExpiredError.code and self._route is not None:
            # The pod has forgotten it meanwhile: the controller has its outcome, or soon will.
            self._stream = self._call = None
        else:
            self._end(raised)

    def _lose(self, event: Event) -> None:
        self._stream = self._call = None
        if not event.call.was_written:
            error = CallRefusedError("the call was not sent: its pod could not be reached")
            self._end(calls.Raised(failures.describe(error, started=False)))

    def _end(self, outcome: calls.Outcome) -> None:
        self.outcome = outcome
        if self._lines is not None:
            self._lines.end()
        self._close()

    def _close(self) -> None:
        self._stream = self._call = None
        route, self._route = self._route, None
        if route is not None:
            route.close()

    # ------------------------------------------------------------------------------- ATTACH

    def _attach(self, view: CallView) -> None:
        if self._patience is None:
            self._patience = Backoff(_AGREEMENT)
        elif not self._patience.pause(threading.Event()):
            raise CallLostError(
                f"call {self.call_id} is said to run in pod {view.pod}, which does not know it",
                hint=f"kt logs {view.workload} shows what it printed",
            )
        route = Route(view.workload, lambda: self._locate(view), way=self._session().way)
        self._route = route
        self._lines = CallLines(route.screen, LoggingConfig())
        self._stream = stream = route.connect()
        self._call = call = stream.prepare(self._put)
        stream.start(call, frames.Attach(self.call_id, stream_logs=True))

    def _locate(self, view: CallView) -> Location:
        session = self._session()
        workload = session.get_workload(view.namespace, view.workload)
        pods = (pod for pod in workload.pods if pod.name == view.pod and pod.url)
        urls = tuple(session.address(workload, pod) for pod in pods)
        return Location(urls, workload.token)
