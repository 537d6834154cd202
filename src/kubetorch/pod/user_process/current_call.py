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
        """Tell the caller how far the call has come."""

    def waiting(
        self, wake: Callable[[], object], awaited: tuple[str, str]
    ) -> AbstractContextManager[None]:
        """While a thread waits for another call: when this one is cancelled, wake it, raise why."""


#: Whether this process is a worker; `run` of the module `process` says so.
is_worker = False

#: The call that runs in this context; `None` outside of calls, and in threads that user code
#: started without copying the context.
current: ContextVar[CurrentCall | None] = ContextVar("kubetorch_call", default=None)


def request_id() -> str | None:
    """Identity of the request that the running call belongs to."""
    call = current.get()
    return None if call is None else call.request_id


def chain() -> str:
    """The running call and those that wait for it, for the calls that it makes.

    Of code outside of the context of a call it is not known: the call may wait for it.
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
        self._found: dict[int, list[_Registered]] = {}

    def add(self, callback: Callable[[], Any]) -> None:
        """Run the callback before the pod ends."""
        call = current.get()
        with self._lock:
            known = self._found.setdefault(0 if call is None else call.number, [])
            if not any(_is_same(callback, other) for other, _ in known):
                known.append((callback, contextvars.copy_context()))

    def forget(self, call: int) -> None:
        if call in self._found:
            with self._lock:
                del self._found[call]

    def run(self, on_end: Callable[[], None]) -> None:
        """Run them all in another thread, then `on_end`."""
        with self._lock:
            found = [one for known in self._found.values() for one in known]
        if not found:
            on_end()
            return
        args = (found, on_end)
        threading.Thread(target=_run, args=args, name="kubetorch-preempt", daemon=True).start()


def _is_same(callback: object, other: object) -> bool:
    """True for one object, and for one method of one object; no `__eq__` of the user is asked."""
    if type(callback) is MethodType and type(other) is MethodType:
        return callback.__func__ is other.__func__ and callback.__self__ is other.__self__
    return callback is other


def _run(found: list[_Registered], on_end: Callable[[], None]) -> None:
    for callback, context in found:
        try:
            context.run(callback)
        except BaseException:  # noqa: BLE001  # the others are to run, whatever this one does
            traceback.print_exc()
    on_end()


#: Those of this process.
callbacks = Callbacks()
