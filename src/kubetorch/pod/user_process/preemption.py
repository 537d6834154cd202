"""What user code wants to be done before its pod ends; the SDK finds this module as `current_call`.

Callbacks run one after the other in a thread of their own, so neither the event loop nor a call has
to give way for them. Each runs in the context that it was registered in: what it prints belongs to
the call that registered it.
"""

from __future__ import annotations

import contextvars
import threading
import traceback
from collections.abc import Callable
from typing import Any

from kubetorch.pod.user_process.current_call import current

_Registered = tuple[Callable[[], Any], contextvars.Context]


class Callbacks:
    """The callbacks of this process, by the call that they belong to; 0 is none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[int, list[_Registered]] = {}

    def add(self, callback: Callable[[], Any]) -> None:
        """Have it run before the pod ends."""
        call = current.get()
        with self._lock:
            known = self._found.setdefault(0 if call is None else call.number, [])
            if all(callback != other for other, _ in known):
                known.append((callback, contextvars.copy_context()))

    def forget(self, call: int) -> None:
        """A call has ended."""
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


def _run(found: list[_Registered], on_end: Callable[[], None]) -> None:
    for callback, context in found:
        try:
            context.run(callback)
        except BaseException:  # noqa: BLE001  # the others are to run, whatever this one does
            traceback.print_exc()
    on_end()


#: Those of this process.
callbacks = Callbacks()
