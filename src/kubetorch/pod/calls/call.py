"""One call in the agent: who waits for it, where it runs, how it ends.

A *caller* (a stream's end of a call, an HTTP request) opens a call and begins it once all arguments
are there. It ends exactly once: with a result, a failure, or a refusal, which says that nothing of
it ran. Nothing here awaits: everything happens in the turn of the event loop in which a frame came,
because a task per call costs more than the relay.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kubetorch.errors import (
    CallCancelledError,
    CallRefusedError,
    CallTimeoutError,
    KubetorchError,
)
from kubetorch.pod.workers.host import CallSink, Payload
from kubetorch.pod.workers.lines import Line
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import failures
from kubetorch.wire.calls import Outcome, Raised, Returned
from kubetorch.wire.frames import Open

#: Failures that the agent itself makes and that are an answer all the same: the call ran.
_ANSWERS = (CallTimeoutError.code, CallCancelledError.code, CallRefusedError.code)


class Runner(Protocol):
    """The worker that runs calls, as far as calls are concerned."""

    pid: int
    generation: int

    @property
    def is_alive(self) -> bool:
        """Whether it takes calls."""

    def call(
        self,
        sink: CallSink,
        *,
        method: str | None,
        codec: str,
        sizes: Sequence[int],
        payload: Payload,
        request_id: str,
    ) -> int:
        """Run a call; its number on this worker."""

    def cancel(self, number: int, reason: str, *, timed_out: bool) -> None:
        """End a call soon, whatever it takes."""

    def grant(self, number: int, count: int) -> None:
        """Take so many more values of a generator."""


class Caller(Protocol):
    """Who opened a call, or joined it. After a result or a failure nothing follows."""

    def on_log(self, line: Line) -> None:
        """As `CallSink.on_log`."""

    def on_progress(self, current: float, total: float | None, message: str | None) -> None:
        """As `CallSink.on_progress`."""

    def on_yield(self, codec: str, sizes: Sequence[int], payload: Payload) -> None:
        """As `CallSink.on_yield`; answered by `Call.grant` when the value was passed on."""

    def on_result(self, result: Returned, payload: Payload | None) -> None:
        """The call returned. `payload` is to be released once `result.payload` was passed on."""

    def on_failure(self, failure: bytes) -> None:
        """The call failed, or was refused: a failure as JSON."""


class Owner(Protocol):
    """What a call needs of the table of all calls."""

    def dispatch(self, call: Call) -> None:
        """Run it, or let it wait."""

    def describe(self, error: KubetorchError, *, started: bool) -> failures.Failure:
        """The failure of a call that the agent ends."""

    def keep(self, call: Call, outcome: Outcome, *, is_answer: bool = True) -> None:
        """Somebody may ask later how it ended."""

    def on_lost(self, call: Call) -> None:
        """Its worker ended before it did."""

    def on_end(self, call: Call, *, is_failure: bool) -> None:
        """Nothing of it runs any more."""


class Call:
    """One call.

    Args:
        owner: The table of calls.
        request: What is called.
        caller: Who is told of it.
    """

    __slots__ = (
        "_has_yielded",
        "_owner",
        "_payload",
        "_timer",
        "_worker_timer",
        "callers",
        "cancelled",
        "is_answered",
        "is_ended",
        "number",
        "opened",
        "request",
        "runner",
        "spec",
    )

    def __init__(self, owner: Owner, request: Open, caller: Caller) -> None:
        self._owner = owner
        self._timer: asyncio.TimerHandle | None = None
        self._worker_timer: asyncio.TimerHandle | None = None
        self._payload: Payload | None = None
        self._has_yielded = False
        self.request = request
        #: Who is told of it.
        self.callers = [caller]
        #: Seconds since the epoch.
        self.opened = time.time()
        #: What was served, or about to be, when it was opened.
        self.spec: WorkloadSpec | None = None
        #: The worker that runs it, and its number there.
        self.runner: Runner | None = None
        self.number = 0
        #: Why it is to end.
        self.cancelled: str | None = None
        #: The callers have its end.
        self.is_answered = False
        #: Nothing of it runs any more.
        self.is_ended = False

    @property
    def name(self) -> str:
        """Callable and method, such as `Counter.add`."""
        request = self.request
        return f"{request.callable}.{request.method}" if request.method else request.callable

    @property
    def refusal(self) -> CallRefusedError | None:
        """Why no second caller can have its outcome: some of its values are gone."""
        if not self._has_yielded:
            return None
        return CallRefusedError(
            f"call {self.request.id} streams its values, which are not kept: nobody can join it",
            hint="give each call of a generator an idempotency key of its own",
        )

    # ------------------------------------------------------------------------- from its callers

    def begin(self, payload: Payload) -> None:
        """All arguments are there: run it as soon as a worker serves."""
        if self.is_ended:
            payload.release()
            return
        self._payload = payload
        self._owner.dispatch(self)

    def cancel(self, caller: Caller, reason: str) -> None:
        """A caller does not want the call any more.

        It goes on if others wait for it too, unless it is detached: then whoever has its handle
        decides.
        """
        if len(self.callers) > 1 and not self.request.detached:
            self.callers.remove(caller)
            error = CallCancelledError(reason)
            caller.on_failure(self._owner.describe(error, started=True).to_json())
            return
        self._cancel(reason)

    def revoke(self, reason: str) -> None:
        """Somebody who is no caller, but has the handle of this detached call, wants its end."""
        self._cancel(reason)

    def leave(self, caller: Caller) -> None:
        """A caller is gone. A call that is left by all is cancelled, unless it is detached."""
        if caller in self.callers:
            self.callers.remove(caller)
        if not self.callers and not self.request.detached and not self.is_ended:
            self._cancel("the caller is gone")

    def join(self, caller: Caller) -> None:
        """Tell one more caller how it ends.

        Raises:
            CallRefusedError: It streams values, and some of them are gone.
        """
        if self.refusal is not None:
            raise self.refusal
        self.callers.append(caller)

    def grant(self, count: int) -> None:
        """So many values of a generator were passed on."""
        if self.runner is not None and not self.is_ended:
            self.runner.grant(self.number, count)

    def _cancel(self, reason: str) -> None:
        if self.is_ended or self.cancelled is not None:
            return
        self.cancelled = reason
        if self.runner is None:
            self.fail(CallCancelledError(reason), started=False)
        else:
            self.runner.cancel(self.number, reason, timed_out=False)

    # ------------------------------------------------------------------------ from the dispatcher

    def run_on(self, runner: Runner) -> None:
        """Hand it to a worker."""
        if self._worker_timer is not None:
            self._worker_timer.cancel()
            self._worker_timer = None
        payload, self._payload = self._payload, None
        assert payload is not None
        request = self.request
        body = request.body
        try:
            self.number = runner.call(
                self,
                method=request.method,
                codec=body.codec,
                sizes=body.sizes,
                payload=payload,
                request_id=request.request_id,
            )
        except CallRefusedError as error:
            self.fail(error, started=False)
            return
        self.runner = runner

    def wait_until(self, seconds: float, on_timeout: Callable[[Call], None]) -> None:
        """Call back if no worker has it by then."""
        loop = asyncio.get_running_loop()
        self._worker_timer = loop.call_later(seconds, on_timeout, self)

    def limit(self, seconds: float) -> None:
        """Interrupt it after so many seconds."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, self._time_out)

    def fail(self, error: KubetorchError, *, started: bool) -> None:
        """End it, for its callers and here."""
        self._answer(Raised(self._owner.describe(error, started=started)))
        self._end(is_failure=True)

    def _time_out(self) -> None:
        # What was left of it when the call was sent.
        timeout = round(self.request.timeout or 0.0, 2)
        reason = f"the call did not end within its timeout of {timeout:g} s"
        if self.runner is None:
            self.fail(CallTimeoutError(f"{reason}: no worker took it"), started=False)
            return
        # The callers are told at once, however long the worker takes to stop.
        self._answer(Raised(self._owner.describe(CallTimeoutError(reason), started=True)))
        self.runner.cancel(self.number, reason, timed_out=True)

    # ---------------------------------------------------------------------------- from its worker

    def on_log(self, line: Line) -> None:  # noqa: D102  # CallSink's
        for caller in self.callers:
            caller.on_log(line)

    def on_progress(  # noqa: D102  # CallSink's
        self, current: float, total: float | None, message: str | None
    ) -> None:
        for caller in self.callers:
            caller.on_progress(current, total, message)

    def on_yield(  # noqa: D102  # CallSink's
        self, codec: str, sizes: Sequence[int], payload: Payload
    ) -> None:
        self._has_yielded = True
        if self.is_answered or self.cancelled is not None:
            payload.release()
        elif len(self.callers) == 1 and not self.request.detached:
            self.callers[0].on_yield(codec, sizes, payload)
        else:
            payload.release()
            error = CallRefusedError(
                f"{self.name} is a generator; its values cannot be kept for later",
                hint="call it without .spawn(), or let it return a list",
            )
            self._answer(Raised(self._owner.describe(error, started=True)))
            self._cancel(error.message)

    def on_result(  # noqa: D102  # CallSink's
        self, codec: str, sizes: Sequence[int], payload: Payload, *, streamed: bool
    ) -> None:
        if self.is_answered:
            payload.release()
            self._end(is_failure=True)
            return
        runner = self.runner
        generation = runner.generation if runner is not None else 0
        result = Returned(codec, tuple(sizes), payload.view, streamed, generation)
        self._end(is_failure=False)
        self._answer(result, payload)

    def on_error(self, failure_json: bytes) -> None:  # noqa: D102  # CallSink's
        self._end(is_failure=True)
        if not self.is_answered:
            self._answer_failure(failure_json)

    def on_lost(self, error: KubetorchError) -> None:  # noqa: D102  # CallSink's
        self._owner.on_lost(self)
        self._end(is_failure=True)
        if not self.is_answered:
            self._answer(Raised(self._owner.describe(error, started=True)))

    # ----------------------------------------------------------------------------------- its end

    def _answer(self, outcome: Outcome, payload: Payload | None = None) -> None:
        if self.is_answered:
            return
        if isinstance(outcome, Raised):
            self._answer_failure(outcome.failure.to_json(), outcome)
            return
        self.is_answered = True
        callers, self.callers = self.callers, []
        if self.request.detached or self.request.idempotency_key is not None:
            self._owner.keep(self, outcome)
        for caller in callers:
            caller.on_result(outcome, payload if len(callers) == 1 else None)
        if payload is not None and not callers:
            payload.release()

    def _answer_failure(self, failure: bytes, outcome: Raised | None = None) -> None:
        self.is_answered = True
        callers, self.callers = self.callers, []
        if self.request.detached or self.request.idempotency_key is not None:
            # What the agent itself says of a call that was refused or lost its worker is no answer:
            # a second call with the key is to run.
            is_answer = outcome is None or (
                outcome.failure.started and outcome.failure.code in _ANSWERS
            )
            kept = outcome or Raised(failures.parse_json(failure))
            self._owner.keep(self, kept, is_answer=is_answer)
        for caller in callers:
            caller.on_failure(failure)

    def _end(self, *, is_failure: bool) -> None:
        if self.is_ended:
            return
        self.is_ended = True
        for timer in (self._timer, self._worker_timer):
            if timer is not None:
                timer.cancel()
        if self._payload is not None:
            self._payload.release()
            self._payload = None
        self._owner.on_end(self, is_failure=is_failure)
