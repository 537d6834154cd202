"""Which results of a `map` are due."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubetorch.sdk.calls.attempts import Done
from kubetorch.sdk.calls.map import MapOptions, Results


@given(st.permutations(range(12)), st.integers(1, 12))
def test_ordered_results_come_in_order_however_calls_end(order: list[int], window: int) -> None:
    results = Results(MapOptions(window=window))
    waiting = list(order)
    running: list[int] = []
    taken: list[int] = []
    admitted = 0
    while len(taken) < 12:
        while results.has_room and admitted < 12:
            assert results.admit() == admitted
            running.append(admitted)
            admitted += 1
        assert len(running) <= window
        number = next(number for number in waiting if number in running)
        waiting.remove(number)
        running.remove(number)
        results.complete(number, Done(number))
        taken += results.take_due()
    assert taken == list(range(12))
    assert results.is_empty


@given(st.permutations(range(12)))
def test_unordered_results_come_as_calls_end(order: list[int]) -> None:
    results = Results(MapOptions(ordered=False, window=12))
    for _ in order:
        results.admit()
    taken = []
    for number in order:
        results.complete(number, Done(number))
        taken += results.take_due()
    assert taken == list(order)


def test_a_result_that_waits_takes_room() -> None:
    results = Results(MapOptions(window=2))
    results.admit()
    results.admit()
    results.complete(1, Done("later"))
    assert list(results.take_due()) == []
    assert not results.has_room
    results.complete(0, Done("first"))
    assert list(results.take_due()) == ["first", "later"]
    assert results.has_room


def test_an_error_is_raised_in_its_place_or_returned() -> None:
    error = ValueError("bad")
    for return_exceptions in (False, True):
        results = Results(MapOptions(return_exceptions=return_exceptions))
        for number in range(3):
            results.admit()
            results.complete(number, Done(number, error if number == 1 else None))
        if return_exceptions:
            assert list(results.take_due()) == [0, error, 2]
        else:
            due = results.take_due()
            assert next(due) == 0
            with pytest.raises(ValueError, match="bad"):
                next(due)
