"""The event loops of threads that run calls: each thread is a main thread to `asyncio`.

`asyncio.get_event_loop()` makes a loop in a main thread that never had one, up to Python 3.13, and
raises in all other threads. Calls run in threads of a pool, so each call gets what its code gets
on the user's machine: the loop of its thread, or a new one.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

from kubetorch.pod.user_process.current_call import current

#: True where `asyncio.get_event_loop()` makes a loop in a main thread.
MAKES_LOOPS = sys.version_info < (3, 14)


class _Thread(threading.local):
    is_of_calls = False
    #: The call that has set this thread's loop, to a loop or to `None`.
    setter: object = None


_thread = _Thread()


def enter_thread() -> None:
    """Run calls in this thread from now on."""
    _thread.is_of_calls = True


def install() -> None:
    """Have all policies, also the user's own, make loops in threads of calls."""
    if not MAKES_LOOPS:
        return
    policy: Any = asyncio.events.BaseDefaultEventLoopPolicy
    get, put = policy.get_event_loop, policy.set_event_loop

    def get_event_loop(self: Any) -> asyncio.AbstractEventLoop:  # noqa: ANN401  # of any policy
        if _thread.is_of_calls and _thread.setter is not current.get():
            loop = self._local._loop
            if loop is None or loop.is_closed():
                self.set_event_loop(self.new_event_loop())
        return get(self)  # type: ignore[no-any-return]

    def set_event_loop(self: Any, loop: asyncio.AbstractEventLoop | None) -> None:  # noqa: ANN401
        _thread.setter = current.get()
        put(self, loop)

    policy.get_event_loop, policy.set_event_loop = get_event_loop, set_event_loop
