"""A call on every pod of a service: a list of what they return, in pod order.

A broadcast fails as soon as it fails on one pod. The calls on the others are cancelled then; those
that fail at the same time are given a moment, so that which error is raised does not depend on
which came first.

Where the service bounds how many calls run at once, the other pods are asked once the call runs on
the first one: whoever has a slot there is the only one that the others wait for, so that two
broadcasts never have a slot each that the other one needs.
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

#: Said to the pods whose calls are cancelled.
RECALLED = "the call failed on another pod"

Iterators = type[RemoteIterator] | type[RemoteAsyncIterator]


def combine(outcomes: Sequence[Done]) -> Done:
    """The outcome of a broadcast, given how the call of each pod ended, in pod order.

    Its error is the first one in pod order; those of the other pods are its `other_errors`. An end
    that is only the consequence of another pod's error is not counted.
    """
    failed = [(pod, one.error) for pod, one in enumerate(outcomes) if one.error is not None]
    if not failed:
        return Done([one.value for one in outcomes])
    own = [one for one in failed if not isinstance(one[1], CallCancelledError)]
    (pod, first), *others = own or failed
    note = f"raised in {_named(pod, first)}; the call went to {len(outcomes)} pods"
    lines = [note, *(f"also in {_named(*one)}: {_short(one[1])}" for one in others)]
    exceptions.set_attribute(first, "other_errors", tuple(error for _, error in others))
    exceptions.add_note(first, "\n".join(lines))
    return Done(None, first)


def _named(pod: int, error: Exception) -> str:
    name = introspection.attribute(error, "pod_name")
    return f"pod {pod} ({name})" if type(name) is str and name else f"pod {pod}"


def _short(error: Exception) -> str:
    return introspection.summary(error).partition("\n")[0]


#: The outcome of a pod that the service does not have any more.
_LEFT = Done(None)


def _has_left(step: Done | Yielded) -> bool:
    return isinstance(step, Done) and isinstance(step.error, PodLeftError)


class _Broadcast:
    """The calls of one broadcast; a pod that runs a generator has an iterator in the list."""

    def __init__(
        self, invocation: Invocation, wake: Callable[[], object], iterators: Iterators
    ) -> None:
        self.calls = CallSet(wake)
        self._invocation = invocation
        # How the call of each pod ended, in pod order.
        self._outcomes: dict[Call, Done | None] = {Call(part): None for part in invocation.spread()}
        self._iterators = iterators
        self._generators: list[RemoteIterator | RemoteAsyncIterator] = []
        # The calls that begin once the first one has.
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

    def take(self) -> Done | None:
        for call, step in self.calls.take():
            if _has_left(step) and len(self._outcomes) > 1:
                del self._outcomes[call]
                continue
            done = self._outcomes[call] = self._outcome(call, step)
            if done.error is not None:
                for other in self._following:
                    self._outcomes[other] = Done(None, CallCancelledError(RECALLED))
                self._following = []
                for other in self._outcomes:
                    if other.is_started and not other.is_over and not other.is_recalled:
                        self.calls.recall(other, RECALLED)
        is_first_over = self._outcomes.get(self._first, _LEFT) is not None
        if self._first.invocation.has_begun or is_first_over:
            self._start_following()
        outcomes = [one for one in self._outcomes.values() if one is not None]
        if len(outcomes) < len(self._outcomes):
            return None
        whole = combine(outcomes)
        if whole.error is not None:
            self._close_generators()
            return whole
        return Done(self._invocation.shape([one.value for one in outcomes]))

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
    """Call all pods; returns the end of the whole."""
    wakeup = ThreadWakeup((invocation.target.name, invocation.target.service))
    broadcast = _Broadcast(invocation, wakeup.set, RemoteIterator)
    try:
        broadcast.start()
        while (done := broadcast.take()) is None:
            wakeup.wait(broadcast.calls.left)
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
        while (done := broadcast.take()) is None:
            await wakeup.wait(broadcast.calls.left)
    except BaseException:
        broadcast.cancel()
        raise
    return done


def iterate(invocation: Invocation) -> Any:  # noqa: ANN401  # as `Invocation.shape`
    """Start a generator on every pod; its iterators, in pod order."""
    started: list[RemoteIterator] = []
    left: PodLeftError | None = None
    try:
        for part in invocation.spread():
            call = Call(part)
            try:
                call.open()
            except PodLeftError as error:
                left = error
                continue
            is_first = part.collective and not started
            started.append(RemoteIterator(call, call.wait_until_begun() if is_first else None))
    except BaseException:
        for generator in started:
            generator.close()
        raise
    if left is not None and not started:
        raise left
    return invocation.shape(started)


class AsyncIterators(list[RemoteAsyncIterator]):
    """A generator on every pod: its iterators, in pod order. Awaiting it gives the list itself."""

    def __await__(self) -> Generator[Any, None, AsyncIterators]:
        yield from ()
        return self


def iterate_async(invocation: Invocation) -> AsyncIterators:
    """A generator on every pod; each starts with its iteration."""
    return AsyncIterators(RemoteAsyncIterator(Call(part)) for part in invocation.spread())
