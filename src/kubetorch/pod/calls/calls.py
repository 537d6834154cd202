"""The calls of a pod: who may start, where they run, how they end.

                ┌── refused
open ── begin ──┤
                └── waiting for a worker ── running ── ended
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from kubetorch.errors import (
    CallableNotFoundError,
    CallRefusedError,
    KubetorchError,
    ProtocolError,
    SerializationError,
)
from kubetorch.pod.calls.call import Call, Caller, Runner
from kubetorch.pod.calls.outcomes import Outcomes
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import codecs, failures, waits
from kubetorch.wire.calls import CALL_ID, Outcome, Raised, Returned
from kubetorch.wire.frames import Open
from kubetorch.wire.messages import Ending

#: Calls that the pod knows at one time, whatever their state.
CALL_LIMIT = 10_000
#: Largest arguments, in bytes.
ARGUMENTS_LIMIT = 1024**3
#: Seconds that a call without a timeout waits for a worker to be there.
WORKER_TIMEOUT = 30.0


class Records(Protocol):
    """Keeps what becomes of detached calls."""

    def on_begin(self, call: Call) -> None:
        """A detached call waits for a worker, or begins to run."""

    def on_end(self, call: Call, outcome: Outcome) -> None:
        """It ended."""


class Calls:
    """All calls of a pod, and the worker that serves them.

    Args:
        pod_name: Named in failures.
        records: Keeps what becomes of detached calls.
        on_change: Told when the number of calls changes.
        clock: Seconds, for what is kept.
    """

    def __init__(
        self,
        *,
        pod_name: str,
        records: Records,
        on_change: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._pod_name = pod_name
        self._records = records
        self._on_change = on_change
        self._outcomes = Outcomes(clock)
        self._open: set[Call] = set()
        self._by_id: dict[str, Call] = {}
        self._by_key: dict[tuple[str, str | None, str], Call] = {}
        self._by_number: dict[tuple[int, int], Call] = {}
        self._waiting: deque[Call] = deque()
        self._runner: Runner | None = None
        self._spec: WorkloadSpec | None = None
        self._refusal: KubetorchError | None = CallRefusedError(
            "nothing is deployed on this pod yet", hint="deploy it with .to(compute)"
        )
        self._is_draining = False
        self._idle: asyncio.Event | None = None
        #: Calls begun and failed since the agent started.
        self.total = 0
        self.failed = 0
        #: Seconds since the epoch of the last begin or end of a call.
        self.last = time.time()
        #: Why somebody ends the pod, if its backend says so.
        self.ending: Ending | None = None
        #: Process id of the last worker that ended while it had calls.
        self.lost_with: int | None = None

    @property
    def running(self) -> int:
        """Calls that have not ended."""
        return len(self._open)

    @property
    def spec(self) -> WorkloadSpec | None:
        """What is served, or about to be."""
        return self._spec

    @property
    def generation(self) -> int:
        """Generation that serves calls now; 0 when none does."""
        return self._runner.generation if self._runner is not None else 0

    @property
    def is_serving(self) -> bool:
        """Whether a call would run at once."""
        return self._runner is not None and not self._is_draining

    def detached(self) -> set[Call]:
        """Spawned calls that have not ended."""
        return {call for call in self._open if call.request.detached}

    # ------------------------------------------------------------------------ from the supervisor

    def serve(self, spec: WorkloadSpec, runner: Runner) -> None:
        """This worker runs calls from now on, those that wait first."""
        self._spec, self._runner, self._refusal = spec, runner, None
        waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            if not call.is_ended:
                self.dispatch(call)

    def hold(self, spec: WorkloadSpec) -> None:
        """No worker serves for the moment; calls wait for the next one."""
        self._spec, self._runner, self._refusal = spec, None, None

    def refuse(self, error: KubetorchError) -> None:
        """No worker serves, and none is about to."""
        self._runner, self._refusal = None, error
        waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            call.fail(error, started=False)

    # --------------------------------------------------------------------------------- callers

    def check(self, request: Open) -> None:
        """Refuse what cannot be run, before its arguments arrive.

        Raises:
            KubetorchError: It is refused; nothing of it runs.
        """
        self.check_target(request.callable, request.body.codec)
        timeout = request.timeout
        if timeout is not None and not 0 <= timeout <= waits.LONGEST_TIMEOUT:
            raise ProtocolError(
                f"a timeout of {timeout} s; there may be 0 to {waits.LONGEST_TIMEOUT:.0f}"
            )
        if request.detached and not CALL_ID.fullmatch(request.id):
            raise CallRefusedError(f"{request.id[:80]!r} cannot be the id of a call")
        body = request.body
        if body.total > ARGUMENTS_LIMIT:
            raise CallRefusedError(
                f"arguments of {body.total} bytes; {ARGUMENTS_LIMIT} are allowed",
                hint="send a name or a path of large data instead of the data itself",
            )
        sizes = body.sizes
        if min(sizes, default=0) < 0 or codecs.layout(sizes)[1] != body.total:
            raise SerializationError(f"a payload of {body.total} bytes in other segments")

    def check_target(self, name: str, codec: str) -> None:
        """Refuse a call of something else, or in a codec that the workload does not allow.

        Raises:
            KubetorchError: It is refused; nothing of it runs.
        """
        if self._is_draining:
            raise CallRefusedError(
                f"pod {self._pod_name} is being stopped", hint="call again: another pod takes it"
            )
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        if len(self._open) >= CALL_LIMIT:
            raise CallRefusedError(
                f"pod {self._pod_name} has {CALL_LIMIT} calls", hint="call again in a while"
            )
        if self._spec is not None:
            check_name(name, self._spec)
            codecs.check_allowed(codec, self._spec.compute.allowed_serialization)
        elif codec not in codecs.CODECS:
            raise SerializationError(f"Serialization format {codec!r} is unknown")

    def open(self, request: Open, caller: Caller) -> Call:
        """A new call; it runs after `Call.begin`.

        Raises:
            KubetorchError: It is refused; nothing of it runs.
        """
        self.check(request)
        if request.id in self._by_id:
            raise CallRefusedError(f"there is a call {request.id} already")
        call = Call(self, request, caller)
        call.spec = self._spec
        self._open.add(call)
        if request.detached:
            self._by_id[request.id] = call
        if request.idempotency_key is not None:
            self._by_key[_key(request)] = call
        if request.timeout is not None:
            call.limit(request.timeout)
        self.total += 1
        self.last = call.opened
        self._on_change()
        return call

    def repeated(self, request: Open) -> Call | Outcome | None:
        """The call with the same idempotency key, or what became of it."""
        if request.idempotency_key is None:
            return None
        key = _key(request)
        return self._by_key.get(key) or self._outcomes.get(key)

    def find(self, call_id: str) -> Call | Outcome | None:
        """A detached call by its id, or what became of it lately."""
        return self._by_id.get(call_id) or self._outcomes.get(call_id)

    def describe(self, error: KubetorchError, *, started: bool) -> failures.Failure:
        """The failure of a call that the agent ends."""
        failure = failures.describe(error, pod_name=self._pod_name, started=started)
        return failures.without_traceback(failure, error)

    def failure(self, error: KubetorchError, *, started: bool) -> bytes:
        """As `describe`, as JSON."""
        return self.describe(error, started=started).to_json()

    # --------------------------------------------------------------------------------- calls

    def dispatch(self, call: Call) -> None:
        """Run a call whose arguments are there, or let it wait."""
        runner = self._runner
        if runner is None or not runner.is_alive:
            self._wait(call)
            return
        if call.spec is not self._spec and not self._is_still_right(call):
            return
        if call.request.detached:
            self._records.on_begin(call)
        call.run_on(runner)
        if not call.is_ended:
            self._by_number[runner.pid, call.number] = call

    def by_number(self, pid: int, number: int) -> Call | None:
        """The call with this number on the worker with this process id."""
        return self._by_number.get((pid, number))

    def keep(self, call: Call, outcome: Outcome, *, is_answer: bool = True) -> None:
        """Keep how a call ended for those who ask later.

        Args:
            call: The call.
            outcome: How it ended.
            is_answer: Whether a second call with its key is to get this, instead of running.
        """
        if isinstance(outcome, Returned):
            outcome = replace(outcome, payload=bytes(outcome.payload))
        request = call.request
        if request.idempotency_key is not None and is_answer:
            refusal = call.refusal
            answer = outcome
            if refusal is not None:
                answer = Raised(self.describe(refusal, started=True))
            self._outcomes.put(_key(request), answer)
        if request.detached:
            self._outcomes.put(request.id, outcome)
            self._records.on_end(call, outcome)

    def on_lost(self, call: Call) -> None:
        """The worker of a call ended before the call did."""
        if call.runner is not None:
            self.lost_with = call.runner.pid

    def on_end(self, call: Call, *, is_failure: bool) -> None:
        """Nothing of a call runs any more."""
        self._open.discard(call)
        if call.runner is not None:
            self._by_number.pop((call.runner.pid, call.number), None)
        request = call.request
        if request.detached:
            self._by_id.pop(request.id, None)
        if request.idempotency_key is not None:
            self._by_key.pop(_key(request), None)
        self.failed += is_failure
        self.last = time.time()
        self._on_change()
        if self._idle is not None and not self._open:
            self._idle.set()

    def _wait(self, call: Call) -> None:
        if self._refusal is not None:
            call.fail(self._refusal, started=False)
            return
        if call.request.detached:
            self._records.on_begin(call)  # it may be asked for by its id already
        self._waiting.append(call)
        call.wait_until(WORKER_TIMEOUT, self._give_up)

    def _give_up(self, call: Call) -> None:
        self._waiting.remove(call)
        error = CallRefusedError(
            f"pod {self._pod_name} has had no worker for {WORKER_TIMEOUT:g} s",
            hint="its code is still being loaded, or it fails again and again: kt logs shows it",
        )
        call.fail(error, started=False)

    def _is_still_right(self, call: Call) -> bool:
        """Whether a call may run although something else was deployed since it was opened."""
        try:
            self.check_target(call.request.callable, call.request.body.codec)
        except KubetorchError as error:
            call.fail(error, started=False)
            return False
        return True

    # ----------------------------------------------------------------------------------- the end

    async def drain(self, grace: float, reason: str) -> None:
        """Refuse new calls, let running ones end for `grace` seconds, then end them."""
        self._is_draining = True
        self._waiting.clear()
        for call in [call for call in self._open if call.runner is None]:
            refusal = CallRefusedError(f"pod {self._pod_name} is being stopped")
            call.fail(refusal, started=False)
        if self._open:
            self._idle = asyncio.Event()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._idle.wait(), grace)
        for call in list(self._open):
            ending = self.ending or Ending(reason=reason)
            call.fail(ending.error(self._pod_name), started=True)


def check_name(name: str, spec: WorkloadSpec) -> None:
    """Whether this is the callable that was deployed.

    Raises:
        CallableNotFoundError: It is not.
    """
    deployed = spec.callable.name
    if name != deployed:
        raise CallableNotFoundError(
            f"Callable '{name}' not found in metadata configuration. Found '{deployed}' instead"
        )


def _key(request: Open) -> tuple[str, str | None, str]:
    assert request.idempotency_key is not None
    return request.callable, request.method, request.idempotency_key
