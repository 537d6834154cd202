"""The lines that the pods of a service log: no gap, no repetition, over connections that break."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from kubetorch.errors import ControllerUnavailableError
from kubetorch.lib import backoff
from kubetorch.sdk.transport.session import Session
from kubetorch.wire import routes
from kubetorch.wire.messages import DeployLog

#: Seconds by which a line may be stamped earlier than one before it: several processes write.
_DISORDER = 5.0
#: Lines of a pod that are remembered.
_MEMORY = 10_000

_Key = tuple[float, str, str]


class KnownLines:
    """Which lines of which pods are known already.

    After `begin_again` the lines come once more from somewhere before the break; `is_new` is then
    false for those that came before, and for those that are older than all that came.
    """

    def __init__(self, started: float) -> None:
        self._started = started
        self._is_first_time = True
        self._recent: dict[str, deque[_Key]] = {}
        self._expected: dict[str, Counter[_Key]] = {}
        self._first: dict[str, float] = {}
        self._newest: dict[str, float] = {}

    @property
    def count(self) -> int:
        """How many lines are remembered: so many have to come again to be told apart."""
        return sum(len(keys) for keys in self._recent.values())

    def begin_again(self) -> None:
        """Lines that came before may come once more."""
        self._is_first_time = False
        self._expected = {pod: Counter(keys) for pod, keys in self._recent.items()}

    def is_new(self, line: DeployLog) -> bool:
        """Whether a line did not come before; if so it is known from now on."""
        pod, key = line.pod, (line.time, line.source, line.text)
        if not self._is_first_time:
            # Lines of one burst may have the same time, so also the first one's has an end.
            if line.time <= self._first.get(pod, self._started):
                return False
            if line.time < self._newest.get(pod, self._started) - _DISORDER:
                return False
            expected = self._expected.get(pod)
            if expected is not None and expected[key] > 0:
                expected[key] -= 1
                return False
        self._recent.setdefault(pod, deque(maxlen=_MEMORY)).append(key)
        self._first.setdefault(pod, line.time)
        self._newest[pod] = max(line.time, self._newest.get(pod, line.time))
        return True


#: Lines that are asked for beyond those that are shown: lines of agents are among them, and where
#: one stream of lines is joined to the next is found by what both have.
_MARGIN = 1000
#: How many times as many lines are asked for where those of one rank are wanted.
_RANKS = 16
#: First and longest pause before a connection is made again, in seconds.
_PAUSES = (0.1, 2.0)


@dataclass(frozen=True)
class ServiceLogs:
    """The lines of one service."""

    session: Session
    namespace: str
    name: str
    pod: str | None = None
    rank: int | None = None
    system: bool = False

    def lines(self, *, tail: int, follow: bool = False) -> Iterator[DeployLog]:
        """The last lines, and with `follow` those that come.

        A connection that breaks, as when the local service is restarted, is made again; no line
        is left out or comes twice.
        """
        known = KnownLines(started=time.time())
        last: deque[DeployLog] = deque(maxlen=tail)
        wide = 1 if self.rank is None else _RANKS
        asked = min((tail + _MARGIN) * wide, routes.TAIL_MOST)
        for line in self._ask(tail=asked, follow=False):
            known.is_new(line)
            if self._is_wanted(line):
                last.append(line)
        yield from last
        if follow:
            yield from filter(self._is_wanted, self._new(known))

    def _is_wanted(self, line: DeployLog) -> bool:
        is_of_rank = self.rank is None or line.rank == self.rank
        return is_of_rank and (self.system or line.source != "agent")

    def _new(self, known: KnownLines) -> Iterator[DeployLog]:
        """Lines as they come, over connections that break."""
        patience = backoff.Patience(
            self.session.transport.patience, first=_PAUSES[0], limit=_PAUSES[1]
        )
        while True:
            known.begin_again()
            controller = self.session.controller()
            try:
                lines = self._ask(
                    tail=min(max(known.count, _MARGIN), routes.TAIL_MOST), follow=True
                )
                patience.renew()
                for line in lines:
                    if known.is_new(line):
                        yield line
                return
            except ControllerUnavailableError:
                pause = patience.pause()
                if pause is None:
                    raise
                time.sleep(pause)
                self.session.reconnect(controller)

    def _ask(self, *, tail: int, follow: bool) -> Iterator[DeployLog]:
        return self.session.controller().stream_logs(
            self.namespace, self.name, follow=follow, tail=tail, pod=self.pod
        )
