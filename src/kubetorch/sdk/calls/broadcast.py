"""A call on every pod of a service, for a thread: a list of what they return, in pod order."""

from __future__ import annotations

from typing import Any

from kubetorch.sdk.calls.attempts import Attempts
from kubetorch.sdk.calls.driver import Driver, Running
from kubetorch.sdk.calls.generators import RemoteIterator
from kubetorch.sdk.calls.group import Group
from kubetorch.sdk.calls.invocation import Done, Invocation, Yielded


def call(invocation: Invocation) -> Done:
    """Make the call; a pod that runs a generator has an iterator in the list.

    Raises:
        KubetorchError: A pod cannot be reached.
    """
    group = Group(0, [Running(part) for part in invocation.spread()])
    driver = Driver()
    generators: list[RemoteIterator] = []
    try:
        for running in group.parts:
            driver.start(running)
        done: Done | None = None
        while done is None:
            for running, step in driver.wait():
                if isinstance(step, Yielded) or (step.is_streamed and step.error is None):
                    running.release()
                    generators.append(RemoteIterator(running, step))
                    step = Done(generators[-1])
                done = group.complete(running, step) or done
    except BaseException:
        driver.cancel()
        _close(generators)
        raise
    if done.error is not None:
        _close(generators)
    return done


def iterate(invocation: Invocation) -> list[Any]:
    """Start a generator on every pod; its iterators, in pod order.

    Raises:
        KubetorchError: A pod cannot be reached.
    """
    started: list[RemoteIterator] = []
    try:
        for part in invocation.spread():
            attempts = Attempts(part)
            attempts.start()
            started.append(RemoteIterator(attempts))
    except BaseException:
        _close(started)
        raise
    return started


def _close(generators: list[RemoteIterator]) -> None:
    for generator in generators:
        generator.close()
