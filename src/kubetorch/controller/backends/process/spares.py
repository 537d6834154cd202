"""Spare agents: started, with everything imported, before their pods are known.

An agent needs a tenth of a second for its imports. With a spare, that time passes while a client
still reads its project: a spare is started with the controller, and at the first request for a new
workload. There is at most one spare, which is dropped after a minute without use. A spare waits on
its standard input for the identity of a pod (`kubetorch.pod.spare`), and ends when the input ends:
so it never outlives its controller.

This module has no heavy imports: the service starts a spare before anything else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping

from kubetorch.lib import process_watch, processes
from kubetorch.lib.clock import Clock, Timer


class SpareAgent:
    def __init__(self, pid: int, mark: str, pipe: int) -> None:
        self.pid = pid
        self.mark = mark
        self._pipe = pipe

    def become_pod(self, environment: Mapping[str, str], log: str) -> None:
        """Make the spare the agent of the pod with this environment and log."""
        pod = {"environment": dict(environment), "log": log}
        with os.fdopen(self._pipe, "wb", buffering=0) as pipe:
            data = memoryview(json.dumps(pod).encode() + b"\n")
            while data:
                data = data[pipe.write(data) :]

    def drop(self) -> None:
        os.close(self._pipe)


def start(
    command: tuple[str, ...], environment: Mapping[str, str], *, mark: str, log: int
) -> SpareAgent:
    reading, writing = os.pipe()
    try:
        pid = processes.spawn(command, environment, stdin=reading, output=log, errors=log)
    except OSError:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    return SpareAgent(pid, mark, writing)


class SpareAgents:
    """At most one spare agent."""

    def __init__(
        self,
        start: Callable[[], SpareAgent] | None,
        *,
        clock: Clock,
        lifetime_seconds: float,
        first: SpareAgent | None = None,
    ) -> None:
        self._start = start
        self._lifetime_seconds = lifetime_seconds
        self._clock = clock
        self._spare: SpareAgent | None = None
        self._expiry: Timer | None = None
        if first is not None:
            self._hold(first)

    @property
    def marks(self) -> frozenset[str]:
        return frozenset() if self._spare is None else frozenset({self._spare.mark})

    def prepare(self) -> None:
        if self._spare is None and self._start is not None:
            try:
                self._hold(self._start())
            except OSError:
                return  # the pod starts its agent itself, and reports the error

    def claim(self) -> SpareAgent | None:
        """Hand the spare over to the caller; `None` without one."""
        spare, self._spare = self._spare, None
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        return spare

    def close(self) -> None:
        spare = self.claim()
        if spare is not None:
            spare.drop()
            process_watch.reap(spare.pid)

    def _hold(self, spare: SpareAgent) -> None:
        self._spare = spare
        self._expiry = self._clock.call_later(self._lifetime_seconds, self.close)
