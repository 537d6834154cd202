from __future__ import annotations

import itertools
import threading

import pytest

from benchmarks.programs import driving


class BrokenError(Exception):
    pass


def test_calls_of_all_threads_are_counted() -> None:
    assert driving.threads(lambda: lambda: None, callers=4, seconds=0.01) > 0


@pytest.mark.parametrize("working", [0, 1, 3])
def test_a_call_that_fails_in_one_of_many_threads_is_raised(working: int) -> None:
    """At its first call, before all begin together, or later."""
    callers = itertools.count()

    def make_call() -> driving.Call:
        calls, is_broken = itertools.count(), next(callers) == 2

        def call() -> None:
            if is_broken and next(calls) >= working:
                raise BrokenError

        return call

    before = set(threading.enumerate())
    with pytest.raises(BrokenError):
        driving.threads(make_call, callers=4, seconds=0.2)
    assert set(threading.enumerate()) <= before
