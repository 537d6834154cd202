"""An event loop in a thread of its own, for connections that outlive the code that asks for them.

A forked child finds none: what it asks for begins a loop of its own. The parent's is kept there,
untouched, for its end would reach the sockets that both have.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")
#: Seconds that the thread has to begin, and connections to end.
_TIMEOUT = 2.0
#: Rounds of the loop in which connections inside TLS are gone.
_ROUNDS = 5
#: Loops of parents.
_inherited: list[object] = []


class Background:
    """A loop that begins when it is needed. Threads share it.

    Args:
        finish: Run in the loop before it ends, to close what belongs to it.
    """

    def __init__(self, finish: Callable[[], Awaitable[None]]) -> None:
        self._finish = finish
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _abandon(reference))
        atexit.register(_close, reference)

    def submit(self, wanted: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Begin to run a coroutine in the loop."""
        return asyncio.run_coroutine_threadsafe(wanted, self._running())

    def run(self, wanted: Coroutine[Any, Any, _T], timeout: float | None) -> _T:
        """Run a coroutine in the loop, and wait for it.

        Raises:
            TimeoutError: It took longer; it is cancelled.
        """
        future = self.submit(wanted)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError as error:
            if future.done() and not future.cancelled():
                raise  # its own
            raise TimeoutError(f"nothing came of it within {timeout:g} s") from error
        finally:
            future.cancel()

    def close(self) -> None:
        """End the loop, and every connection with it."""
        with self._lock:
            loop, self._loop = self._loop, None
            thread, self._thread = self._thread, None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(_TIMEOUT)

    def abandon(self) -> None:
        """Let go of everything, in a forked child."""
        _inherited.append((self._loop, self._thread))
        self._lock = threading.Lock()
        self._loop = self._thread = None

    def _running(self) -> asyncio.AbstractEventLoop:
        loop = self._loop
        if loop is not None:
            return loop
        with self._lock:
            if self._loop is None:
                begun = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run, args=(begun, self._finish), name="kubetorch-reach", daemon=True
                )
                self._thread.start()
                self._loop = begun
            return self._loop


def _run(loop: asyncio.AbstractEventLoop, finish: Callable[[], Awaitable[None]]) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.run_until_complete(_end_all(finish))
    loop.close()


async def _end_all(finish: Callable[[], Awaitable[None]]) -> None:
    """Cancel what still runs, and let connections that are closed be gone."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await finish()
    for _ in range(_ROUNDS):
        await asyncio.sleep(0)


def _close(reference: weakref.ref[Background]) -> None:
    found = reference()
    if found is not None:
        found.close()


def _abandon(reference: weakref.ref[Background]) -> None:
    found = reference()
    if found is not None:
        found.abandon()
