"""Calls that go on without the program that made them: `caller.spawn(...)` and its handle."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

from kubetorch.errors import (
    CallCancelledError,
    ResultExpiredError,
    ServiceNotFoundError,
    SpecError,
)
from kubetorch.sdk.calls.following import Following, Search
from kubetorch.sdk.calls.invocation import Invocation
from kubetorch.sdk.calls.target import local_modules
from kubetorch.wire import calls

if TYPE_CHECKING:
    from kubetorch.sdk.session import Session

#: Seconds that asking for a call may take, however little time there is: else it is never found.
_ASKING = 2.0
#: Characters that are shown of what is no id.
_SHOWN = 80


class CallHandle:
    """A spawned call: wait for it, cancel it, find it again.

    A handle can be pickled, and made anew from its `id` in any process of the same user. The result
    is kept for a while after the call has ended (see `docs/design/calls.md`). Lines that the call
    prints are shown while somebody waits for it.

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
        self._session = _session if session is None else lambda: session
        self._following = Following(call_id, self._session)

    @classmethod
    def from_id(cls, call_id: str) -> CallHandle:
        """The handle of a call that was spawned here or elsewhere.

        Raises:
            SpecError: This cannot be the identity of a call.
        """
        from kubetorch.sdk.calls import handles_broadcast  # noqa: PLC0415  # it imports this module

        given: object = call_id
        if isinstance(given, str) and handles_broadcast.SEPARATOR in given:
            return handles_broadcast.BroadcastHandle(call_id)
        return cls(call_id)

    @classmethod
    def list(cls, namespace: str | None = None, service: str | None = None) -> list[CallHandle]:
        """The spawned calls that the controller knows, of one namespace, of one service.

        Args:
            namespace: Only those of this namespace.
            service: Only those of this service.
        """
        views = _session().ask(lambda controller: controller.list_calls(namespace, service))
        return [cls(view.id, view.callable) for view in views]

    @property
    def id(self) -> str:
        """Identity of the call."""
        return self._following.call_id

    def __repr__(self) -> str:
        return f"CallHandle({self.id!r}{f', {self._name!r}' if self._name else ''})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallHandle) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __reduce__(self) -> tuple[Any, ...]:
        return CallHandle, (self.id, self._name)

    # ------------------------------------------------------------------------------ its result

    def get(self, timeout: float | None = None) -> Any:  # noqa: ANN401  # the user's own value
        """What the call returns, waiting for it.

        Args:
            timeout: Seconds after which to stop waiting; the call goes on.

        Raises:
            TimeoutError: The call has not ended by then.
            ResultExpiredError: The call is unknown, or its result is not kept any more.
            Exception: What the call raised.
        """
        if not self.wait(timeout):
            raise self._still_running(timeout)
        return self._value()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of the call; whether it has ended.

        Args:
            timeout: Seconds after which to stop waiting; the call goes on.

        Raises:
            ResultExpiredError: The call is unknown, or its result is not kept any more.
        """
        following = self._following
        begun = time.monotonic()
        awake = threading.Event()
        search: Search | None = None
        following.add_waker(awake.set)
        try:
            while True:
                awake.clear()
                following.work()
                if following.outcome is not None:
                    break
                if search is not None and search.error is not None:
                    raise search.error
                if following.is_lost:
                    search = following.search()
                left = _left(timeout, time.monotonic() - begun, search)
                if left is not None and left <= 0:
                    return following.outcome is not None
                awake.wait(left)
        finally:
            following.remove_waker(awake.set)
        return True

    async def get_async(self, timeout: float | None = None) -> Any:  # noqa: ANN401  # as `get`
        """What the call returns, waiting for it.

        Args:
            timeout: Seconds after which to stop waiting; the call goes on.

        Raises:
            TimeoutError: The call has not ended by then.
            ResultExpiredError: The call is unknown, or its result is not kept any more.
            Exception: What the call raised.
        """
        if not await self.wait_async(timeout):
            raise self._still_running(timeout)
        return self._value()

    async def wait_async(self, timeout: float | None = None) -> bool:
        """Wait for the end of the call; whether it has ended.

        Args:
            timeout: Seconds after which to stop waiting; the call goes on.

        Raises:
            ResultExpiredError: The call is unknown, or its result is not kept any more.
        """
        import asyncio  # noqa: PLC0415  # a blocking program does not need it

        following = self._following
        loop = asyncio.get_running_loop()
        begun = loop.time()
        awake = asyncio.Event()

        def waker() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(awake.set)

        search: Search | None = None
        following.add_waker(waker)
        try:
            while True:
                awake.clear()
                following.work()
                if following.outcome is not None:
                    break
                if search is not None and search.error is not None:
                    raise search.error
                if following.is_lost:
                    search = following.search()
                left = _left(timeout, loop.time() - begun, search)
                try:
                    await asyncio.wait_for(awake.wait(), left)
                except (TimeoutError, asyncio.TimeoutError):
                    return following.outcome is not None
        finally:
            following.remove_waker(waker)
        return True

    def result(self, timeout: float | None = None) -> Any:  # noqa: ANN401  # as `get`
        """The same as `get`, under the name that futures give it."""
        return self.get(timeout)

    def __await__(self) -> Generator[Any, None, Any]:
        return self.get_async().__await__()

    def _still_running(self, timeout: float | None) -> TimeoutError:
        return TimeoutError(f"call {self.id} has not ended within {timeout:g} s; it goes on")

    def _value(self) -> Any:  # noqa: ANN401  # the user's own value
        outcome = self._following.outcome
        assert outcome is not None
        is_plain = isinstance(outcome, calls.Returned) and outcome.codec != "pickle"
        if self._modules is None and not is_plain:
            self._modules = self._find_modules()
        return calls.value_of(outcome, modules=self._modules)

    def _find_modules(self) -> Mapping[str, str]:
        """The modules of the workload that have another name here, if it still exists."""
        try:
            view = self._following.view()
            workload = self._session().ask(
                lambda controller: controller.get_workload(view.namespace, view.workload)
            )
        except (ServiceNotFoundError, ResultExpiredError):
            return {}
        return local_modules(workload.spec.callable)

    # --------------------------------------------------------------------------------- its life

    def cancel(self) -> None:
        """Have the call end, if it still runs; `get` then raises `CallCancelledError`."""
        self._following.cancel()

    def status(self) -> str:
        """`running`, `succeeded`, `failed` or `cancelled`.

        Raises:
            ResultExpiredError: The call is unknown, or forgotten.
        """
        following = self._following
        following.work()
        outcome = following.outcome
        if isinstance(outcome, calls.Returned):
            return "succeeded"
        if isinstance(outcome, calls.Raised):
            is_cancelled = outcome.failure.code == CallCancelledError.code
            return "cancelled" if is_cancelled else "failed"
        is_elsewhere = following.is_lost and not following.is_to_be_sent
        return following.view().state if is_elsewhere else "running"

    def done(self) -> bool:
        """Whether the call has ended."""
        return self._following.outcome is not None or self.status() != "running"


def _check_id(call_id: object) -> None:
    if not isinstance(call_id, str) or not calls.CALL_ID.fullmatch(call_id):
        text = repr(call_id)
        raise SpecError(
            f"{text if len(text) <= _SHOWN else f'{text[:_SHOWN]}…'} is not the id of a call",
            hint="an id is the text that handle.id gives, such as 32 hexadecimal digits",
        )


def _left(timeout: float | None, waited: float, search: Search | None) -> float | None:
    """Seconds to go on waiting, if there is an end to it; none are left when it is not positive."""
    if timeout is None:
        return None
    is_asked = search is not None and not search.is_over
    return (max(timeout, _ASKING) if is_asked else timeout) - waited


def spawn(invocation: Invocation) -> CallHandle:
    """Open a detached call; returns when its arguments are on their way.

    Raises:
        KubetorchError: No pod can be reached.
    """
    if invocation.target.broadcast is not None:
        from kubetorch.sdk.calls import handles_broadcast  # noqa: PLC0415  # it imports this module

        return handles_broadcast.spawn(invocation)
    return spawn_one(invocation)


def spawn_one(invocation: Invocation) -> CallHandle:
    """As `spawn`, of a call on one pod."""
    target = invocation.target
    session = invocation.route.session
    handle = CallHandle(invocation.id, target.name, target.modules, session)
    following = handle._following
    awake = threading.Event()
    search: Search | None = None
    following.add_waker(awake.set)
    try:
        following.start(invocation)
        while not following.is_sent and following.outcome is None:
            if search is not None and search.error is not None:
                raise search.error
            if following.is_lost and not following.is_to_be_sent:
                break  # it was written: the controller knows more
            if following.is_lost:
                search = following.search()
            awake.wait()
            awake.clear()
            following.work()
    finally:
        following.remove_waker(awake.set)
    return handle


def _session() -> Session:
    from kubetorch.sdk import services  # noqa: PLC0415  # it imports this module

    return services.session()
