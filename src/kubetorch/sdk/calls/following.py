"""Following a spawned call to its end: on the stream that opened it, by ATTACH, from its blob.

    following ── the stream is lost, or was never there ──► lost ──┬── runs: ATTACH ──► following
        ▲                                                          └── ended: its blob ──► known
        └── it provably never ran: sent again ──┘

`work` takes what has arrived and never blocks; a search asks controller and pod, or sends the call
again, in a thread of its own, so that whoever waits can keep a deadline. Several threads and
coroutines may wait.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kubetorch.errors import (
    CallCancelledError,
    CallLostError,
    CallRefusedError,
    KubetorchError,
    ResultExpiredError,
)
from kubetorch.sdk.calls.invocation import Again, Invocation
from kubetorch.sdk.calls.options import CallOptions
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

#: See `Following`.
AGREEMENT = 10.0
#: Bytes of arguments that are kept beyond the time that it takes to send them, to send them again.
KEPT_BYTES = 4 * 1024 * 1024


class Search:
    """Bringing a lost call back into sight, in a thread.

    Attributes:
        is_wanted: Somebody asked for it since it last looked.
        is_over: It has ended.
        error: Why it was in vain.
    """

    def __init__(self) -> None:
        self.is_wanted = True
        self.is_over = False
        self.error: Exception | None = None


class Following:
    """One spawned call, as far as this process knows it.

    Args:
        call_id: Its identity.
        session: Gives the way to ask the controller.
        agreement: Seconds in which pod and controller have to agree on what became of the call.

    Attributes:
        outcome: How it ended.
        is_sent: Its arguments are on their way.
    """

    def __init__(
        self, call_id: str, session: Callable[[], Session], *, agreement: float = AGREEMENT
    ) -> None:
        self.call_id = call_id
        self._agreement = agreement
        self.outcome: calls.Outcome | None = None
        self.is_sent = False
        self._session = session
        self._arrived: deque[Event] = deque()
        self._wakers: list[Callable[[], None]] = []
        # Again in the same thread: `on_progress` may ask how the call is.
        self._working = threading.RLock()
        # A child that is forked has no streams, and sends nothing that its parent sends.
        self._pid = os.getpid()
        self._searching = threading.Lock()
        self._search: Search | None = None
        self._stream: Stream | None = None
        self._call: PendingCall | None = None
        # As its caller said, or as is usual for one that was spawned elsewhere.
        self._options = CallOptions()
        self._shows_logs: bool | None = None
        self._logging = LoggingConfig()
        self._lines: CallLines | None = None
        # What to send again, as long as nothing of the call can have run, and when.
        self._unstarted: Invocation | None = None
        self._again: Again | None = None
        self._cancels = 0
        # Connected by this object for an ATTACH, and so to be closed by it.
        self._route: Route | None = None
        # While the controller says that a pod runs the call, and the pod does not know it.
        self._disagreement: Backoff | None = None

    # ----------------------------------------------------------------------------- waiting

    def add_waker(self, waker: Callable[[], None]) -> None:
        """Call this, from any thread, whenever there is something to `work` on."""
        self._wakers.append(waker)

    def remove_waker(self, waker: Callable[[], None]) -> None:
        """Undo `add_waker`."""
        self._wakers.remove(waker)

    @property
    def is_lost(self) -> bool:
        """Whether it is time to `search` for the call."""
        return self.outcome is None and self._call is None

    @property
    def is_to_be_sent(self) -> bool:
        """Whether it is lost because nobody took it yet."""
        return self.is_lost and self._unstarted is not None

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
        self._options, self._logging = invocation.options, invocation.target.logging
        self._shows_logs = invocation.shows_logs
        self._open(invocation)

    def search(self) -> Search:
        """Begin to bring the call back into sight, unless that is under way; wakes at its end.

        A call that runs is attached to; of one that has ended the outcome is fetched; one that
        nobody took is sent again.
        """
        with self._searching:
            search = self._search
            if search is not None and not search.is_over:
                search.is_wanted = True
                return search
            self._search = search = Search()
        thread = threading.Thread(
            target=self._run, args=(search,), name="kubetorch-search", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # too many of them, or the program ends
            search.error = CallLostError(
                f"call {self.call_id} cannot be looked for: {error}", hint="ask for it again"
            )
            search.is_over = True
            self._wake()
        return search

    def view(self) -> CallView:
        """What the controller knows of the call.

        Raises:
            ResultExpiredError: It is unknown, or forgotten.
        """
        return self._session().ask(lambda controller: controller.get_call(self.call_id))

    def cancel(self) -> None:
        """Have the call end, if it still runs."""
        self._cancels += 1
        stream, call = self._stream, self._call
        if stream is not None and call is not None and stream.accepts_calls:
            stream.cancel(call, abandons=False)
        elif self.outcome is None and not self.is_to_be_sent:
            self._session().ask(lambda controller: controller.cancel_call(self.call_id))

    def _open(self, invocation: Invocation) -> None:
        stream = invocation.route.stream() or invocation.route.connect(invocation.patience)
        self._lines = invocation.lines
        self._stream = stream
        self._unstarted = invocation
        self._call = call = stream.prepare(self._put)
        invocation.start(stream, call)
        self.is_sent = call.upload is None

    # ---------------------------------------------------------------------------- searching

    def _run(self, search: Search) -> None:
        while not search.is_over:
            search.is_wanted = False
            try:
                self._find()
            except Exception as error:  # noqa: BLE001  # it is raised where the call is waited for
                search.error = error
            with self._searching:
                search.is_over = not search.is_wanted or search.error is not None
        self._wake()

    def _find(self) -> None:
        self.work()
        if not self.is_lost:
            return
        if self._unstarted is not None:
            self._send_again(self._unstarted)
            return
        view = self.view()
        if view.state == "running":
            self._attach(view)
            return
        data = self._session().ask(lambda controller: controller.get_result(view.id))
        self.outcome = calls.unpack_outcome(data)
        self._close()

    def _send_again(self, invocation: Invocation) -> None:
        if self._again is not None:
            invocation.route.pause(self._again.delay)
        cancels = self._cancels
        if cancels:
            self._refuse(CallCancelledError("cancelled by the caller"))
            return
        try:
            self._open(invocation)
        except KubetorchError as error:
            refused = invocation.refused(error)
            self._refuse(refused if isinstance(refused, KubetorchError) else error)
        if self._cancels > cancels:
            self.cancel()

    def _refuse(self, error: KubetorchError) -> None:
        """It ends here: no pod has taken it."""
        failure = failures.describe(error, started=False)
        self._end(calls.Raised(failures.without_traceback(failure, error)))

    # ------------------------------------------------------------------------------- events

    def _put(self, event: Event) -> None:
        if event.call is self._call:
            self._note(event.kind)
        self._arrived.append(event)
        self._wake()
        if self._unstarted is not None and self._is_to_go_on(event, self._unstarted):
            self.search()

    def _note(self, kind: int) -> None:
        """Let go of what is not needed any more once this has come."""
        unstarted = self._unstarted
        if kind == SENT:
            if unstarted is not None and unstarted.body.total > KEPT_BYTES:
                self._unstarted = None
        elif kind not in (Kind.ERROR, LOST):  # it has begun to run, and its pod knows it
            self._unstarted = self._disagreement = None

    def _is_to_go_on(self, event: Event, unstarted: Invocation) -> bool:
        """Whether no pod took the call, so that it has to be sent again, also if nobody waits."""
        if os.getpid() != self._pid or unstarted.route.is_closed:
            return False
        if event.kind == LOST:
            return not event.call.was_written
        return not calls.raised(event.payload or b"").failure.started

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
        elif kind == Kind.PROGRESS:
            self._report(self._stream, event)
        elif kind == Kind.RESULT:
            self._end(calls.returned(event.meta, event.payload or b""))
        elif kind == Kind.ERROR:
            self._fail(calls.raised(event.payload or b""))
        elif kind == LOST:
            self._lose(event)
        elif kind == SENT:
            self.is_sent = True

    def _report(self, stream: Stream, event: Event) -> None:
        if not event.call.reports:
            return
        report = event.call.reports.popleft()
        if self._options.on_progress is not None:
            self._options.on_progress(report.current, report.total, report.message)
        elif self._lines is not None:
            self._lines.progress(stream.pod, report)

    def _fail(self, raised: calls.Raised) -> None:
        failure = raised.failure
        if self._unstarted is not None:
            self._again = self._unstarted.again_after(failure)
            if self._again is not None:
                self._stream = self._call = None
                return
        if failure.code == ResultExpiredError.code and self._route is not None:
            # The pod has forgotten it meanwhile: the controller has its outcome, or soon will.
            self._disagreement = self._disagreement or Backoff(self._agreement)
            self._stream = self._call = None
        else:
            self._end(raised)

    def _lose(self, event: Event) -> None:
        self._stream = self._call = self._disagreement = None
        unstarted, self._unstarted = self._unstarted, None
        if unstarted is None or event.call.was_written or os.getpid() != self._pid:
            return
        self._again = unstarted.again_after_loss(event)
        if self._again is None:
            self._refuse(CallRefusedError("the call was not sent: its pod could not be reached"))
        else:
            self._unstarted = unstarted

    def _end(self, outcome: calls.Outcome) -> None:
        self.outcome = outcome
        if self._lines is not None:
            self._lines.end()
        self._close()

    def _close(self) -> None:
        self._stream = self._call = self._unstarted = None
        route, self._route = self._route, None
        if route is not None:
            route.close()

    # ------------------------------------------------------------------------------- ATTACH

    def _attach(self, view: CallView) -> None:
        disagreement = self._disagreement
        if disagreement is not None and not disagreement.pause(threading.Event()):
            self._disagreement = None  # whoever asks later may be told more
            raise CallLostError(
                f"call {self.call_id} is said to run in pod {view.pod}, which does not know it",
                hint=f"kt logs {view.workload} shows what it printed",
            )
        self._close()
        route = Route(view.workload, lambda: self._locate(view), way=self._session().way)
        self._route = route
        self._lines = CallLines(route.screen, self._logging)
        self._stream = stream = route.connect()
        self._call = call = stream.prepare(self._put)
        shows_logs = route.screen.is_shown if self._shows_logs is None else self._shows_logs
        stream.start(call, frames.Attach(self.call_id, stream_logs=shows_logs))

    def _locate(self, view: CallView) -> Location:
        session = self._session()
        workload = session.get_workload(view.namespace, view.workload)
        pods = (pod for pod in workload.pods if pod.name == view.pod and pod.url)
        urls = tuple(session.address(workload, pod) for pod in pods)
        return Location(urls, workload.token)
