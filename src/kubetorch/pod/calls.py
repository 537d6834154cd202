"""The calls of a pod: which may start, on which worker they run, how they end.

                ┌── refused
open ── begin ──┤
                └── waiting for a worker ── waiting for a slot ── running ── ended

A *caller* (a stream's end of a call, an HTTP request) opens a call and begins it once all arguments
are there. It ends exactly once: with a result, a failure, or a refusal, which says that nothing of
it ran. Nothing of a call awaits: everything happens in the turn of the event loop in which a frame
came, because a task per call costs more than the relay. Which call gets a slot of which process is
decided by `kubetorch.pod.slots`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace as replace_fields
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from kubetorch.errors import (
    BY_CODE,
    CallableNotFoundError,
    CallCancelledError,
    CallRefusedError,
    CallTimeoutError,
    DataStoreError,
    InstanceReplacedError,
    KubetorchError,
    OutOfMemoryError,
    PodTerminatedError,
    ProtocolError,
    QueueFullError,
    ResultExpiredError,
    SerializationError,
    SpecError,
    WorkerDiedError,
)
from kubetorch.pod.batches import Batch, Member
from kubetorch.pod.load import ItemUse
from kubetorch.pod.logs import Line
from kubetorch.pod.memory_references import References, ReferenceUse
from kubetorch.pod.payloads import Payload, shared
from kubetorch.pod.rank_calls import RankGroup
from kubetorch.pod.results import Buffer, Outcomes, Results
from kubetorch.pod.slots import BATCHES, Slots, Start, Ticket
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.pod.user_process.tuning import LIMITS as WORKER_LIMITS
from kubetorch.pod.worker_process.pool import WorkerPool
from kubetorch.pod.worker_process.worker import CallEvents, Worker
from kubetorch.specs.batching import BatchSpec
from kubetorch.specs.callable import CALLABLES, UNKNOWN_CHAIN
from kubetorch.specs.compute import MOST_WAITING
from kubetorch.specs.workload import Origin, WorkloadSpec
from kubetorch.wire import codecs, exceptions, retries
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.calls import (
    CALL_ID,
    Outcome,
    Raised,
    Record,
    Returned,
    check_arguments,
    pack_record,
)
from kubetorch.wire.frames import KUBETORCH, OVER, STOPPED, Chain, DebugEvent, Open, Progress, Retry
from kubetorch.wire.messages import (
    CallProgress,
    CallReport,
    Ending,
    QueueView,
    SlotHolder,
    calls_that_wait,
)

#: Failures of the agent itself that are the answer of a call, which has run.
_RECORDED = (CallTimeoutError.code, WorkerDiedError.code, OutOfMemoryError.code)
_ANSWERS = (CallTimeoutError.code, CallCancelledError.code, CallRefusedError.code)


#: The workers that serve calls in a pod.
Served = Worker | WorkerPool | RankGroup


class Caller(CallEvents, Protocol):
    """The client that opened a call, or joined one. Nothing follows a result or a failure.

    Attributes:
        identity: The client, which accepts turns with other clients.
        takes_files: It passes large values on in memory files.
    """

    identity: str

    @property
    def takes_files(self) -> bool: ...

    def on_replaced(self, notice: str, instance: str) -> None:
        """The instance that the call runs on was made anew, for the reason that the notice says."""

    def on_result(self, result: Returned, payload: Payload | None) -> None:
        """The call returned. `payload` is to be released once `result.payload` was passed on."""

    def on_failure(self, failure: bytes) -> None:
        """The call failed, or was refused: a failure as JSON."""


class Call:
    def __init__(self, calls: Calls, request: Open, caller: Caller, tag: str) -> None:
        self._calls = calls
        #: The call's identity among the agents.
        self.tag = tag
        self._timer: asyncio.TimerHandle | None = None
        self._worker_timer: asyncio.TimerHandle | None = None
        # Until the next report of progress to the controller, and the progress for it.
        self._progress_timer: asyncio.TimerHandle | None = None
        self._progress: Progress | None = None
        self._payload: Payload | None = None
        # What keeps the values of references among the arguments.
        self._use: ReferenceUse | None = None
        # How often the call may run again, and the pause until its next attempt.
        retry = request.retry
        self._repeats_left = retry.count if retry is not None and request.detached else 0
        self._pause_timer: asyncio.TimerHandle | None = None
        self.attempts = 1
        self._has_yielded = False
        # The descriptor of a value that cannot travel, until the error of the call comes.
        self._value_file: int | None = None
        # True once its value is kept: the call has not failed, and leaves no record.
        self._has_value_in_file = False
        # Values that the call's generator may still send.
        self._granted = WORKER_LIMITS.first_granted_values
        self.request = request
        #: Spawned calls with the same idempotency key, which have the same end.
        self.twins: list[Open] = []
        #: True once the call is on disk, so that its end is known whatever happens.
        self.is_recorded = False
        #: The clients that are notified of the call.
        self.callers = [caller]
        #: Seconds since the epoch.
        self.opened = time.time()
        #: When the call began to run, and when it began to wait for a worker or a slot.
        self.begun: float | None = None
        self.queued: float | None = None
        #: True if its process runs it in line with others, and true if a process gave it back.
        self.is_in_line = self.is_returned = False
        #: The `Slots` of the slot that the call has or waits for, and the process of the slot.
        self.slots: Slots | None = None
        self.process: int | None = None
        #: When a call that may run in a batch was there with its arguments, by the loop's clock.
        self.came: float | None = None
        #: The batch that the call is in, which has the slot.
        self.batch: Batch[Call] | None = None
        #: The workload that was served, or about to be, when the call was opened.
        self.spec: WorkloadSpec | None = None
        #: The worker that runs the call, and the call's number there.
        self.worker: Worker | RankGroup | None = None
        self.number: int
        #: Why the call was cancelled; `None` if it was not.
        self.cancelled: str | None = None
        # The sessions of debuggers that it waits for, and what is left of its time meanwhile.
        self._debuggers: set[str] = set()
        self._seconds_left: float | None = None
        #: True while the arguments are there for a record of the call.
        self.has_arguments = False
        #: True once the callers have the end of the call.
        self.is_answered = False
        #: True once no part of the call runs any more.
        self.is_ended = False

    @property
    def refusal(self) -> CallRefusedError | None:
        """Why no second caller can join the call: some of its values are gone."""
        if not self._has_yielded:
            return None
        return CallRefusedError(
            f"call {self.request.id} streams its values, which are not kept: nobody can join it",
            hint="give each call of a generator an idempotency key of its own",
        )

    @property
    def state(self) -> str:
        """The state that is reported to the controller, until the call has ended."""
        return "waiting" if self.queued is not None and self.begun is None else "running"

    @property
    def other_origin(self) -> Origin | None:
        return self._calls.other_origin(self.request)

    @property
    def spawned(self) -> list[Open]:
        """The requests of spawned calls, which find the end of this call by their ids."""
        return [*([self.request] if self.request.detached else []), *self.twins]

    # ------------------------------------------------------------------------- from its callers

    def begin(self, payload: Payload) -> None:
        """Run the call, whose arguments are complete, as soon as a worker serves."""
        if self.is_ended:
            payload.release()
            return
        self._payload = payload
        if not self.request.references:
            self._calls.dispatch(self)
            return
        try:
            self._use = self._calls.references.use(self.request.references)
        except KubetorchError as error:
            self.fail(error, started=False)
        else:
            self._use.when_present(self._on_references)

    def _on_references(self, error: KubetorchError | None) -> None:
        """The values of references that it names are there, or do not come."""
        if self.is_ended:
            return
        if error is not None:
            self.fail(error, started=False)
        else:
            self._calls.dispatch(self)

    def cancel(self, caller: Caller, reason: str) -> None:
        """Cancel the call for a caller.

        The call goes on if other callers wait for it too, unless it is spawned: then any holder of
        its handle may cancel it.
        """
        if len(self.callers) > 1 and not self.spawned:
            self.callers.remove(caller)
            error = CallCancelledError(reason)
            caller.on_failure(self._calls.describe(error, started=True).to_json())
            return
        self.revoke(reason)

    def take_back(self) -> None:
        """Give the call back to its only caller, unless it has begun."""
        if self.is_ahead and isinstance(self.worker, Worker):
            self.worker.take_back(self.number)
            return
        is_shared = len(self.callers) > 1 or bool(self.spawned)
        if self.worker is not None or self.is_ended or is_shared:
            return
        refusal = CallRefusedError("the caller has taken the call back")
        self._answer(Raised(self._calls.describe(refusal, started=False)))
        self._calls.total -= 1
        self._end(is_failure=False)

    def leave(self, caller: Caller) -> None:
        """Remove a caller that is gone. Without callers the call is cancelled, unless spawned."""
        if caller in self.callers:
            self.callers.remove(caller)
        if not self.callers and not self.spawned and not self.is_ended:
            self.revoke("the caller is gone")

    def join(self, caller: Caller) -> None:
        """Add a caller, which gets the end of the call too."""
        if self.refusal is not None:
            raise self.refusal
        self.callers.append(caller)
        if self.queued is not None and self.begun is None:
            caller.on_queued()

    def grant(self, count: int) -> None:
        if self.worker is not None and not self.is_ended:
            self._granted += count
            self.worker.grant(self.number, count)

    @property
    def is_paused(self) -> bool:
        """True for a generator whose reader reads no values."""
        return self._granted <= 0

    @property
    def waits_for(self) -> str:
        """The call that this call waits for, as its process reported last; empty without any."""
        if self._debuggers:
            return "a debugger"
        return self.worker.waits.get(self.number, "") if isinstance(self.worker, Worker) else ""

    def revoke(self, reason: str) -> None:
        """End the call for all its callers."""
        if self.is_ended or self.cancelled is not None:
            return
        self.cancelled = reason
        if self.worker is None:
            self.fail(CallCancelledError(reason), started=False)
        else:
            self._interrupt(CallCancelledError(reason))

    def _interrupt(self, error: CallCancelledError | CallTimeoutError) -> None:
        """Interrupt the run; one that others wait for, too, goes on without this call."""
        assert self.worker is not None
        if self.batch is not None and self.batch.can_spare(self):
            self.on_error(self._calls.describe(error, started=True).to_json())
            return
        timed_out = isinstance(error, CallTimeoutError)
        self.worker.cancel(self.number, error.message, timed_out=timed_out)
        self._calls.on_interrupted(self)

    # ------------------------------------------------------------------------ from the dispatcher

    def run_on(
        self,
        worker: Worker | RankGroup,
        chain: str,
        *,
        in_line: bool = False,
        member: Member[Call] | None = None,
    ) -> None:
        """Run the call on a worker; the calls that it makes are sent with this chain."""
        self._stop_waiting()
        payload = self._payload
        assert payload is not None
        is_small_item = in_line and self.request.body.total <= LIMITS.item_ahead_bytes
        if self._repeats_left or is_small_item or self._calls.keep_arguments(self):
            payload = shared(payload)
        else:
            self._payload = None
        if self.queued is not None or self.request.collective or self.request.is_item:
            self.on_begun()
        request = self.request
        options: dict[str, bool] = {}
        if isinstance(worker, RankGroup):
            request = worker.request_for_node(request, self.process)
        elif len(self.callers) == 1 and self.callers[0].takes_files:
            options = {"takes_files": True}
        try:
            if member is not None and not isinstance(worker, RankGroup):
                self.number = worker.call(member, request, payload, chain, in_batch=True, **options)
            elif in_line and isinstance(worker, Worker):
                self.number = worker.call(self, request, payload, chain, in_line=True, **options)
            else:
                self.number = worker.call(self, request, payload, chain, **options)
        except KubetorchError as error:
            self.fail(error, started=False)
            return
        self.begun = time.time()
        self.worker = worker

    def wait_for_slot(self) -> None:
        self._stop_waiting()
        self._begin_to_wait()

    def _begin_to_wait(self) -> None:
        """Note that the call waits for a worker or a slot: `queue_timeout` bounds both together."""
        if self.queued is not None:  # already, for a process that is gone since
            return
        self.on_queued()
        timeout = self.request.queue_timeout
        if timeout is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(timeout, self._end_waiting, timeout)

    def on_queued(self) -> None:  # CallSink's
        """The call waits; its timeout counts from the begin of its run."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.queued, self.begun = time.time(), None
        for caller in self.callers:
            caller.on_queued()
        if self.is_recorded:
            self._calls.report_state(self)

    def on_begun(self) -> None:  # CallSink's
        self.begun = time.time()
        if self._timer is not None:  # of its time in the queue
            self._timer.cancel()
            self._timer = None
        if self.request.timeout is not None:
            self.limit(self.request.timeout)
        for caller in self.callers:
            caller.on_begun()
        if self.is_recorded and self.queued is not None:
            self._calls.report_state(self)

    def _end_waiting(self, timeout: float) -> None:
        reason = "no process took it"
        if self.slots is not None:
            waiting = self.slots.waiting
            reason = f"{calls_that_wait(waiting)} for {'its' if waiting == 1 else 'their'} turn"
        elif self.batch is not None:
            reason = "its batch waited for further calls"
        service = self._calls.spec.name if self._calls.spec is not None else ""
        error = CallTimeoutError(
            f"the call did not begin within its queue_timeout of {timeout:g} s: {reason}",
            hint=f"kt status {service} shows what runs",
        )
        self.fail(error, started=False)

    def _stop_waiting(self) -> None:
        if self._worker_timer is not None:
            self._worker_timer.cancel()
            self._worker_timer = None

    def wait_until(self, seconds: float, on_timeout: Callable[[Call], None]) -> bool:
        """Call back if no worker has the call by then; false if it waits already."""
        if self._worker_timer is not None:
            return False
        self._begin_to_wait()
        loop = asyncio.get_running_loop()
        self._worker_timer = loop.call_later(seconds, on_timeout, self)
        return True

    def limit(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, self._time_out)

    def fail(self, error: KubetorchError, *, started: bool) -> None:
        has_run = started or self.attempts > 1
        self.fail_with(self._calls.describe(error, started=has_run))

    def fail_with(self, failure: exceptions.Failure) -> None:
        """End the call with a failure before it began."""
        self._answer(Raised(failure))
        self._end(is_failure=True)

    def _time_out(self) -> None:
        whole = self.request.whole_timeout  # of all attempts; `timeout` is the rest of it
        timeout = round(whole or self.request.timeout or 0.0, 2)
        reason = f"the call did not end within its timeout of {timeout:g} s"
        if self.worker is None:
            missing = "its arguments had not arrived"
            self.fail(CallTimeoutError(f"{reason}: {missing}"), started=False)
            return
        failure = self._calls.describe(CallTimeoutError(reason), started=True)
        if not self._repeats_after(failure):
            # The callers are notified at once, however long the worker takes to stop.
            self._answer(Raised(failure))
        self._interrupt(CallTimeoutError(reason))

    # ---------------------------------------------------------------------------- from its worker

    def on_log(self, line: Line) -> None:  # CallSink's
        if line.debug is not None:
            self._on_debugger(line.debug)
        for caller in self.callers:
            caller.on_log(line)

    def _on_debugger(self, event: DebugEvent) -> None:
        """Let the time of the call stand while a debugger has it."""
        if event.kind == STOPPED:
            self._debuggers.add(event.session)
            if self._timer is not None:
                now = asyncio.get_running_loop().time()
                self._seconds_left = max(self._timer.when() - now, 0.0)
                self._timer.cancel()
                self._timer = None
        elif event.kind == OVER:
            self._debuggers.discard(event.session)
            seconds, self._seconds_left = self._seconds_left, None
            if self._debuggers:
                self._seconds_left = seconds
            elif seconds is not None and not self.is_ended:
                self.limit(seconds)
        self._calls.on_change()

    def on_progress(self, report: Progress) -> None:  # CallSink's
        for caller in self.callers:
            caller.on_progress(report)
        if self.spawned:
            self._progress = report
            if self._progress_timer is None:
                self._report_progress()

    def _report_progress(self) -> None:
        self._progress_timer = None
        report, self._progress = self._progress, None
        if report is not None and not self.is_ended:
            self._calls.report_progress(self, report)
            loop = asyncio.get_running_loop()
            self._progress_timer = loop.call_later(
                TIMING.spawned_progress_interval_seconds, self._report_progress
            )

    def on_yield(self, codec: str, sizes: Sequence[int], payload: Payload) -> None:  # CallSink's
        self._has_yielded = True
        self._granted -= 1
        if self.is_answered or self.cancelled is not None:
            payload.release()
        elif len(self.callers) == 1 and not self.spawned:
            self.callers[0].on_yield(codec, sizes, payload)
        else:
            payload.release()
            error = CallRefusedError(
                f"{_name(self.request)} is a generator; its values cannot be kept for later",
                hint="call it without .spawn(), or let it return a list",
            )
            self._answer(Raised(self._calls.describe(error, started=True)))
            self.revoke(error.message)

    def on_result(  # CallSink's
        self, codec: str, sizes: Sequence[int], payload: Payload, *, streamed: bool
    ) -> None:
        if self.is_answered:
            payload.release()
            self._end(is_failure=True)
            return
        generation = self.worker.generation if self.worker is not None else 0
        instance = self._calls.instance
        result = Returned(codec, tuple(sizes), payload.view, streamed, generation, instance)
        self._end(is_failure=False, is_answered_next=True)
        try:
            self._answer(result, payload)
        finally:
            self._release_arguments()

    def on_kept(self, descriptor: int) -> None:  # CallSink's
        self._value_file = descriptor

    def on_error(self, failure: bytes) -> None:  # CallSink's
        value_file, self._value_file = self._value_file, None
        repeats = self._repeats_left and self._repeats_after(exceptions.parse_json(failure))
        if value_file is not None:
            if repeats or self.is_answered:
                os.close(value_file)
            else:
                failure = self._calls.keep_value(self, value_file, failure)
                self._has_value_in_file = True
        if repeats:
            self._pause()
            return
        self._end(is_failure=True, is_answered_next=True)
        try:
            self._answer_failure(failure)
        finally:
            self._release_arguments()

    def on_failing(self, failure: bytes) -> None:  # CallSink's
        if not (self._repeats_left and self._repeats_after(exceptions.parse_json(failure))):
            self._answer_failure(failure)

    def on_returned(self) -> None:  # CallSink's
        self._calls.on_left_process(self)
        self.worker = self.queued = self.begun = None
        self._calls.leave_slot(self)
        self.is_returned = True
        if self.is_answered:
            self._end(is_failure=True)
        elif self.cancelled is not None:
            self.fail(CallCancelledError(self.cancelled), started=False)
        elif self._calls.is_draining:
            self.fail(self._calls.stopping_error(), started=False)
        else:
            self._calls.dispatch(self)

    @property
    def is_ahead(self) -> bool:
        """True for a call that a process has and has not begun."""
        return isinstance(self.worker, Worker) and self.worker.is_ahead(self.number)

    def on_lost(self, error: KubetorchError) -> None:  # CallSink's
        self._calls.on_lost(self)
        failure = self._calls.describe(error, started=True)
        if self._repeats_after(failure):
            if isinstance(error, WorkerDiedError):
                # As clients mark a call that they make again themselves.
                self.request = replace(self.request, is_again=True)
            self._pause()
            return
        self._end(is_failure=True, is_answered_next=True)
        try:
            self._answer(Raised(failure))
        finally:
            self._release_arguments()

    # ------------------------------------------------------------------------------ once more

    def _repeats_after(self, failure: exceptions.Failure) -> bool:
        """True if the call runs again after this failure of an attempt."""
        if not self._repeats_left or self.cancelled is not None or self._has_yielded:
            return False
        return not self.is_answered and not self._calls.is_draining and self._is_named(failure)

    def _is_named(self, failure: exceptions.Failure) -> bool:
        """True if the call names the error among those after which it runs again."""
        retry = self.request.retry
        if retry is None or failure.repeats:
            return failure.repeats
        cls = BY_CODE.get(failure.code or "")
        return cls is not None and retries.repeats(cls, retry.names, {})

    def _pause(self) -> None:
        """Wait for a while, and run again."""
        retry = self.request.retry
        assert retry is not None
        if self._timer is not None:
            self._timer.cancel()
        self.worker = self.queued = self.begun = None
        self._debuggers.clear()
        self._seconds_left = None
        self._calls.leave_slot(self)
        seconds = retries.pause(self.attempts, retry.backoff, retry.max_backoff)
        self._repeats_left -= 1
        self.attempts += 1
        self._calls.report_state(self)
        self._pause_timer = asyncio.get_running_loop().call_later(seconds, self._run_again)

    def _run_again(self) -> None:
        if self.request.timeout is not None:
            self.limit(self.request.timeout)
        self._calls.dispatch(self)

    # ----------------------------------------------------------------------------------- its end

    def _answer(self, outcome: Outcome, payload: Payload | None = None) -> None:
        if isinstance(outcome, Raised):
            self._answer_failure(outcome.failure.to_json(), outcome)
            return
        self.is_answered = True
        callers, self.callers = self.callers, []
        record = self._record(b"")
        if self.spawned or self.request.idempotency_key is not None or record:
            self._calls.keep(self, outcome, record=record)
        for caller in callers:
            caller.on_result(outcome, payload if len(callers) == 1 else None)
        if payload is not None and not callers:
            payload.release()

    def _answer_failure(self, failure: bytes, outcome: Raised | None = None) -> None:
        if self.is_answered:
            return
        self.is_answered = True
        callers, self.callers = self.callers, []
        request = self.request
        if request.retry is not None and request.detached:
            described = exceptions.parse_json(failure)
            failure = replace_fields(described, repeats=False, attempts=self.attempts).to_json()
        described = exceptions.parse_json(failure)
        is_run = outcome is None or described.code in _RECORDED
        # An error after which the client makes the call again is not its end.
        is_repeated = not request.detached and self._is_named(described)
        record = self._record(failure) if is_run and not is_repeated else ()
        if self.spawned or self.request.idempotency_key is not None or record:
            # A refusal of the agent, and the loss of the worker, are no answers: a second call with
            # the key has to run.
            is_answer = outcome is None or (
                outcome.failure.started and outcome.failure.code in _ANSWERS
            )
            raised = Raised(described)
            self._calls.keep(self, raised, is_answer=is_answer and not is_repeated, record=record)
        for caller in callers:
            caller.on_failure(failure)

    def _record(self, failure: bytes) -> Sequence[Buffer]:
        """The parts of the record of the call, which has ended so; none if it leaves none."""
        request, payload = self.request, self._payload
        if self.cancelled is not None or self._has_value_in_file:
            return ()
        if not self._calls.leaves_record(self, bool(failure)):
            return ()
        omission = ""
        if payload is None or not self.has_arguments:
            omission = (
                f"they had {request.body.total} bytes; at most {LIMITS.recorded_arguments_bytes} "
                f"of a call are kept, and {LIMITS.recordable_arguments_bytes} of all that run"
            )
        return pack_record(
            Record(
                request.callable,
                request.method,
                request.body.codec,
                tuple(request.body.sizes),
                b"" if payload is None or omission else bytes(payload.view),
                failure,
                omission,
            )
        )

    def _release_arguments(self) -> None:
        payload, self._payload = self._payload, None
        if self.has_arguments:
            self.has_arguments = False
            self._calls.recordable_bytes -= self.request.body.total
        if payload is not None:
            payload.release()

    def _end(self, *, is_failure: bool, is_answered_next: bool = False) -> None:
        """End the call; one that is answered next needs its arguments for its record."""
        if self.is_ended:
            return
        self.is_ended = True
        timers = (self._timer, self._worker_timer, self._progress_timer, self._pause_timer)
        for timer in timers:
            if timer is not None:
                timer.cancel()
        if not is_answered_next:
            self._release_arguments()
        if self._use is not None:
            self._use.end()
        self._calls.on_end(self, is_failure=is_failure)


def join(earlier: Call | Outcome, caller: Caller) -> Call | None:
    """Let a caller have the end of an earlier call; returns the call if it still runs."""
    if isinstance(earlier, Call):
        earlier.join(caller)
        return earlier
    if isinstance(earlier, Raised):
        caller.on_failure(earlier.failure.to_json())
    else:
        caller.on_result(earlier, None)
    return None


class Calls(msgspec.Struct, eq=False, kw_only=True, dict=True):
    """All calls of a pod, and the worker that serves them."""

    pod_name: str
    results: Results
    on_line: Callable[[Line, int], None]
    outcomes: Outcomes
    #: Values that could not travel, by the ids of their calls.
    values: Outcomes
    on_change: Callable[[], None]
    references: References = msgspec.field(default_factory=References)

    def __post_init__(self) -> None:
        self._open: set[Call] = set()
        self._by_id: dict[str, Call] = {}
        self._by_key: dict[tuple[str, str | None, str], Call] = {}
        self._waiting: deque[Call] = deque()
        self._worker: Served | None = None
        # The slots of the serving workers, the workers by process number, and by their tags the
        # calls that have a slot or wait for one.
        self._slots = Slots()
        self._processes: dict[int, Worker | RankGroup] = {}
        self._queued: dict[str, Call] = {}
        # The batched methods, and of each the batch that further calls may join.
        self._batched: Mapping[str | None, BatchSpec] = {}
        self._batches: dict[str | None, Batch[Call]] = {}
        # Processes that get no call until a cancelled call has ended.
        self._paused: set[int] = set()
        self._tag = os.urandom(4).hex()
        self._numbers = itertools.count(1)
        self._item_use = ItemUse(
            lambda: [worker.pid for worker in self._processes.values()],
            self._count_items,
            self._send_item_line,
        )
        # Seconds that an item takes, and when the last one ended in each process.
        self._item_seconds = TIMING.items_ahead_return_seconds
        self._item_ends: dict[int, float] = {}
        # Until the next check for items ahead that do not begin.
        self._ahead_timer: asyncio.TimerHandle | None = None
        # Calls whose turn has come.
        self._starts: deque[Start] = deque()
        self._is_starting = False
        # The group that served before, in an earlier world.
        self._earlier: RankGroup | None = None
        #: The workload that is served, or about to be served.
        self.spec: WorkloadSpec | None = None
        #: Identity of the instance of a class that serves.
        self.instance: str | None = None
        # The notice that the instance was made anew, and true until a caller has got it.
        self._notice: str | None = None
        self._is_notice_pending = False
        self._refusal: KubetorchError | None = CallRefusedError(
            "nothing is deployed on this pod yet", hint="deploy it with .to(compute)"
        )
        #: No call begins any more.
        self.is_draining = False
        #: Calls begun and failed since the agent started.
        self.total = 0
        self.failed = 0
        #: Seconds since the epoch of the last begin or end of a call.
        self.last = time.time()
        #: Why the pod ends, if its backend has reported it.
        self.ending: Ending | None = None
        #: False if the controller wants no records; and bytes of the arguments that wait for them.
        self.may_record = True
        self.recordable_bytes = 0
        # When unspawned calls have left records.
        self._record_times: deque[float] = deque(maxlen=LIMITS.recorded_failures)
        #: Process id of the last worker that ended while it had calls.
        self.lost_with: int | None = None

    @property
    def running(self) -> int:
        """Calls that have not ended, whether they wait or run."""
        return len(self._open)

    @property
    def waiting(self) -> int:
        """Calls that wait for a slot."""
        return self._slots.waiting

    @property
    def not_begun(self) -> int:
        """Calls that wait for a slot, or for a worker."""
        return self._slots.waiting + len(self._waiting)

    @property
    def queue(self) -> QueueView | None:
        """The holders of the slots, and how many calls wait; `None` if calls are not bounded."""
        slots = self._slots
        if slots.limit is None:
            return None
        calls_of_slots = [[self._queued[tag] for tag in tags] for tags in slots.holders]
        ahead = [path[0] for path in calls_of_slots if path[0].is_ahead]
        calls_of_slots = [path for path in calls_of_slots if not path[0].is_ahead]
        line = [*ahead, *(self._queued[tag] for tag in slots.line)]
        return QueueView(
            slots=slots.count,
            taken=len(calls_of_slots),
            waiting=len(line),
            since=min((call.queued or 0.0 for call in line), default=0.0),
            strays=sum(call.request.chain == UNKNOWN_CHAIN for call in line),
            holders=tuple(map(_slot_holder, calls_of_slots[: LIMITS.named_slot_holders])),
        )

    def request_waits(self) -> None:
        """If calls wait for slots, ask what the slots' holders wait for, for the next `queue`."""
        if self._slots.limit is not None and self._slots.waiting:
            for worker in self._processes.values():
                if isinstance(worker, Worker):
                    worker.request_waits()

    @property
    def generation(self) -> int:
        """The generation that serves calls; 0 if none serves."""
        return self._worker.generation if self._worker is not None else 0

    @property
    def is_distributed(self) -> bool:
        return self.spec is not None and self.spec.compute.distribution is not None

    @property
    def is_serving(self) -> bool:
        """True if a call would run at once."""
        return self._worker is not None and not self.is_draining

    def refuse_waiting(self, call_id: str, failure: dict[str, Any]) -> None:
        """Fail a call that waits for a new world, which will not be formed."""
        for call in [call for call in self._waiting if call.request.id == call_id]:
            self._waiting.remove(call)
            call.fail_with(exceptions.parse(failure))

    def detached(self) -> set[Call]:
        return {call for call in self._open if call.spawned}

    # ------------------------------------------------------------------------ from the supervisor

    def serve(self, spec: WorkloadSpec, worker: Served, why: str | None = None) -> None:
        """Run calls on this worker from now on, waiting calls first.

        `why` is the reason why the worker before ended; `None` if this one was made for a deploy.
        """
        before = self._worker
        self._earlier = before if isinstance(before, RankGroup) else None
        self.spec, self._worker, self._refusal = spec, worker, None
        self.instance = self._notice = None
        if spec.callable.kind == "cls":
            self.instance = os.urandom(4).hex()
            if why is not None:
                self._notice = self._log_replacement(spec.callable.name, worker, why)
        self._is_notice_pending = self._notice is not None
        self._leave_line()
        self._slots = _slots_of(spec, worker, self.pod_name)
        if isinstance(worker, WorkerPool):
            worker.on_added, worker.on_removed = self._add_process, self._remove_process
            workers: dict[int, Worker | RankGroup] = dict(worker.workers)
        elif isinstance(worker, RankGroup):
            workers = dict.fromkeys(range(len(worker.world.members)), worker)
        else:
            workers = {0: worker}
        self._processes.clear()
        self._paused.clear()
        self._item_seconds = TIMING.items_ahead_return_seconds
        self._item_ends.clear()
        for number, process in workers.items():
            self._add_process(number, process)
        self._dispatch_waiting()

    def _add_process(self, number: int, worker: Worker | RankGroup) -> None:
        self._processes[number] = worker
        self._batched = {} if isinstance(worker, RankGroup) else worker.methods.batched
        self._begin(self._slots.add(number))

    def _remove_process(self, number: int) -> None:
        self._processes.pop(number, None)
        self._paused.discard(number)
        self._slots.remove(number)

    def note_replacement(self, why: str) -> None:
        """Note that one of several instances of a class was made anew."""
        assert self.spec is not None
        if self._worker is not None and self.spec.callable.kind == "cls":
            self.instance = os.urandom(4).hex()
            self._notice = self._log_replacement(self.spec.callable.name, self._worker, why)
            self._is_notice_pending = True

    def hold(self, spec: WorkloadSpec) -> None:
        """Let calls wait for the next worker: none serves for the moment."""
        self.spec, self._worker, self._refusal = spec, None, None
        self._leave_line()

    def refuse(self, error: KubetorchError) -> None:
        """Refuse calls: no worker serves, and none is about to."""
        self._worker, self._refusal = None, error
        self._leave_line()
        waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            call.fail(error, started=False)

    # --------------------------------------------------------------------------------- callers

    def check(self, request: Open) -> None:
        """Refuse a call that cannot run, before its arguments arrive."""
        self.check_target(request.callable, request.body.codec)
        distribution_options = {
            "workers": request.workers is not None,
            "restart_procs": request.restart_procs,
        }
        used_options = [name for name, is_used in distribution_options.items() if is_used]
        if (used_options or request.part) and self.spec is not None and not self.is_distributed:
            raise SpecError(
                f"{request.callable} is not distributed: it has no workers to choose or restart "
                f"({', '.join(used_options) or 'part'})",
                hint="kt.Compute(...).distribute(...) makes it so; of any service "
                'workers="any" is the least busy pod',
            )
        names = (request.id, request.request_id, request.method or "")
        if max(map(len, names)) > LIMITS.call_name_characters:
            raise ProtocolError(
                f"an id or a method of more than {LIMITS.call_name_characters} characters"
            )
        timeout = request.timeout
        if timeout is not None and not 0 <= timeout <= wire_tuning.TIMING.longest_call_seconds:
            raise ProtocolError(
                f"a timeout of {timeout} s; there may be 0 to "
                f"{wire_tuning.TIMING.longest_call_seconds:.0f}"
            )
        if request.detached and not CALL_ID.fullmatch(request.id):
            raise CallRefusedError(f"{request.id[:80]!r} cannot be the id of a call")
        body = request.body
        check_arguments(body.total)
        sizes = body.sizes
        if min(sizes, default=0) < 0 or codecs.layout(sizes)[1] != body.total:
            raise SerializationError(f"a payload of {body.total} bytes in other segments")
        if request.retry is not None:
            _check_retry(request.retry)

    def stopping_error(self) -> CallRefusedError:
        return CallRefusedError(
            f"pod {self.pod_name} is being stopped", hint="call again: another pod takes it"
        )

    def check_target(self, name: str, codec: str) -> None:
        """Refuse a call of another callable, or in a codec that the workload does not allow."""
        if self.is_draining:
            raise self.stopping_error()
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        if len(self._open) - self._slots.waiting >= LIMITS.pod_calls:
            raise CallRefusedError(
                f"pod {self.pod_name} has {LIMITS.pod_calls} calls", hint="call again in a while"
            )
        if self.spec is not None:
            deployed = self.spec.callable.name
            if name != deployed:
                raise CallableNotFoundError(
                    f"Callable '{name}' not found in metadata configuration. "
                    f"Found '{deployed}' instead"
                )
            codecs.check_allowed(codec, self.spec.compute.allowed_serialization)
        elif codec not in (*codecs.CODECS, codecs.VALUES):
            raise SerializationError(f"Serialization format {codec!r} is unknown")

    def open(self, request: Open, caller: Caller) -> Call:
        """A new call; it runs after `Call.begin`."""
        self.check(request)
        if request.id in self._by_id:
            raise CallRefusedError(f"there is a call {request.id} already")
        if request.most_calls is not None and self.running > request.most_calls:
            busy = CallRefusedError(
                f"pod {self.pod_name} has {self.running} calls, and another pod fewer",
                hint="call again: another pod takes it",
            )
            busy.calls = self.running
            raise busy
        call = Call(self, request, caller, self._new_tag())
        call.spec = self.spec
        self._open.add(call)
        if request.detached:
            self._by_id[request.id] = call
        if request.idempotency_key is not None:
            self._by_key[_key(request)] = call
        if request.timeout is not None:
            call.limit(request.timeout)
        self.total += 1
        self.last = call.opened
        self.on_change()
        return call

    def _new_tag(self) -> str:
        return f"{self._tag}-{next(self._numbers):x}"

    def other_origin(self, request: Open) -> Origin | None:
        """The origin of the served code, if the caller means other code."""
        if request.origin is None or request.part is not None or self.spec is None:
            return None
        served = self.spec.origin
        return None if served is None or served.key == request.origin else served

    def find_earlier(self, request: Open) -> Call | Outcome | None:
        """The earlier call with the same idempotency key, or its outcome."""
        if request.idempotency_key is None:
            return None
        key = _key(request)
        return _unanswered(self._by_key.get(key)) or self.outcomes.get(key)

    def find(self, call_id: str) -> Call | Outcome | None:
        """A spawned call by its id, or its outcome, as long as the pod has it."""
        return _unanswered(self._by_id.get(call_id)) or self.results.find(call_id)

    def describe(self, error: KubetorchError, *, started: bool) -> exceptions.Failure:
        return exceptions.describe_refusal(error, pod_name=self.pod_name, started=started)

    # --------------------------------------------------------------------------------- calls

    def dispatch(self, call: Call) -> None:
        """Run a call whose arguments are complete, or let it wait."""
        worker = self._worker_for(call.request)
        if worker is None or not worker.accepts(call.request, call.opened):
            self._wait(call)
            return
        if call.spec is not self.spec and not self._is_still_right(call):
            return
        # Before the call is recorded: a caller that spawns waits for the notice or the record.
        if self._notice is not None and not self._notify_callers(call, self._notice):
            return
        if isinstance(worker, RankGroup) and not self._is_bounded_here(worker, call.request):
            if self._record(call):
                call.run_on(worker, call.request.chain)
        elif call.request.method == CALLABLES and not isinstance(worker, RankGroup):
            self._answer_about_names(call)
        else:
            self._queue(call)

    def _answer_about_names(self, call: Call) -> None:
        """Run a handle's question about names, which needs no slot: no user code runs."""
        workers = (candidate for candidate in self._processes.values() if candidate.accepts_calls)
        worker = next(workers, None)
        if worker is None:
            self._wait(call)
        elif self._record(call):
            call.run_on(worker, call.request.chain)

    def _is_bounded_here(self, group: RankGroup, request: Open) -> bool:
        """True if this agent hands out the slots that a call on ranks needs."""
        is_bounded = self._slots.limit is not None and group is self._worker
        return is_bounded and group.hands_out_slots(request)

    def _queue(self, call: Call) -> None:
        """Run a call in a slot that is free, or let it wait for its turn."""
        request = call.request
        if self._is_batched(call):
            call.came = call.came or asyncio.get_running_loop().time()
            if self._join(call):
                return
        nodes = None
        shared = request.collective
        if shared and CALL_ID.fullmatch(shared) and shared not in self._queued:
            call.tag = shared
        beside = self._beside(request)
        call.is_in_line = beside == 1
        ahead = call.is_in_line and _may_be_ahead(request)
        process = None
        if not request.chain:
            process = self._slots.begin(call.tag, beside, may_be_ahead=ahead)
        if process is not None:
            call.slots = self._slots
            self._queued[call.tag] = call
            if self._record(call):
                pod = self.pod_name if beside else ""
                self._run(call, process, f"{call.tag}:{call.tag}:{pod}", in_line=call.is_in_line)
            return
        try:
            if isinstance(self._worker, RankGroup):
                selected = self._worker.nodes_of(request)
                nodes = None if selected is None else frozenset(selected)
            chain = Chain.parse(request.chain) if request.chain else ()
            caller = call.callers[0].identity if call.callers else ""
            ticket = Ticket(call.tag, caller, chain, request.body.total, nodes, beside, ahead)
            start = self._slots.offer(ticket, is_first=call.is_returned)
        except QueueFullError as error:
            error.message = f"pod {self.pod_name}: {error.message}"
            call.fail(error, started=False)
            return
        except KubetorchError as error:
            call.fail(error, started=False)
            return
        call.slots = self._slots
        self._queued[call.tag] = call
        if start is None:
            call.wait_for_slot()
        if self._record(call) and start is not None:
            self._run_at(call, start)

    def _beside(self, request: Open) -> int:
        """How many calls of this kind run side by side in a process; 0 is any number."""
        if isinstance(self._worker, RankGroup):
            return 0
        if request.is_again:
            return 1
        if self._slots.limit is None and request.method in self._batched:
            return BATCHES
        # With one slot items run one after the other, too, and quick ones go ahead.
        if not request.is_item or self._slots.limit not in (None, 1):
            return 0
        if request.method in self._batched:
            return 0
        for worker in self._processes.values():
            if isinstance(worker, Worker) and request.method in worker.methods.on_loop:
                return LIMITS.loop_items if self._slots.limit is None else 0
        return 1

    def _begin(self, starts: Sequence[Start]) -> None:
        """Run calls whose turn has come; a call that ends at once may let others begin."""
        self._starts.extend(starts)
        if self._is_starting:
            return
        self._is_starting = True
        try:
            while self._starts:
                start = self._starts.popleft()
                call = self._queued.get(start.call)
                if call is not None and not call.is_ended:
                    self._run_at(call, start)
        finally:
            self._is_starting = False

    def _run_at(self, call: Call, start: Start) -> None:
        chain = Chain(start.ancestors).render()
        is_in_line = call.is_in_line and start.has_own_slot
        self._run(call, start.processes[0], chain, in_line=is_in_line)

    def _run(self, call: Call, process: int, chain: str, *, in_line: bool = False) -> None:
        worker = self._processes.get(process)
        is_stale = call.slots is not self._slots
        if is_stale or worker is None or not worker.accepts(call.request, call.opened):
            self._give_slot_back(call)
            self._wait(call)
            return
        call.process = process
        if self._is_batched(call):
            self._run_in_batch(call, process, chain)
            return
        call.run_on(worker, chain, in_line=in_line)
        if in_line and self._ahead_timer is None and call.is_ahead:
            self._look_ahead_later()
        if call.request.map_id and self._is_alone(call) and not call.is_ended:
            self._item_use.on_begun(call.request.map_id)

    # ------------------------------------------------------------------------------- batches

    def _is_batched(self, call: Call) -> bool:
        """True if a call runs with others; not one that may have ended its process."""
        return call.request.method in self._batched and not call.request.is_again

    def _join(self, call: Call) -> bool:
        """Let a call join the batch that is open for its method; false without one."""
        batch = self._batches.get(call.request.method)
        if batch is None:
            return False
        if self._record(call):
            self._add_to_batch(call, batch)
        return True

    def _run_in_batch(self, call: Call, process: int, chain: str) -> None:
        """Open a batch in the slot of a call, with the calls of its method that wait."""
        method = call.request.method
        batch = self._batches.get(method)
        if batch is not None:  # two calls got slots at the same time
            self._add_to_batch(call, batch)
            self._give_slot_back(call)
            return
        spec = self._batched[method]
        batch = self._batches[method] = Batch(call, spec, process, chain)
        call.slots, call.tag = None, self._new_tag()
        self._add_to_batch(call, batch)
        if batch.is_closed:
            return
        tags, starts = self._slots.take(self._belongs_to(method), batch.room)
        for tag in tags:
            waiting_call = self._queued.pop(tag)
            waiting_call.slots = None
            self._add_to_batch(waiting_call, batch)
        if not batch.is_closed:
            loop = asyncio.get_running_loop()
            end = (call.came or 0.0) + spec.wait
            if end > loop.time():
                call.wait_for_slot()
                batch.timer = loop.call_at(end, self._run_batch, batch)
            else:
                self._run_batch(batch)
        self._begin(starts)

    def _belongs_to(self, method: str | None) -> Callable[[str], bool]:
        """Whether a waiting call may run in a batch of the method."""
        queued = self._queued
        return lambda tag: queued[tag].request.method == method and self._is_batched(queued[tag])

    def _add_to_batch(self, call: Call, batch: Batch[Call]) -> None:
        is_first = not batch.calls
        batch.join(call)
        call.batch, call.process = batch, batch.process
        if not batch.room:
            self._run_batch(batch)
        elif not is_first:
            call.wait_for_slot()

    def _run_batch(self, batch: Batch[Call]) -> None:
        """Run the calls of a batch, which no further calls join."""
        self._close(batch)
        worker = self._processes.get(batch.process)
        is_stale = batch.slots is not self._slots
        if is_stale or worker is None or isinstance(worker, RankGroup) or not worker.accepts_calls:
            for call in self._dissolve(batch):
                self.dispatch(call)
            return
        chain, numbers = batch.chain, []
        for call in tuple(batch.calls):
            member = Member(batch, call, self._give_slot_back)
            call.run_on(worker, chain, member=member)
            if not call.is_ended:  # refused
                batch.begin(member)
                numbers.append(call.number)
        if numbers:
            worker.run_together(numbers)

    def _close(self, batch: Batch[Call]) -> None:
        """Let no further calls join a batch."""
        if not batch.is_closed:
            batch.is_closed = True
            del self._batches[batch.method]
        if batch.timer is not None:
            batch.timer.cancel()

    def _dissolve(self, batch: Batch[Call]) -> list[Call]:
        """The calls of a batch that does not run, each by itself again."""
        calls = list(batch.calls)
        for call in calls:
            self.leave_slot(call)
        return calls

    def _is_alone(self, call: Call) -> bool:
        """True for an item that has no others beside it, since the service does not allow any."""
        has_gpus = self.spec is not None and self.spec.compute.gpus is not None
        return self._slots.limit is None and call.is_in_line and not has_gpus

    def _items_of(self, map_id: str) -> list[Call]:
        """The items of a map that run."""
        calls = self._queued.values()
        runs = (call for call in calls if call.worker is not None and not call.is_ahead)
        return [call for call in runs if call.request.map_id == map_id]

    def _count_items(self, map_id: str) -> int:
        """How many items of a map run; 0 if processes mostly wait for the next item."""
        return (
            len(self._items_of(map_id)) if self._item_seconds >= TIMING.waiting_item_seconds else 0
        )

    def _learn_from_item(self, begun: float, process: int) -> None:
        """Learn from the duration of an item how many items go ahead; the latest count most."""
        seconds = self.last - max(begun, self._item_ends.get(process, 0.0))
        self._item_seconds = (seconds + self._item_seconds) / 2
        self._item_ends[process] = self.last
        least = TIMING.items_ahead_seconds / LIMITS.items_ahead
        self._slots.ahead = int(TIMING.items_ahead_seconds / max(self._item_seconds, least))

    def _look_ahead_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._ahead_timer = loop.call_later(TIMING.items_ahead_return_seconds, self._look_ahead)

    def _look_ahead(self) -> None:
        """Take back items behind an item that takes long: another process may be free."""
        self._ahead_timer = None
        latest = time.time() - TIMING.items_ahead_return_seconds
        ahead = [call for call in self._queued.values() if call.is_ahead]
        # The last item first: each is then put before those that came back before it.
        for call in sorted(ahead, key=lambda call: call.number, reverse=True):
            if call.begun is not None and call.begun <= latest:
                self._item_seconds, self._slots.ahead = TIMING.items_ahead_return_seconds, 0
                call.take_back()
        if ahead:
            self._look_ahead_later()

    def _send_item_line(self, map_id: str, line: Line) -> None:
        for call in self._items_of(map_id)[:1]:
            call.on_log(line)

    def _give_slot_back(self, holder: Call | Batch[Call]) -> None:
        slots, holder.slots = holder.slots, None
        if slots is not None:
            del self._queued[holder.tag]
            starts = slots.end(holder.tag)
            if starts and slots is self._slots:
                self._begin(starts)

    def _leave_line(self) -> None:
        """Let the calls that wait for a slot, or in a batch, wait for the next worker."""
        line = [self._queued.pop(tag) for tag in self._slots.clear()]
        batched = [call for batch in [*self._batches.values()] for call in self._dissolve(batch)]
        for call in (*batched, *line):
            call.slots = None
            self._waiting.append(call)
            call.wait_until(self._patience(call.request), self._give_up)

    def on_interrupted(self, call: Call) -> None:
        """Pause the process of a cancelled call, which may not end, until the call has ended."""
        holder = call.batch or call
        if call.process is not None and holder.slots is self._slots:
            self._slots.pause(call.process)
            self._paused.add(call.process)

    def _worker_for(self, request: Open) -> Served | None:
        """The worker for a call: parts of calls of an earlier world belong to its workers."""
        earlier, part = self._earlier, request.part
        is_earlier = earlier is not None and part is not None and part.epoch == earlier.world.epoch
        return earlier if is_earlier else self._worker

    def _log_replacement(self, name: str, worker: Served, why: str) -> str:
        """Log that the instance was made anew; returns the text, for callers."""
        now = time.time()
        notice = (
            f"{name} in pod {self.pod_name} is a new instance ({self.instance}), made at "
            f"{time.strftime('%H:%M:%S', time.localtime(now))} without the state of the one "
            f"before: {why}"
        )
        self.on_line(Line(notice, "logger", "WARNING", now, None), worker.generation)
        return notice

    def _notify_callers(self, call: Call, notice: str) -> bool:
        """Notify callers, once, that the instance was made anew; true if the call may run.

        The first caller is notified, and every program that has called an instance before.
        """
        assert self.instance is not None
        assert self.spec is not None
        if call.request.method == CALLABLES:
            return True
        if call.request.instance == self.instance:
            self._is_notice_pending = False
            return True
        if call.request.instance is None and not self._is_notice_pending:
            return True
        # Of a spawned call that has waited, the caller may never ask.
        if call.callers and not call.is_recorded:
            self._is_notice_pending = False
        if self.spec.callable.on_replace == "error":
            hint = "call again: the next call runs on the new instance"
            error = InstanceReplacedError(notice, instance=self.instance, hint=hint)
            call.fail(error, started=False)
            return False
        for caller in call.callers:
            caller.on_replaced(notice, self.instance)
        return True

    def _record(self, call: Call) -> bool:
        """Record a spawned call on disk before it runs; a failure ends it, and returns false."""
        if not call.request.detached or call.is_recorded:
            return True
        try:
            self.results.begin(_report(call.request, call.state, call.opened))
        except OSError as error:
            call.fail(self._unwritten(error), started=False)
            return False
        call.is_recorded = True
        return True

    def _unwritten(self, error: OSError) -> DataStoreError:
        return DataStoreError(
            f"pod {self.pod_name} cannot write the call to its disk: {error}",
            hint="free some of the pod's disk, or call it without .spawn()",
        )

    def add_twin(self, earlier: Call | Outcome, request: Open) -> None:
        """Record one more spawned call with the idempotency key of an earlier call."""
        if isinstance(earlier, Call) and earlier.refusal is not None:
            raise earlier.refusal
        now = time.time()
        try:
            self.results.begin(_report(request, "running", now))
        except OSError as error:
            raise self._unwritten(error) from error
        if isinstance(earlier, Call):
            earlier.twins.append(request)
            self._by_id[request.id] = earlier
        else:
            self._keep_spawned(request, earlier, now)

    def keep_arguments(self, call: Call) -> bool:
        """True if the arguments of a call are to stay until its end, for its record."""
        request = call.request
        if self.spec is None or self.spec.callable.record == "none" or not self.may_record:
            return False
        size = request.body.total
        if (
            request.part is not None
            or request.method == CALLABLES
            or size > LIMITS.recorded_arguments_bytes
            or self.recordable_bytes + size > LIMITS.recordable_arguments_bytes
        ):
            return False
        if not call.has_arguments:
            call.has_arguments = True
            self.recordable_bytes += size
        return True

    def leaves_record(self, call: Call, is_failure: bool) -> bool:
        """True if a call that has ended leaves a record; of unspawned ones, so many do."""
        spec, request = call.spec, call.request
        modes = ("failed", "all") if is_failure else ("all",)
        if spec is None or not self.may_record or spec.callable.record not in modes:
            return False
        is_ours = request.part is not None or request.method == CALLABLES
        if is_ours or call.begun is None or not CALL_ID.fullmatch(request.id):
            return False
        if not is_failure or call.spawned:
            return True
        times, now = self._record_times, time.monotonic()
        is_full = len(times) == times.maxlen
        if is_full and now - times[0] < TIMING.recorded_failures_seconds:
            return False
        times.append(now)
        return True

    def keep(
        self, call: Call, outcome: Outcome, *, is_answer: bool = True, record: Sequence[Buffer] = ()
    ) -> None:
        """Keep the outcome of a call for later requests, and the parts of its record."""
        request = call.request
        if request.idempotency_key is not None and is_answer:
            refusal = call.refusal
            answer = outcome
            if refusal is not None:
                answer = Raised(self.describe(refusal, started=True))
            self.outcomes.put(_key(request), answer)
        for spawned in call.spawned:
            self._keep_spawned(spawned, outcome, call.opened, call, record)
        if record and not call.spawned:
            self._keep_spawned(request, outcome, call.opened, call, record, is_record_alone=True)

    def keep_value(self, call: Call, descriptor: int, failure: bytes) -> bytes:
        """Keep a value that cannot travel; returns the failure, which says how to fetch it.

        The controller is told of the call as of a spawned one, so that it is found by its id.
        """
        request = call.request
        if not CALL_ID.fullmatch(request.id):
            os.close(descriptor)
            return failure
        self.values.keep_file(request.id, descriptor)
        described = exceptions.parse_json(failure)
        hint = (
            f"its value is kept for {TIMING.kept_value_seconds / 3600:g} h: "
            f'kt.calls.get("{request.id}").result(serialization="pickle"), or '
            f"kt calls result {request.id} --serialization pickle --out value.pkl"
        )
        if described.state.get("hint"):
            hint = f"{described.state['hint']}; {hint}"
        state = {**described.state, "call_id": request.id, "hint": hint}
        described = replace_fields(described, state=state)
        if not call.spawned:
            self._keep_spawned(request, Raised(described), call.opened, call)
        return described.to_json()

    def kept_value(self, call_id: str) -> Outcome:
        outcome = self.values.get(call_id)
        if outcome is None:
            raise ResultExpiredError(
                f"pod {self.pod_name} does not keep the value of call {call_id}",
                hint="values that cannot travel are kept for "
                f"{TIMING.kept_value_seconds / 3600:g} h, and at most "
                f"{WORKER_LIMITS.stored_value_bytes // 1024**3} GiB of them: the oldest go first",
            )
        return outcome

    def _keep_spawned(
        self,
        request: Open,
        outcome: Outcome,
        started: float,
        call: Call | None = None,
        record: Sequence[Buffer] = (),
        *,
        is_record_alone: bool = False,
    ) -> None:
        """Keep the end of a spawned call; `call` is the call that ended now, if one did.

        Of a call that was not spawned, the record alone is kept.
        """
        cancelled = None if call is None else call.cancelled
        state = "succeeded" if isinstance(outcome, Returned) else "failed"
        if state == "failed" and cancelled is not None:
            state = "cancelled"
        report = _report(request, state, started, ended=time.time())
        attempts = 1 if call is None else call.attempts
        worker = None if call is None else call.worker
        generation = worker.generation if record and worker is not None else 0
        report = replace(report, attempts=attempts, generation=generation)
        self.results.end(report, None if is_record_alone else outcome, record)

    def report_state(self, call: Call) -> None:
        """Report to the controller whether a spawned call waits or runs."""
        for spawned in call.spawned:
            report = _report(spawned, call.state, call.opened)
            self.results.progress(replace(report, attempts=call.attempts))

    def report_progress(self, call: Call, report: Progress) -> None:
        """Report the progress of a spawned call to the controller."""
        if not math.isfinite(report.current):  # JSON has none
            return
        message = report.message and report.message[: LIMITS.spawned_progress_characters]
        total = None if report.total is None or not math.isfinite(report.total) else report.total
        progress = CallProgress(report.current, total, message)
        for spawned in call.spawned:
            news = _report(spawned, call.state, call.opened)
            self.results.progress(replace(news, progress=progress, attempts=call.attempts))

    def on_lost(self, call: Call) -> None:
        """Note that the worker of a call ended before the call did."""
        self.on_left_process(call)
        if call.worker is not None:
            self.lost_with = call.worker.pid

    def on_left_process(self, call: Call) -> None:
        """Pause the process that a call has left, if it accepts no calls any more."""
        if isinstance(call.worker, Worker) and not call.worker.accepts_calls:
            self.on_interrupted(call)

    def on_end(self, call: Call, *, is_failure: bool) -> None:
        """Forget a call of which nothing runs any more."""
        self._open.discard(call)
        request = call.request
        for spawned in call.spawned:
            self._by_id.pop(spawned.id, None)
        if request.idempotency_key is not None:
            self._by_key.pop(_key(request), None)
        self.failed += is_failure
        self.last = time.time()
        if call.is_in_line and call.begun is not None and call.process is not None:
            self._learn_from_item(call.begun, call.process)
        self.on_change()
        if call.queued is not None and call.slots is None and call.begun is None:
            with contextlib.suppress(ValueError):  # it waits for a worker no more
                self._waiting.remove(call)
        self.leave_slot(call)
        if self._waiting and self._worker is not None and self._worker.accepts_calls:
            self._dispatch_waiting()

    def leave_slot(self, call: Call) -> None:
        """Free the slot of a call that does not run, so that other calls may begin."""
        batch, call.batch = call.batch, None
        if batch is not None and batch.leave(call):
            self._close(batch)
            self._give_slot_back(batch)
        self._give_slot_back(call)
        call.process = None
        for process in tuple(self._paused):
            worker = self._processes.get(process)
            if worker is not None and worker.accepts_calls:
                self._paused.discard(process)
                self._begin(self._slots.resume(process))

    def _dispatch_waiting(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            if not call.is_ended:
                self.dispatch(call)

    def _wait(self, call: Call) -> None:
        if self._refusal is not None:
            call.fail(self._refusal, started=False)
            return
        if not self._record(call):  # a handle may ask for it by its id already
            return
        if call.is_returned:
            self._waiting.appendleft(call)
        else:
            self._waiting.append(call)
        is_first = call.wait_until(self._patience(call.request), self._give_up)
        if is_first and call.request.restart_procs:
            seconds = TIMING.wait_report_first_delay_seconds
            asyncio.get_running_loop().call_later(seconds, self._report_waiting, call, seconds)

    def _report_waiting(self, call: Call, waited: float) -> None:
        """Log what new processes wait for, now and again after twice the time."""
        if call not in self._waiting:
            return
        waits_for = self._worker.waits_for if isinstance(self._worker, RankGroup) else None
        if waits_for is not None:
            text = (
                f"waiting for pods to start the ranks again: {waits_for}; with "
                'workers="ready" those that are there begin'
            )
            call.on_log(Line(text, KUBETORCH, "WARNING", time.time(), None))
        seconds = 2 * waited
        asyncio.get_running_loop().call_later(seconds, self._report_waiting, call, seconds)

    def _patience(self, request: Open) -> float:
        """Seconds that a call waits for a worker: longer for the workers of a new world."""
        compute = None if self.spec is None else self.spec.compute
        if compute is None or compute.distribution is None:
            return TIMING.worker_wait_seconds
        if not request.restart_procs and request.part is None:
            return TIMING.worker_wait_seconds
        return float(compute.quorum_timeout + compute.launch_timeout)

    def _give_up(self, call: Call) -> None:
        self._waiting.remove(call)
        error = CallRefusedError(
            f"pod {self.pod_name} has had no worker for {self._patience(call.request):g} s",
            hint="its code is still being loaded, or it fails again and again: kt logs shows it",
        )
        call.fail(error, started=False)

    def _is_still_right(self, call: Call) -> bool:
        """True if a call may run although another generation was deployed since it was opened."""
        try:
            self.check_target(call.request.callable, call.request.body.codec)
        except KubetorchError as error:
            call.fail(error, started=False)
            return False
        return True

    # ----------------------------------------------------------------------------------- the end

    def stop_accepting(self, reason: str) -> None:
        """Refuse new calls and those that have not begun: the pod ends for this reason."""
        self.is_draining = True
        self._waiting.clear()
        for call in [call for call in self._open if call.worker is None]:
            if call.attempts > 1:  # it waits to run again
                call.fail(self.ending_error(reason), started=True)
            else:
                call.fail(self.stopping_error(), started=False)

    def end_all(self, reason: str) -> None:
        """End the calls that still run: the time of the pod is over."""
        for call in list(self._open):
            call.fail(self.ending_error(reason), started=True)

    def ending_error(self, reason: str) -> PodTerminatedError:
        """The error of a call that the end of the pod ends."""
        return (self.ending or Ending(reason=reason)).error(self.pod_name)


def _may_be_ahead(request: Open) -> bool:
    """True if an item is small, and its timeout long enough to wait for a few items before it."""
    is_plain = request.is_item and not request.is_again and not request.chain
    timeout = request.timeout
    has_time = timeout is None or timeout >= TIMING.item_ahead_least_timeout_seconds
    return is_plain and has_time and request.body.total <= LIMITS.item_ahead_bytes


def _slots_of(spec: WorkloadSpec, worker: Served, pod: str) -> Slots:
    compute = spec.compute
    processes = len(worker.workers) if isinstance(worker, WorkerPool) else 1
    return Slots(compute.concurrency_of(processes), compute.max_queue or MOST_WAITING, pod)


def _unanswered(call: Call | None) -> Call | None:
    """A call that may be joined: not one that timed out, which may still run."""
    return None if call is None or call.is_answered else call


def _slot_holder(path: Sequence[Call]) -> SlotHolder:
    """The holder of a slot that a call has, and the calls that it waits for."""
    first, last = path[0], path[-1]
    begun = first.begun or first.opened
    return SlotHolder(_name(first.request), begun, len(path), last.is_paused, last.waits_for)


def _name(request: Open) -> str:
    """Callable and method, such as `Counter.add`."""
    return f"{request.callable}.{request.method}" if request.method else request.callable


def _report(request: Open, state: str, started: float, *, ended: float | None = None) -> CallReport:
    """The report of a spawned call for the controller."""
    return CallReport(
        id=request.id, callable=_name(request), state=state, started=started, ended=ended
    )


def _check_retry(retry: Retry) -> None:
    seconds = (retry.backoff, retry.max_backoff)
    names = sum(map(len, retry.names or ()))
    if (
        names > LIMITS.retry_names_characters
        or retry.count < 0
        or not all(0 <= s < math.inf for s in seconds)
    ):
        raise ProtocolError("retries that cannot be")


def _key(request: Open) -> tuple[str, str | None, str]:
    assert request.idempotency_key is not None
    return request.callable, request.method, request.idempotency_key
