"""A thread that runs comes to a function of traces that another thread has set it."""

from __future__ import annotations

import itertools
import sys
import threading
import time

import pytest

from kubetorch.pod.user_process import foreign_traces

pytestmark = pytest.mark.skipif(
    not foreign_traces.IS_POSSIBLE, reason="Python from 3.12 on has sys.monitoring"
)
DEADLINE = 60.0


@pytest.fixture
def spinning():
    """Starts threads that count, until the end of the test."""
    is_over = threading.Event()
    threads = []

    def count(errors, is_caught):
        try:
            for _ in itertools.count():
                if is_over.is_set():
                    break
        except LookupError as error:
            errors.append(error)
            is_caught.set()

    def start(errors=None, is_caught=None):
        threads.append(threading.Thread(target=count, args=(errors, is_caught), daemon=True))
        threads[-1].start()
        return threads[-1].ident

    yield start
    is_over.set()
    for thread in threads:
        thread.join(DEADLINE)


def set_trace(thread, function):
    deadline = time.monotonic() + DEADLINE
    while not foreign_traces.set_trace(thread, function):
        assert time.monotonic() < deadline


def test_one_thread_of_many_is_traced_again_and_again(spinning):
    threads = [spinning() for _ in range(6)]
    for turn in range(18):
        seen, is_traced = set(), threading.Event()

        def trace(*_, seen=seen, is_traced=is_traced):
            seen.add(threading.get_ident())
            sys.settrace(None)
            is_traced.set()

        set_trace(threads[turn % 6], trace)
        assert is_traced.wait(DEADLINE)
        assert seen == {threads[turn % 6]}


def test_a_thread_that_sleeps_between_its_lines_is_traced(spinning):
    is_over, is_traced = threading.Event(), threading.Event()

    def sleep():
        while not is_over.wait(0.01):
            pass

    def trace(*_):
        sys.settrace(None)
        is_traced.set()

    thread = threading.Thread(target=sleep)
    thread.start()
    set_trace(thread.ident, trace)
    assert is_traced.wait(DEADLINE)
    is_over.set()
    thread.join(DEADLINE)


def test_a_thread_that_has_ended_is_not_traced():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert not foreign_traces.set_trace(thread.ident, print)


def test_an_error_in_the_function_arrives_in_the_thread(spinning):
    errors, is_caught = [], threading.Event()
    thread = spinning(errors, is_caught)

    def trace(*_):
        sys.settrace(None)
        raise LookupError

    set_trace(thread, trace)
    assert is_caught.wait(DEADLINE)
    assert len(errors) == 1
