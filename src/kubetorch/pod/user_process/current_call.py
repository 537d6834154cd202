"""The call that runs here, and the callbacks that run before the pod ends.

The SDK finds this module with `sys.modules.get("kubetorch.pod.user_process.current_call")`, so that
a program that is no worker does not import it.
"""

from __future__ import annotations

import contextvars
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import MethodType
from typing import Any, Protocol

from kubetorch.specs.callable import UNKNOWN_CHAIN


class CurrentCall(Protocol):
    number: int
    request_id: str
    chain: str

    def progress(self, current: float, total: float | None, message: str | None) -> None:
        """Report the progress of the call to its caller."""

    @property
    def is_interrupted(self) -> bool:
        """True once it is cancelled: what it begins from then on is a clean-up."""

    def waiting(
        self, wake: Callable[[], object], awaited: tuple[str, str], *, is_cleanup: bool | None
    ) -> AbstractContextManager[None]:
        """While a thread waits for another call: if this call is cancelled, wake it and raise."""


#: True in a worker; `run` of the module `process` sets it.
is_worker = False

#: The call that runs in this context; `None` outside of calls, and in threads that user code
#: started without copying the context.
current: ContextVar[CurrentCall | None] = ContextVar("kubetorch_call", default=None)


#: The calls that this worker runs, by number.
running_calls: dict[int, Any] = {}

#: The sessions of debuggers in this process, by thread and number of the call.
debug_sessions: dict[tuple[int, int], Any] = {}


def request_id() -> str | None:
    """Identity of the request that the running call belongs to."""
    call = current.get()
    return None if call is None else call.request_id


def chain() -> str:
    """The running call and those that wait for it, for the calls that it makes.

    Outside of the context of a call the chain is not known: a call may wait for that code.
    """
    call = current.get()
    return UNKNOWN_CHAIN if call is None else call.chain


def progress(current_value: float, total: float | None = None, message: str | None = None) -> bool:
    """Report the progress of the running call; false when no call runs here."""
    call = current.get()
    if call is None:
        return False
    call.progress(current_value, total, message)
    return True


_Registered = tuple[Callable[[], Any], contextvars.Context]


class Callbacks:
    """The callbacks of this process, by the number of the call that registered them, or 0.

    Callbacks run one after the other in a thread of their own, so that the event loop and calls go
    on. Each runs in the context that it was registered in: its output belongs to that call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_call: dict[int, list[_Registered]] = {}

    def add(self, callback: Callable[[], Any]) -> None:
        """Run the callback before the pod ends."""
        call = current.get()
        with self._lock:
            registered = self._by_call.setdefault(0 if call is None else call.number, [])
            if not any(
                _is_same(callback, registered_callback) for registered_callback, _ in registered
            ):
                registered.append((callback, contextvars.copy_context()))

    def forget(self, call: int) -> None:
        if call in self._by_call:
            with self._lock:
                del self._by_call[call]

    def run(self, on_end: Callable[[], None]) -> None:
        """Run them all in another thread, then `on_end`."""
        with self._lock:
            registered = [
                registration
                for registered_in_call in self._by_call.values()
                for registration in registered_in_call
            ]
        if not registered:
            on_end()
            return
        args = (registered, on_end)
        threading.Thread(target=_run, args=args, name="kubetorch-preempt", daemon=True).start()


def _is_same(callback: object, registered_callback: object) -> bool:
    """True for one object, and for one method of one object; no `__eq__` of the user is called."""
    if type(callback) is MethodType and type(registered_callback) is MethodType:
        return (
            callback.__func__ is registered_callback.__func__
            and callback.__self__ is registered_callback.__self__
        )
    return callback is registered_callback


def _run(registered: list[_Registered], on_end: Callable[[], None]) -> None:
    for callback, context in registered:
        try:
            context.run(callback)
        except BaseException:  # noqa: BLE001  # the other callbacks must run all the same
            traceback.print_exc()
    on_end()


#: The callbacks of this process.
callbacks = Callbacks()
