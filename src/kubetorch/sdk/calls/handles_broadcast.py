"""A spawned call on every pod of a service: one handle for all of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kubetorch.errors import KubetorchError
from kubetorch.sdk.calls.group import combine
from kubetorch.sdk.calls.handles import CallHandle, spawn_one
from kubetorch.sdk.calls.invocation import Done, Invocation

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
        self.calls = [CallHandle(one, name, modules) for one in call_id.split(SEPARATOR)]

    @property
    def id(self) -> str:
        """Identities of the calls, joined."""
        return SEPARATOR.join(call.id for call in self.calls)

    def __reduce__(self) -> tuple[Any, ...]:
        return BroadcastHandle, (self.id, self._name)

    def get(self, timeout: float | None = None) -> Any:  # noqa: ANN401  # the user's own values
        """What the calls return, waiting for all of them.

        Args:
            timeout: Seconds after which to stop waiting; the calls go on.

        Raises:
            TimeoutError: Not all have ended by then.
            ResultExpiredError: A call is unknown, or its result is not kept any more.
            Exception: What a call raised; the first in pod order.
        """
        if not self.wait(timeout):
            raise self._still_running(timeout)
        return self._gathered()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of all calls; whether they have ended.

        Args:
            timeout: Seconds after which to stop waiting; the calls go on.

        Raises:
            ResultExpiredError: A call is unknown, or its result is not kept any more.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        return all(call.wait(_left(deadline)) for call in self.calls)

    async def get_async(self, timeout: float | None = None) -> Any:  # noqa: ANN401  # as `get`
        """What the calls return, waiting for all of them.

        Args:
            timeout: Seconds after which to stop waiting; the calls go on.

        Raises:
            TimeoutError: Not all have ended by then.
            ResultExpiredError: A call is unknown, or its result is not kept any more.
            Exception: What a call raised; the first in pod order.
        """
        if not await self.wait_async(timeout):
            raise self._still_running(timeout)
        return self._gathered()

    async def wait_async(self, timeout: float | None = None) -> bool:
        """Wait for the end of all calls; whether they have ended.

        Args:
            timeout: Seconds after which to stop waiting; the calls go on.

        Raises:
            ResultExpiredError: A call is unknown, or its result is not kept any more.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for call in self.calls:
            if not await call.wait_async(_left(deadline)):
                return False
        return True

    def _gathered(self) -> Any:  # noqa: ANN401  # as `get`
        outcomes = []
        for call in self.calls:
            try:
                outcomes.append(Done(call.get()))
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
        """`running` while one of them runs; else `failed`, `cancelled` or `succeeded`.

        Raises:
            ResultExpiredError: A call is unknown, or forgotten.
        """
        found = {call.status() for call in self.calls}
        states = ("running", "failed", "cancelled", "succeeded")
        return next(state for state in states if state in found)

    def done(self) -> bool:
        """Whether all calls have ended."""
        return all(call.done() for call in self.calls)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)


def spawn(invocation: Invocation) -> BroadcastHandle:
    """Open a detached call on every pod; returns when the arguments are on their way.

    Raises:
        KubetorchError: A pod cannot be reached; no call goes on then.
    """
    started: list[CallHandle] = []
    try:
        for part in invocation.spread():
            started.append(spawn_one(part))
    except KubetorchError:
        for call in started:
            call.cancel()
        raise
    target = invocation.target
    identity = SEPARATOR.join(call.id for call in started)
    handle = BroadcastHandle(identity, target.name, target.modules)
    # They have the streams that the calls were opened on.
    handle.calls = started
    return handle
