"""The step of load that services are measured with: one caller, who becomes all of them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from benchmarks.programs import driving

#: Seconds after which something does not happen any more.
DEADLINE = 120.0
CALLERS, CALL_SECONDS, CONCURRENCY, PODS = 200, 0.2, 4, 8
#: The callers go on for so long with all pods.
STEADY_SECONDS = 0.5

#: Calls with a number and the seconds that the call takes; returns the number.
Call = Callable[[int, float], int]


def step(make_call: Callable[[], Call], wait_for_pods: Callable[[], None]) -> tuple[float, int]:
    """Seconds from the step of load until all pods are ready, and how many calls there were.

    Every call has to end once, with its own result. Each caller has a call of its own, which
    `make_call` gives it.
    """
    numbers = itertools.count()
    is_over = threading.Event()
    begin = threading.Barrier(CALLERS)

    def call_once(call: Call) -> int:
        number = next(numbers)
        assert call(number, CALL_SECONDS) == number, "another call's result"
        return number

    def go_on() -> int:
        call = make_call()
        begin.wait(DEADLINE)
        count = 0
        while not is_over.is_set():
            call_once(call)
            count += 1
        return count

    call_once(make_call())
    with ThreadPoolExecutor(CALLERS) as pool:
        try:
            callers = [pool.submit(go_on) for _ in range(CALLERS)]
            seconds = driving.clock(wait_for_pods)
            is_over.wait(STEADY_SECONDS)
        finally:
            is_over.set()
    ended = 1 + sum(caller.result() for caller in callers)
    assert ended == next(numbers), "a call has not ended"
    return seconds, ended
