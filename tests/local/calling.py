"""What tests of calls share: routes and callers of a fake agent, calls in other threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kubetorch.sdk.calls.attempts import Target
from kubetorch.sdk.calls.caller import Caller
from kubetorch.sdk.calls.options import CallOptions
from kubetorch.sdk.calls.route import Resolver, Route
from kubetorch.specs.logging import LoggingConfig
from tests.local.scripted_agent import ScriptedAgent

#: Timeouts of calls: the first one suffices on an idle machine.
TIMEOUTS = (1.5, 6.0, 60.0)


@contextmanager
def route_to(resolve: Resolver, *, ping_after: float = 10.0) -> Iterator[Route]:
    route = Route("service", resolve, ping_after=ping_after)
    try:
        yield route
    finally:
        route.close()


def target(name: str) -> Target:
    return Target("default", "service", name, logging=LoggingConfig(level="info"))


def caller(route: Route, name: str, **options: Any) -> Caller:
    return Caller(target(name), route, CallOptions(**options))


@contextmanager
def cuts(agent: ScriptedAgent) -> Iterator[None]:
    """Cut the agent's connections again and again, ever later: a busy machine gets on, too."""
    is_over = threading.Event()

    def cut() -> None:
        pause = 0.02
        while not is_over.wait(pause):
            agent.cut()
            pause *= 1.02

    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        yield
    finally:
        is_over.set()
        cutter.join()


class InThread:
    """A call that another thread makes."""

    def __init__(self, caller: Callable[..., object], *args: object) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(caller, args))
        self._thread.start()

    def _run(self, caller: Callable[..., object], args: tuple[object, ...]) -> None:
        try:
            self.value = caller(*args)
        except BaseException as error:
            self.error = error

    def join(self, seconds: float = 60.0) -> InThread:
        self._thread.join(seconds)
        assert not self._thread.is_alive()
        return self


def with_longer_timeouts(attempt: Callable[[float], bool]) -> None:
    """Make an attempt with ever longer timeouts until it succeeds: a busy machine gets on, too.

    The attempt returns false where its calls needed more time than they had.
    """
    assert any(attempt(timeout) for timeout in TIMEOUTS)


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for something that another thread brings about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
