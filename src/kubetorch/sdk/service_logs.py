"""What the pods of a service log, from the last lines on: without a gap, over broken connections.

Wanted by `kt logs` and `kt.Compute.logs`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from kubetorch.errors import ControllerUnavailableError
from kubetorch.lib import backoff
from kubetorch.sdk import logs
from kubetorch.sdk.following import Known
from kubetorch.sdk.session import Session
from kubetorch.wire import routes
from kubetorch.wire.messages import DeployLog

#: Lines that are asked for beyond those that are shown: lines of agents are among them, and where
#: one stream of lines is joined to the next is found by what both have.
_MARGIN = 1000
#: First and longest pause before a connection is made again, in seconds.
_PAUSES = (0.1, 2.0)


@dataclass(frozen=True)
class ServiceLogs:
    """The lines of one service.

    Attributes:
        session: The way to the controller.
        namespace, name: The service.
        pod: Only lines of this pod.
        system: Whether lines of the pods' agents are among them.
    """

    session: Session
    namespace: str
    name: str
    pod: str | None = None
    system: bool = False

    def lines(self, *, tail: int, follow: bool = False) -> Iterator[DeployLog]:
        """The last lines, and with `follow` those that come.

        A connection that breaks, as when the local service is restarted, is made again; no line
        is left out or comes twice.

        Args:
            tail: How many of the last lines, at most `wire.routes.TAIL_MOST`.
            follow: Whether to go on until the service is gone.
        """
        known = Known(started=time.time())
        last: deque[DeployLog] = deque(maxlen=tail)
        for line in self._ask(tail=min(tail + _MARGIN, routes.TAIL_MOST), follow=False):
            known.is_new(line)
            if self._is_wanted(line):
                last.append(line)
        yield from last
        if follow:
            yield from filter(self._is_wanted, self._new(known))

    def _is_wanted(self, line: DeployLog) -> bool:
        return self.system or line.source != "agent"

    def _new(self, known: Known) -> Iterator[DeployLog]:
        """Lines as they come, over connections that break."""
        patience = backoff.Patience(self.session.way.patience, first=_PAUSES[0], limit=_PAUSES[1])
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


def text(line: DeployLog) -> str:
    """A line as people read it."""
    if line.source == "logger":
        return f"{logs.moment(line.time)} | {line.level} | {line.text}"
    return line.text
