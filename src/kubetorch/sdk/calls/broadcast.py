"""A call on every pod of a service: a list of their results, in pod order.

A broadcast fails as soon as it fails on one pod. The calls on other pods are cancelled then, and
get a moment to end, so that the raised error does not depend on the order of errors that come at
the same time.

Where the service bounds how many calls run at once, the other pods are called once the call runs on
the first pod: the broadcast that has a slot there goes first on all pods, so that two broadcasts
never have a slot each that the other one needs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from kubetorch.errors import CallCancelledError
from kubetorch.sdk.calls.attempts import Done, Invocation, Yielded
from kubetorch.sdk.calls.call import (
    Call,
    CallSet,
    LoopWakeup,
    RemoteAsyncIterator,
    RemoteIterator,
    ThreadWakeup,
    is_generator,
)
from kubetorch.sdk.calls.route import PodLeftError
from kubetorch.wire import exceptions, introspection

#: The reason that pods get with the cancellation of their call.
RECALLED = "the call failed on another pod"

Iterators = type[RemoteIterator] | type[RemoteAsyncIterator]


def combine(outcomes: Sequence[Done]) -> Done:
    """The outcome of a broadcast, given how the call of each pod ended, in pod order.

    Its error is the first one in pod order; the errors of other pods are its `other_errors`. A
    cancellation because of another pod's error is not counted.
    """
    failures = [
        (pod, outcome.error) for pod, outcome in enumerate(outcomes) if outcome.error is not None
    ]
    if not failures:
        return Done([outcome.value for outcome in outcomes])
    own_failures = [
        failure for failure in failures if not isinstance(failure[1], CallCancelledError)
    ]
    (pod, first), *other_failures = own_failures or failures
    note = f"raised in {_named(pod, first)}; the call went to {len(outcomes)} pods"
    lines = [
        note,
        *(f"also in {_named(*failure)}: {_short(failure[1])}" for failure in other_failures),
    ]
    exceptions.set_attribute(first, "other_errors", tuple(error for _, error in other_failures))
    exceptions.add_note(first, "\n".join(lines))
    return Done(None, first)


def _named(pod: int, error: Exception) -> str:
    name = introspection.attribute(error, "pod_name")
    return f"pod {pod} ({name})" if type(name) is str and name else f"pod {pod}"


def _short(error: Exception) -> str:
    return introspection.summary(error).partition("\n")[0]


#: The outcome of a pod that the service does not have any more.
_POD_LEFT = Done(None)


def _has_left(step: Done | Yielded) -> bool:
    return isinstance(step, Done) and isinstance(step.error, PodLeftError)


class _Broadcast:
    """The calls of one broadcast; a pod that runs a generator has an iterator in the list."""

    def __init__(
        self, invocation: Invocation, wake: Callable[[], object], iterators: Iterators
    ) -> None:
        self.calls = CallSet(wake)
        self._invocation = invocation
        #: The end of each pod's call, in pod order; `None` while it runs.
        self._outcomes: dict[Call, Done | None] = {Call(part): None for part in invocation.spread()}
        self._iterators = iterators
        self._generators: list[RemoteIterator | RemoteAsyncIterator] = []
        # The other calls start once the first one has begun.
        self._first, *self._following = self._outcomes

    def start(self) -> None:
        self.calls.start(self._first)
        if not self._first.invocation.collective:
            self._start_following()

    def _start_following(self) -> None:
        following, self._following = self._following, []
        for call in following:
            call.invocation.begin_to_expire()
            self.calls.start(call)

    def advance(self) -> Done | None:
        for call, step in self.calls.take_steps():
            if _has_left(step) and len(self._outcomes) > 1:
                del self._outcomes[call]
                continue
            done = self._outcomes[call] = self._outcome(call, step)
            if done.error is not None:
                for other_call in self._following:
                    self._outcomes[other_call] = Done(None, CallCancelledError(RECALLED))
                self._following = []
                for other_call in self._outcomes:
                    if (
                        other_call.is_started
                        and not other_call.is_over
                        and not other_call.is_recalled
                    ):
                        self.calls.recall(other_call, RECALLED)
        is_first_over = self._outcomes.get(self._first, _POD_LEFT) is not None
        if self._first.invocation.has_begun or is_first_over:
            self._start_following()
        outcomes = [outcome for outcome in self._outcomes.values() if outcome is not None]
        if len(outcomes) < len(self._outcomes):
            return None
        whole = combine(outcomes)
        if whole.error is not None:
            self._close_generators()
            return whole
        return Done(self._invocation.shape([outcome.value for outcome in outcomes]))

    def _outcome(self, call: Call, step: Done | Yielded) -> Done:
        if not is_generator(step):
            assert isinstance(step, Done)
            return step
        call.wake = None
        self._generators.append(self._iterators(call, step))
        return Done(self._generators[-1])

    def cancel(self) -> None:
        self.calls.cancel()
        self._close_generators()

    def _close_generators(self) -> None:
        for generator in self._generators:
            generator.close()


def call(invocation: Invocation) -> Done:
    """Call all pods; returns the outcome of the broadcast."""
    wakeup = ThreadWakeup((invocation.target.name, invocation.target.service))
    broadcast = _Broadcast(invocation, wakeup.set, RemoteIterator)
    try:
        broadcast.start()
        while (done := broadcast.advance()) is None:
            wakeup.wait(broadcast.calls.seconds_left)
    except BaseException:
        broadcast.cancel()
        raise
    return done


async def call_async(invocation: Invocation) -> Done:
    """Awaitable form of `call`."""
    wakeup = LoopWakeup()
    broadcast = _Broadcast(invocation, wakeup.set, RemoteAsyncIterator)
    try:
        broadcast.start()
        while (done := broadcast.advance()) is None:
            await wakeup.wait(broadcast.calls.seconds_left)
    except BaseException:
        broadcast.cancel()
        raise
    return done


def iterate(invocation: Invocation) -> Any:  # noqa: ANN401  # as `Invocation.shape`
    """Start a generator on every pod; its iterators, in pod order."""
    started: list[RemoteIterator] = []
    pod_left: PodLeftError | None = None
    try:
        for part in invocation.spread():
            call = Call(part)
            try:
                call.open()
            except PodLeftError as error:
                pod_left = error
                continue
            is_first = part.collective and not started
            started.append(RemoteIterator(call, call.wait_until_begun() if is_first else None))
    except BaseException:
        for generator in started:
            generator.close()
        raise
    if pod_left is not None and not started:
        raise pod_left
    return invocation.shape(started)


class AsyncIterators(list[RemoteAsyncIterator]):
    """A generator on every pod: its iterators, in pod order. Awaiting it gives the list itself."""

    def __await__(self) -> Generator[Any, None, AsyncIterators]:
        yield from ()
        return self


def iterate_async(invocation: Invocation) -> AsyncIterators:
    """A generator on every pod; each starts with its iteration."""
    return AsyncIterators(RemoteAsyncIterator(Call(part)) for part in invocation.spread())
