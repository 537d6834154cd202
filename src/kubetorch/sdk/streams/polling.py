"""Waiting for bytes: awake for a moment, where answers come that fast, and asleep otherwise."""

from __future__ import annotations

import functools
import os
import select
import socket
import threading
from time import perf_counter
from typing import Final

from kubetorch.lib import processors

#: Seconds for which to stay awake.
AWAKE: Final = 0.0004
#: Most waits in a row that sleep at once.
MOST_ASLEEP: Final = 1023


class Experience:
    """Whether staying awake is worth it, judged by how it went so far.

    Each time that it was in vain doubles how many waits then sleep at once, each time that it was
    not halves it. So what takes long costs next to nothing, and so does a machine that is too busy.
    """

    def __init__(self) -> None:
        self._penalty = 0
        self._asleep = 0

    def is_favourable(self) -> bool:
        """Whether to try it at this wait; to be asked once at each."""
        if not self._asleep:
            return True
        self._asleep -= 1
        return False

    def learn(self, *, was_in_vain: bool) -> None:
        """Say how it went."""
        if was_in_vain:
            self._penalty = min(2 * self._penalty + 1, MOST_ASLEEP)
            self._asleep = self._penalty
        else:
            self._penalty >>= 1


class Poller:
    """Waits until a socket can be read.

    A small call to a pod near by takes hardly longer than the kernel takes to wake all that it goes
    through: tens of µs each, more on a core that is idle. A caller that stays awake need not be
    woken, and keeps its core from idling. Others that want the core go first (`sched_yield`). Of a
    program's threads one at a time stays awake, since they share the interpreter's lock.

    Args:
        connection: The socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._experience = Experience()

    def wait(self, timeout: float, *, may_stay_awake: bool) -> bool:
        """Whether there is something to read within `timeout` seconds.

        Args:
            timeout: Seconds.
            may_stay_awake: What is waited for may be there at once.
        """
        is_tried = may_stay_awake and _has_room() and self._experience.is_favourable()
        if is_tried and _turn.acquire(blocking=False):
            try:
                has_come = self._stay_awake(timeout)
            finally:
                _turn.release()
            self._experience.learn(was_in_vain=not has_come)
            if has_come:
                return True
        return bool(self._poll.poll(timeout * 1000))

    def _stay_awake(self, timeout: float) -> bool:
        end = perf_counter() + min(AWAKE, timeout)
        while not self._poll.poll(0):
            if perf_counter() >= end:
                return False
            os.sched_yield()
        return True


@functools.cache
def _has_room() -> bool:
    """Whether whoever answers can run at the same time, and has a share of the time left."""
    return len(processors.usable()) > 1 and processors.quota() >= 1


#: Held by the thread that stays awake. A child that is forked meanwhile does without.
_turn = threading.Lock()
