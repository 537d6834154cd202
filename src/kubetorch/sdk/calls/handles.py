"""Calls that go on without the program that made them: `caller.spawn(...)` and its handle.

    handed over ── ACCEPTED ──► spawned ◄───────────────────────┐
         ▲                         │ the stream is lost         │
         │                         ▼                            │
         └─ it provably never ran ─ lost ─┬─ runs: ATTACH ──────┘
                                          └─ ended: its blob ──► known

`SpawnedCall.hand_over` waits until the pod has the call on its disk. `SpawnedCall.work` handles the
events that have arrived and never blocks. A search asks controller and pod, or sends the call
again, in a thread of its own, so that waiting threads can keep a deadline. Several threads and
coroutines may wait.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from _queue import Empty, SimpleQueue
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from kubetorch.errors import (
    CallCancelledError,
    CallLostError,
    CallRefusedError,
    CallTimeoutError,
    InstanceReplacedError,
    KubetorchError,
    ResultExpiredError,
    SerializationError,
    ServiceNotFoundError,
    SpecError,
)
from kubetorch.lib import terminal
from kubetorch.sdk import backend, tracebacks
from kubetorch.sdk.calls import blocking
from kubetorch.sdk.calls.attempts import Done, Invocation, RetryAfter
from kubetorch.sdk.calls.broadcast import combine
from kubetorch.sdk.calls.call import LoopWakeup, ThreadWakeup, ends_with_call
from kubetorch.sdk.calls.options import CallOptions
from kubetorch.sdk.calls.route import FINAL, Backoff, Location, PodLeftError, Route
from kubetorch.sdk.calls.stream import Stream
from kubetorch.sdk.calls.stream_writer import LOST, Event, PendingCall
from kubetorch.sdk.calls.target import local_modules
from kubetorch.sdk.logs import CallLines
from kubetorch.sdk.tuning import LIMITS, TIMING
from kubetorch.specs import hints
from kubetorch.specs.logging import LoggingConfig
from kubetorch.wire import calls, codecs, exceptions, frames, introspection
from kubetorch.wire.frames import Kind
from kubetorch.wire.messages import UNENDED, CallView

if TYPE_CHECKING:
    from kubetorch.sdk.transport.session import Session


class Search:
    """A search for a lost call, in a thread."""

    def __init__(self) -> None:
        self.is_wanted = True
        self.is_over = False
        self.error: Exception | None = None


class SpawnedCall:
    def __init__(
        self,
        call_id: str,
        session: Callable[[], Session],
        *,
        agreement: float = TIMING.call_agreement_seconds,
    ) -> None:
        self.call_id = call_id
        self._agreement = agreement
        self.outcome: calls.Outcome | None = None
        #: True once its pod or the controller knows the call.
        self.is_accepted = False
        #: False while one thread hands the call over and handles its events; others wait then.
        self.is_handed_over = True
        #: True once the program asked for its outcome.
        self.has_reader = False
        self._session = session
        #: Events of its stream; `None` ends a wait.
        self._arrived: SimpleQueue[Event | None] = SimpleQueue()
        self._wakers: list[Callable[[], None]] = []
        # Reentrant: `on_progress` may ask for the status of the call.
        self._working = threading.RLock()
        # A forked child has no streams, and must not send the calls of its parent.
        self._pid = os.getpid()
        self._searching = threading.Lock()
        self._search: Search | None = None
        self._stream: Stream | None = None
        self._call: PendingCall | None = None
        #: The options of its caller; of a call that was spawned elsewhere the defaults.
        self._options = CallOptions()
        self._shows_logs: bool | None = None
        self._logging = LoggingConfig()
        self._lines: CallLines | None = None
        #: The call to send again, as long as it cannot have run, and the pause before that.
        self._unstarted: Invocation | None = None
        self._retry: RetryAfter | None = None
        self._is_refused = False
        self._cancels = 0
        #: The codec that its value was requested in, if this program has spawned it.
        self.requested_codec: str | None = None
        #: The route of this program's calls of the same service, if this program has spawned it.
        self.origin: Route | None = None
        #: The route of this object's own ATTACH, which it closes.
        self._route: Route | None = None
        #: The pauses while the controller says that a pod runs the call, but the pod does not.
        self._disagreement: Backoff | None = None
        #: The error that its stream ended with.
        self._loss: Exception | None = None

    # ----------------------------------------------------------------------------- waiting

    @contextlib.contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """Have `wake` called, from any thread, whenever there is an event to `work` on."""
        self._wakers.append(wake)
        stream = self._stream
        if stream is not None:
            stream.watch()
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C, also of an event loop
                shown = f"kt calls show {self.call_id}"
                tracebacks.explain_interrupt(error, f"The call goes on: {shown}")
            raise
        finally:
            self._wakers.remove(wake)
            if self._lines is not None:
                self._lines.end()

    @property
    def is_lost(self) -> bool:
        """True if it is time to `search` for the call."""
        return self.outcome is None and self._call is None and self.is_handed_over

    @property
    def is_to_be_sent(self) -> bool:
        """True if the call is lost because no pod took it yet."""
        return self.is_lost and self._unstarted is not None

    def work(self) -> None:
        """Handle the events that have arrived: show lines, note the outcome."""
        if not self.is_handed_over:
            return
        with self._working, contextlib.suppress(Empty):
            while True:
                self._handle_event(self._arrived.get_nowait())
        if self.outcome is not None:
            self._wake()

    # ----------------------------------------------------------------------------- following

    def hand_over(self, invocation: Invocation) -> None:
        """Open the call, and wait until its pod has it on disk."""
        self._options, self._logging = invocation.options, invocation.target.logging
        self._shows_logs, self.origin = invocation.shows_logs, invocation.route
        self.requested_codec = invocation.body.codec
        self.is_handed_over = False
        try:
            self._open(invocation)
            while not self.is_accepted:
                self._hand_over(invocation)
        except BaseException:  # Ctrl-C too: its caller has no handle, so it is not to run
            stream, call = self._stream, self._call
            if stream is not None and call is not None:
                stream.cancel(call)
            raise
        finally:
            self.is_handed_over = True
            self._wake()
        if self._is_refused:  # in the meantime
            self.search()
        if self._cancels:
            self.cancel()

    def _hand_over(self, invocation: Invocation) -> None:
        stream, call = self._stream, self._call
        if isinstance(self.outcome, calls.Raised) and not self.outcome.failure.started:
            raise invocation.error_of(self.outcome.failure)
        if self.outcome is not None:
            self.is_accepted = True
        elif stream is not None and call is not None:
            target = invocation.target
            awaited = (f"{target.name}.spawn(...)", target.service)
            with ends_with_call(lambda: self._end_wait(stream, self._arrived), awaited):
                event = stream.wait(call, self._arrived)
            if event is not None:
                self._handle_event(event)
        elif self._unstarted is not None:
            self._send_again(self._unstarted)
        else:
            self._ask(invocation)

    @staticmethod
    def _end_wait(stream: Stream, arrived: SimpleQueue[Event | None]) -> None:
        """End a wait for the pod. Called by any thread."""
        arrived.put(None)
        stream.end_wait()

    def _ask(self, invocation: Invocation) -> None:
        """Ask the controller about a call that its pod does not know."""
        try:
            self.view()
        except ResultExpiredError as error:
            if self._loss is not None:
                raise self._loss from None
            if invocation.patience <= 0:
                raise CallLostError(
                    f"no pod of {invocation.target.service} says that it has the call",
                    hint=f"kt status {invocation.target.service}",
                ) from error
        else:
            self.is_accepted = True

    def search(self) -> Search:
        """Search for the call, unless a search is under way; wakes at its end.

        It attaches to a call that runs, fetches the outcome of a call that has ended, and sends a
        call again that no pod took.
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
                f"call {self.call_id} cannot be looked for: {error}", hint="try again"
            )
            search.is_over = True
            self._wake()
        return search

    def view(self) -> CallView:
        return self._session().ask(lambda controller: controller.get_call(self.call_id))

    def kept_value(self) -> calls.Outcome:
        """Fetch the value of a call that could not travel, pickled, from the pod that keeps it."""
        view = self.view()
        location = self._locate(view)
        if not location.urls:
            raise ResultExpiredError(
                f"the value of call {self.call_id} was kept on pod {view.pod}, which is gone",
                hint="values that cannot travel are kept on the disk of the pod that ran the call",
            )
        route = Route(view.workload, lambda: location, transport=self._session().transport)
        arrived: SimpleQueue[Event | None] = SimpleQueue()
        try:
            stream = route.connect()
            call = stream.prepare(arrived.put)
            stream.start(call, frames.Attach(self.call_id, serialization="pickle"), reads=True)
            while True:
                with ends_with_call(
                    lambda: self._end_wait(stream, arrived), (f"the value of {view.callable}", "")
                ):
                    event = stream.wait(call, arrived)
                if event is None:
                    continue
                if event.kind == LOST:
                    raise event.meta
                if event.kind == Kind.ERROR:
                    return calls.raised(event.payload or b"")
                if event.kind == Kind.RESULT:
                    return calls.returned(event.meta, event.payload or b"")
        finally:
            route.close()

    def cancel(self) -> None:
        self._cancels += 1
        stream, call = self._stream, self._call
        if stream is not None and call is not None and stream.accepts_calls:
            stream.cancel(call, abandons=False)
        elif self.outcome is None and self.is_handed_over and not self.is_to_be_sent:
            self._session().ask(lambda controller: controller.cancel_call(self.call_id))

    def _open(self, invocation: Invocation) -> None:
        try:
            stream = invocation.route.stream() or invocation.route.connect(invocation.patience)
        except CallRefusedError:
            if not invocation.leave_ancestor():
                raise
            self._open(invocation)
            return
        self._lines = invocation.lines
        self._stream = stream
        self._unstarted = invocation
        self._call = call = stream.prepare(self._put)
        invocation.start(stream, call, reads=not self.is_handed_over)

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
        try:
            view = self.view()
        except ResultExpiredError:
            if self._loss is not None:  # it went before the controller knew it
                raise self._loss from None
            raise
        if view.state in UNENDED:
            self._attach(view)
            return
        data = self._session().ask(lambda controller: controller.get_result(view.id))
        self.outcome = calls.unpack_outcome(data)
        self._close()

    def _send_again(self, invocation: Invocation) -> None:
        self._is_refused = False
        if self._retry is not None:
            invocation.route.pause(self._retry.delay)
        cancels = self._cancels
        if cancels:
            self.refuse(CallCancelledError("cancelled by the caller"))
            return
        try:
            self._open(invocation)
        except KubetorchError as error:
            refused = invocation.refused(error)
            self.refuse(refused if isinstance(refused, KubetorchError) else error)
        if self._cancels > cancels:
            self.cancel()

    def refuse(self, error: KubetorchError) -> None:
        """End the call: no pod has taken it."""
        self._end(calls.Raised(exceptions.describe_refusal(error, started=False)))

    # ------------------------------------------------------------------------------- events

    def _put(self, event: Event) -> None:
        if event.call is self._call:
            self._note(event.kind)
        self._arrived.put(event)
        self._wake()
        if self._unstarted is not None and self._is_to_go_on(event, self._unstarted):
            self._is_refused = True
            if self.is_handed_over:
                self.search()

    def _note(self, kind: int) -> None:
        """Release the arguments once they are not needed any more after this frame."""
        unstarted = self._unstarted
        if kind == Kind.ACCEPTED:
            self.is_accepted = True
            if unstarted is not None and unstarted.body.total > LIMITS.kept_argument_bytes:
                self._unstarted = None
        elif kind not in (Kind.ERROR, LOST):  # it has begun to run, and its pod knows it
            self._unstarted = self._disagreement = None
            self.is_accepted = True

    def _is_to_go_on(self, event: Event, unstarted: Invocation) -> bool:
        """True if no pod took the call, so that it is sent again, also if no thread waits."""
        if os.getpid() != self._pid or unstarted.route.is_closed:
            return False
        if event.kind == LOST:
            return not event.call.was_written
        return not calls.raised(event.payload or b"").failure.started

    def _wake(self) -> None:
        for waker in list(self._wakers):
            waker()

    def _handle_event(self, event: Event | None) -> None:
        if event is None or event.call is not self._call or self._stream is None:
            return
        kind = event.kind
        if kind == Kind.LOG and self._lines is not None:
            if self.origin is not None:
                self.origin.log(event.meta, self._lines)
            else:
                self._lines.log(event.meta)
            self._stream.note_taken(event)
        elif kind == Kind.PROGRESS and self._lines is not None and event.call.reports:
            self._lines.progress(self._stream.pod, event.call.reports.popleft())
        elif kind == Kind.RESULT:
            self._end(calls.returned(event.meta, event.payload or b""))
        elif kind == Kind.ERROR:
            self._fail(calls.raised(event.payload or b""))
        elif kind == LOST:
            self._lose(event)

    def _fail(self, raised: calls.Raised) -> None:
        failure = raised.failure
        if self._unstarted is not None:
            self._retry = self._unstarted.retry_after_refusal(failure)
            if self._retry is not None:
                self._stream = self._call = None
                return
        if failure.code == ResultExpiredError.code and self._route is not None:
            # The pod has forgotten the call: the controller has its outcome, or soon will.
            self._disagreement = self._disagreement or Backoff(self._agreement)
            self._stream = self._call = None
        else:
            self._end(raised)

    def _lose(self, event: Event) -> None:
        self._stream = self._call = self._disagreement = None
        self._loss = event.meta
        unstarted, self._unstarted = self._unstarted, None
        if unstarted is None or event.call.was_written or os.getpid() != self._pid:
            return
        self._retry = unstarted.retry_after_loss(event)
        if self._retry is not None:
            self._unstarted = unstarted
        elif isinstance(event.meta, FINAL):
            self.refuse(event.meta)
        else:
            self.refuse(CallRefusedError("the call was not sent: its pod could not be reached"))

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
            self._disagreement = None  # a later search may learn more
            raise CallLostError(
                f"call {self.call_id} should run in pod {view.pod}, which does not know it",
                hint=f"kt logs {view.workload} shows its output",
            )
        self._close()
        route = Route(
            view.workload, lambda: self._locate(view), transport=self._session().transport
        )
        self._route = route
        self._lines = CallLines(route.screen, self._logging, self._options.on_progress)
        self._stream = stream = route.connect()
        self._call = call = stream.prepare(self._put)
        shows_logs = route.shows_logs if self._shows_logs is None else self._shows_logs
        stream.start(call, frames.Attach(self.call_id, stream_logs=shows_logs))

    def _locate(self, view: CallView) -> Location:
        session = self._session()
        workload = session.get_workload(view.namespace, view.workload)
        pods = (pod for pod in workload.pods if pod.name == view.pod and pod.url)
        urls = tuple(session.address(workload, pod) for pod in pods)
        return Location(urls, session.call_token(workload))


#: Characters of a wrong id that an error shows.
_SHOWN = 80


class CallHandle:
    """A spawned call: wait for it, cancel it, find it again.

    A handle can be pickled, and made anew from its `id` in any process of the same user. The result
    is kept for a while after the call has ended (see `docs/design/calls.md`). Lines that the call
    prints are shown while a thread or coroutine waits for it.

    Args:
        call_id: Identity of the call.
        name: What it calls, such as `Counter.add`.
        modules: Modules that have another name here, see `kubetorch.wire.codecs.decode`.
        session: The way to its controller; that of this process by default.

    Raises:
        SpecError: This cannot be the identity of a call.
    """

    def __init__(
        self,
        call_id: str,
        name: str = "",
        modules: Mapping[str, str] | None = None,
        session: Session | None = None,
    ) -> None:
        _check_id(call_id)
        self._name = name
        self._modules = modules
        self._session: Callable[[], Session] = (
            backend.session if session is None else lambda: session
        )
        self._call = SpawnedCall(call_id, self._session)

    @classmethod
    def from_id(cls, call_id: str) -> CallHandle:
        """The handle of a call that was spawned here or elsewhere.

        Raises:
            SpecError: This cannot be the identity of a call.
        """
        identity: object = call_id
        if isinstance(identity, str) and SEPARATOR in identity:
            return BroadcastHandle(call_id)
        return cls(call_id)

    @classmethod
    def list(cls, namespace: str | None = None, service: str | None = None) -> list[CallHandle]:
        """The spawned calls that the controller knows, of one namespace, of one service.

        Args:
            namespace: Only those of this namespace.
            service: Only those of this service.
        """
        views = backend.session().ask(lambda controller: controller.list_calls(namespace, service))
        return [cls(view.id, view.callable) for view in views]

    @property
    def id(self) -> str:
        """Identity of the call."""
        return self._call.call_id

    if not TYPE_CHECKING:  # as `RemoteCallable` has it

        def __getattr__(self, name: str) -> NoReturn:
            call_id = "" if name.startswith("_") else self.id
            raise hints.no_attribute("spawned call", self, name, call_id)

    def __repr__(self) -> str:
        return f"CallHandle({self.id!r}{f', {self._name!r}' if self._name else ''})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallHandle) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __reduce__(self) -> tuple[Any, ...]:
        return CallHandle, (self.id, self._name)

    # ------------------------------------------------------------------------------ its result

    def get(
        self, timeout: float | None = None, *, serialization: Literal["pickle"] | None = None
    ) -> Any:  # noqa: ANN401  # the user's own value
        """Wait for the call, and return its value.

        Args:
            timeout: Seconds after which to stop waiting; the call goes on.
            serialization: `"pickle"` fetches a value that could not travel, which its pod has
                pickled and keeps for 1 h, and unpickles it here: that runs code of the pod.

        Raises:
            TimeoutError: The call has not ended by then.
            ResultExpiredError: The call is unknown, or its result is not kept any more.
            Exception: What the call raised.
        """
        _check_serialization(serialization)
        if not self.wait(timeout):
            raise self._still_running(timeout)
        return self._value() if serialization is None else self._unpickled()

    def pickled(self, timeout: float | None = None) -> bytes | memoryview:
        """Wait for the call, and return its value as `pickle` has it, which is not unpickled.

        Args:
            timeout: Seconds after which to stop waiting; the call goes on.

        Raises:
            TimeoutError: The call has not ended by then.
            SerializationError: The call was asked for a value in another serialization.
            ResultExpiredError: The call is unknown, or its value is not kept any more.
            Exception: What the call raised.
        """
        if not self.wait(timeout):
            raise self._still_running(timeout)
        outcome = self._with_kept_value()
        if isinstance(outcome, calls.Raised):
            return bytes(calls.value_of(outcome, modules=self._modules))  # raises
        if outcome.codec != "pickle":
            raise SerializationError(
                f"the value of call {self.id} has come as {outcome.codec}, and is not pickled",
                hint=f"kt calls result {self.id} prints it",
            )
        segments = codecs.split(memoryview(outcome.payload), outcome.sizes)
        return segments[0] if len(segments) == 1 else codecs.in_band(segments)

    def replay(
        self,
        *,
        code: Literal["recorded", "here"] = "recorded",
        in_pod: bool = False,
        trust: bool = False,
        changes: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  # the user's own value
        """Run the call again with its arguments, and return what it returns then.

        It runs on this machine, in a process of the local backend, unless `in_pod`. Calls that fail
        can be replayed for 7 days; `kt.fn(..., record="all")` has all calls leave a record.

        Args:
            code: `"recorded"` runs the code of the generation that ran the call, `"here"` the
                project of the working directory.
            in_pod: Whether it runs in a pod of the service, with the code that it has now.
            trust: Whether code and arguments of another user may run on this machine.
            changes: Arguments that are to be others, by name.

        Raises:
            ResultExpiredError: The call has left no record, or it is no longer kept.
            SerializationError: The arguments were not kept.
            UnauthorizedError: The service is another user's, and neither `in_pod` nor `trust` is
                set, or there is no terminal.
            Exception: What the call raises.
        """
        from kubetorch.sdk import replay  # noqa: PLC0415  # few programs, and it deploys

        return replay.replay(
            self.id, self._session(), changes=changes or {}, code=code, in_pod=in_pod, trust=trust
        )

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of the call; whether it has ended.

        Args:
            timeout: Seconds after which to stop waiting; the call goes on.

        Raises:
            ResultExpiredError: The call is unknown, or its result is not kept any more.
        """
        name = f"a wait for a call of {self._name}" if self._name else "a wait for a spawned call"
        blocking.warn_in_loop(name, "await handle")
        wakeup = ThreadWakeup((self._name or f"call {self.id}", ""))
        with self._call.waking(wakeup.set):
            for seconds_left in self._waits(timeout):
                wakeup.wait(seconds_left)
        return self._call.outcome is not None

    async def get_async(
        self, timeout: float | None = None, *, serialization: Literal["pickle"] | None = None
    ) -> Any:  # noqa: ANN401  # as `get`
        """Awaitable form of `get`."""
        _check_serialization(serialization)
        if not await self.wait_async(timeout):
            raise self._still_running(timeout)
        if serialization is None:
            return self._value()
        import asyncio  # noqa: PLC0415  # an awaiting program has loaded it

        return await asyncio.to_thread(self._unpickled)

    async def wait_async(self, timeout: float | None = None) -> bool:
        """Awaitable form of `wait`."""
        wakeup = LoopWakeup()
        with self._call.waking(wakeup.set):
            for seconds_left in self._waits(timeout):
                await wakeup.wait(seconds_left)
        return self._call.outcome is not None

    def _waits(self, timeout: float | None) -> Iterator[float | None]:
        """Timeouts for waiting for the call, until the call or the time is over."""
        begun = time.monotonic()
        search: Search | None = None
        while True:
            self._call.work()
            if self._call.outcome is not None:
                return
            if search is not None and search.error is not None:
                raise search.error
            if self._call.is_lost:
                search = self._call.search()
            seconds_left = _seconds_left(timeout, time.monotonic() - begun, search)
            if seconds_left is not None and seconds_left <= 0:
                return
            yield seconds_left

    def result(
        self, timeout: float | None = None, *, serialization: Literal["pickle"] | None = None
    ) -> Any:  # noqa: ANN401  # as `get`
        """The same as `get`, under the name that futures give it."""
        return self.get(timeout, serialization=serialization)

    def __await__(self) -> Generator[Any, None, Any]:
        return self.get_async().__await__()

    def _still_running(self, timeout: float | None) -> TimeoutError:
        return TimeoutError(f"call {self.id} has not ended within {timeout:g} s; it goes on")

    def _value(self) -> Any:  # noqa: ANN401  # the user's own value
        outcome = self._call.outcome
        assert outcome is not None
        self._call.has_reader = True
        if (
            self._modules is None
            and isinstance(outcome, calls.Returned)
            and not codecs.is_plain(outcome.codec, outcome.payload)
        ):
            self._find_workload()
        try:
            requested_codec = self._call.requested_codec or "pickle"
            return calls.value_of(outcome, modules=self._modules, requested_codec=requested_codec)
        except InstanceReplacedError as error:
            if self._call.origin is not None:
                self._call.origin.answered(error.instance)
            raise

    def _unpickled(self) -> Any:  # noqa: ANN401  # the user's own value
        outcome = self._with_kept_value()
        if self._modules is None:
            self._find_workload()
        return calls.value_of(outcome, modules=self._modules, requested_codec="pickle")

    def _with_kept_value(self) -> calls.Outcome:
        """The outcome, with the value that could not travel in place of the error that says so."""
        outcome = self._call.outcome
        assert outcome is not None
        self._call.has_reader = True
        if isinstance(outcome, calls.Raised) and outcome.failure.state.get("call_id") == self.id:
            return self._call.kept_value()
        return outcome

    def _find_workload(self) -> None:
        """Learn the modules and codecs for values of the call from its workload, if it exists."""
        self._modules = {}
        try:
            view = self._call.view()
            workload = self._session().ask(
                lambda controller: controller.get_workload(view.namespace, view.workload)
            )
        except (ServiceNotFoundError, ResultExpiredError):
            allowed: tuple[str, ...] = ()  # without its workload no pickle is allowed
        else:
            self._modules = local_modules(workload.spec.callable)
            allowed = workload.spec.compute.allowed_serialization
        if self._call.requested_codec is None and "pickle" not in allowed:
            self._call.requested_codec = "json"

    # --------------------------------------------------------------------------------- its life

    def cancel(self) -> None:
        """Have the call end, if it still runs; `get` then raises `CallCancelledError`."""
        self._call.cancel()

    def status(self) -> str:
        """`waiting` (for its turn), `running`, `succeeded`, `failed` or `cancelled`.

        Raises:
            ResultExpiredError: The call is unknown, or forgotten.
        """
        call = self._call
        call.work()
        outcome = call.outcome
        if isinstance(outcome, calls.Returned):
            return "succeeded"
        if isinstance(outcome, calls.Raised):
            is_cancelled = outcome.failure.code == CallCancelledError.code
            return "cancelled" if is_cancelled else "failed"
        if call.is_lost and not call.is_to_be_sent:
            return call.view().state
        with contextlib.suppress(KubetorchError):  # it is under way, also if that cannot be asked
            if call.is_accepted:
                return call.view().state
        return "running"

    def done(self) -> bool:
        """True if the call has ended."""
        call = self._call
        call.work()
        if call.outcome is None and call.is_lost and not call.is_to_be_sent:
            return call.view().state not in UNENDED
        return call.outcome is not None


def _check_id(call_id: object) -> None:
    if not isinstance(call_id, str) or not calls.CALL_ID.fullmatch(call_id):
        text = repr(call_id)
        raise SpecError(
            f"{text if len(text) <= _SHOWN else f'{text[:_SHOWN]}…'} is not the id of a call",
            hint="an id is 32 hexadecimal digits, as handle.id and kt calls list show it",
        )


def _check_serialization(serialization: object) -> None:
    if serialization not in (None, "pickle"):
        raise SpecError(
            f"serialization={serialization!r}: a value that is fetched anew is pickled",
            hint='serialization="pickle"; without it the value is as the call was asked for it',
        )


def _seconds_left(timeout: float | None, waited: float, search: Search | None) -> float | None:
    """Seconds to go on waiting; `None` for ever, and not positive when the time is over."""
    if timeout is None:
        return None
    is_asked = search is not None and not search.is_over
    return (max(timeout, TIMING.call_search_seconds) if is_asked else timeout) - waited


def spawn(invocation: Invocation) -> CallHandle:
    """Open a detached call; returns when its pod has it on disk, or with `async_` at once."""
    if invocation.broadcast is not None:
        return spawn_broadcast(invocation)
    return spawn_one(invocation)


def spawn_one(invocation: Invocation) -> CallHandle:
    """As `spawn`, of a call on one pod."""
    target = invocation.target
    session = invocation.route.session
    handle = CallHandle(invocation.id, target.name, target.modules, session)
    if invocation.options.async_:
        HandOvers.of_program().add(handle._call, invocation)
    else:
        if slots := invocation.route.slots:
            terminal.say_once(
                f"a pod of {target.service} takes {slots} {'call' if slots == 1 else 'calls'} at a "
                "time, so spawn() waits until one has room: Knative passes on no call before; "
                "spawn(..., async_=True) returns at once"
            )
        handle._call.hand_over(invocation)
    return handle


class HandOvers:
    """Calls that were spawned without waiting: the program does not end before pods took them.

    One thread hands them over, one after the other. At its end the program reports calls that no
    pod took, unless their handles were asked; `flush` raises for them.
    """

    _of_program: HandOvers | None = None

    @classmethod
    def of_program(cls) -> HandOvers:
        hand_overs = cls._of_program
        if hand_overs is None or hand_overs._pid != os.getpid():
            cls._of_program = hand_overs = cls()
        return hand_overs

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        #: Notified when no call waits any more.
        self._emptied = threading.Condition(self._lock)
        self._waiting: deque[tuple[SpawnedCall, Invocation]] = deque()
        self._is_running = False
        self._failed: list[tuple[SpawnedCall, Invocation]] = []
        atexit.register(self._end)

    def add(self, call: SpawnedCall, invocation: Invocation) -> None:
        call.is_handed_over = False
        with self._lock:
            self._waiting.append((call, invocation))
            if self._is_running:
                return
            self._is_running = True
        try:
            # No daemon: the end of the program waits for it.
            threading.Thread(target=self._run, name="kubetorch-spawn", daemon=False).start()
        except RuntimeError:  # too many of them
            self._run()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_running = False
                    self._emptied.notify_all()
                    return
                call, invocation = self._waiting[0]
            try:
                call.hand_over(invocation)
            except CallCancelledError as error:
                call.refuse(error)
            except Exception as error:  # noqa: BLE001  # it is raised where the handle is asked
                lost = CallLostError(f"it could not be sent: {introspection.shown(error)}")
                call.refuse(error if isinstance(error, KubetorchError) else lost)
                self._failed.append((call, invocation))
            with self._lock:
                self._waiting.popleft()

    def flush(self, timeout: float | None) -> None:
        """See `kubetorch.calls.flush`."""
        with self._emptied:
            if not self._emptied.wait_for(lambda: not self._waiting, timeout):
                raise CallTimeoutError(
                    f"{len(self._waiting)} spawned calls were not handed over within {timeout:g} s",
                    hint="kt status shows whether their service has pods; flush() waits on",
                )
            failures, self._failed = self._unread_failures(), []
        if failures:
            raise CallLostError(
                "; ".join(_loss(call, invocation) for call, invocation in failures),
                hint="spawn these calls again",
            )

    def _unread_failures(self) -> list[tuple[SpawnedCall, Invocation]]:
        return [failure for failure in self._failed if not failure[0].has_reader]

    def _end(self) -> None:
        """Report at the end of the program which calls were not handed over."""
        if self._pid != os.getpid():
            return
        for call, invocation in (*self._unread_failures(), *self._waiting):
            sys.stderr.write(f"kubetorch: {_loss(call, invocation)}\n")


def _loss(call: SpawnedCall, invocation: Invocation) -> str:
    """Which spawned call no pod has taken, and why."""
    reason = "the program ended first"
    if isinstance(call.outcome, calls.Raised):
        reason = f"{call.outcome.failure.error_type}: {call.outcome.failure.message}"
    return f"{invocation.target.name} (call {call.call_id}) was not spawned: {reason}"


#: Between the identities of the calls in the identity of the handle.
SEPARATOR = ","


class BroadcastHandle(CallHandle):
    """The spawned calls of one broadcast, in pod order.

    Its result is the list of theirs. An error on one pod does not end the calls on the others; it
    is raised when all have ended, as by a call that is waited for.

    Args:
        call_id: The identities of the calls.
        name: What they call.
        modules: See `CallHandle`.
    """

    def __init__(
        self, call_id: str, name: str = "", modules: Mapping[str, str] | None = None
    ) -> None:
        self._name = name
        #: The handle of each pod's call.
        self.calls = [
            CallHandle(single_id, name, modules) for single_id in call_id.split(SEPARATOR)
        ]

    @property
    def id(self) -> str:
        """Identities of the calls, joined."""
        return SEPARATOR.join(call.id for call in self.calls)

    def __reduce__(self) -> tuple[Any, ...]:
        return BroadcastHandle, (self.id, self._name)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of all calls; whether they have ended.

        Args:
            timeout: Seconds after which to stop waiting; the calls go on.

        Raises:
            ResultExpiredError: A call is unknown, or its result is not kept any more.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        return all(call.wait(_seconds_until(deadline)) for call in self.calls)

    async def wait_async(self, timeout: float | None = None) -> bool:
        """Awaitable form of `wait`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for call in self.calls:
            if not await call.wait_async(_seconds_until(deadline)):
                return False
        return True

    def _value(self) -> Any:  # noqa: ANN401  # as `get`
        return self._values(None)

    def _unpickled(self) -> Any:  # noqa: ANN401  # as `get`
        return self._values("pickle")

    def _with_kept_value(self) -> calls.Outcome:
        raise SpecError(
            f"these are {len(self.calls)} calls, each with a value of its own",
            hint=f"ask for one of them: kt calls result {self.calls[0].id}",
        )

    def _values(self, serialization: Literal["pickle"] | None) -> Any:  # noqa: ANN401  # as `get`
        outcomes = []
        for call in self.calls:
            try:
                outcomes.append(Done(call.get(serialization=serialization)))
            except Exception as error:  # noqa: BLE001  # the user's own, which is kept
                outcomes.append(Done(None, error))
        done = combine(outcomes)
        if done.error is not None:
            raise done.error
        return done.value

    def cancel(self) -> None:
        """Have the calls end that still run; `get` then raises `CallCancelledError`."""
        for call in self.calls:
            call.cancel()

    def status(self) -> str:
        """`running` while one of them runs; else `waiting`, `failed`, `cancelled` or `succeeded`.

        Raises:
            ResultExpiredError: A call is unknown, or forgotten.
        """
        call_states = {call.status() for call in self.calls}
        states = ("running", "waiting", "failed", "cancelled", "succeeded")
        return next(state for state in states if state in call_states)

    def done(self) -> bool:
        """True if all calls have ended."""
        return all(call.done() for call in self.calls)


def _seconds_until(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)


def spawn_broadcast(invocation: Invocation) -> CallHandle:
    """As `spawn`, on every pod; if one does not take it, no call goes on."""
    started: list[CallHandle] = []
    pod_left: PodLeftError | None = None
    try:
        for part in invocation.spread():
            try:
                started.append(spawn_one(part))
            except PodLeftError as error:
                pod_left = error
        if pod_left is not None and not started:
            raise pod_left
    except KubetorchError:
        for call in started:
            call.cancel()
        raise
    if invocation.shape(started) is not started:
        return started[0]
    target = invocation.target
    identity = SEPARATOR.join(call.id for call in started)
    handle = BroadcastHandle(identity, target.name, target.modules)
    # These handles have the streams that the calls were opened on.
    handle.calls = started
    return handle
