"""The lines that the pods of a service log: no gap, no repetition, over connections that break.

The controller reads the logs of services. The lines of an app come from its pods, to its exit code.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from kubetorch.errors import (
    ControllerUnavailableError,
    KubetorchError,
    ServiceNotFoundError,
    StartupError,
)
from kubetorch.lib import backoff
from kubetorch.lib.http_client import HttpClient, Response
from kubetorch.sdk.controller import Timeout, refusal
from kubetorch.sdk.transport import pod_transport
from kubetorch.sdk.transport.session import Session
from kubetorch.wire import routes
from kubetorch.wire.messages import DeployLog, PodView, WorkloadView

#: Seconds by which a line may be stamped earlier than one before it: several processes write.
_DISORDER = 5.0
#: Lines of a pod that are remembered.
_MEMORY = 10_000

_Key = tuple[float, str, str]


class KnownLines:
    """The lines of pods that are known already.

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
        """The number of remembered lines: so many have to come again to be told apart."""
        return sum(len(keys) for keys in self._recent.values())

    def begin_again(self) -> None:
        """Lines that came before may come once more."""
        self._is_first_time = False
        self._expected = {pod: Counter(keys) for pod, keys in self._recent.items()}

    def is_new(self, line: DeployLog) -> bool:
        """True if a line did not come before; the line is known from now on."""
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


# ------------------------------------------------------------------------------- apps, to their end

#: Seconds without a word of a pod after which following it is given up.
PATIENCE = 60.0
#: Of answers that another attempt may help: a proxy in between does not get through just now.
_PASSING = frozenset({502, 503, 504})
#: Lines that a stream begins with again after it broke.
_TAIL = 1000


def follow_app(
    session: Session,
    view: WorkloadView,
    on_line: Callable[[str], None],
    *,
    patience: float = PATIENCE,
    shown: Collection[tuple[str | None, float, str]] = (),
) -> int:
    """Pass on the lines of all pods until their apps have ended; the first exit code but 0.

    `shown` are pods, times and texts of lines that are not passed on.
    """
    pods = of_generation(view)
    prefixed = len(pods) > 1
    ends: list[int | BaseException] = [0] * len(pods)

    def run(number: int, pod: PodView) -> None:
        prefix = f"({pod.name}) " if prefixed else ""
        follower = _Follower(session, view, pod, lambda text: on_line(prefix + text), patience)
        follower.shown = frozenset(shown)
        try:
            ends[number] = follower.run()
        except BaseException as error:  # noqa: BLE001  # nothing of this is an end with 0
            ends[number] = error

    threads = [threading.Thread(target=run, args=one, daemon=True) for one in enumerate(pods)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for end in ends:
        if isinstance(end, BaseException):
            raise end
    return next((end for end in ends if isinstance(end, int) and end), 0)


def of_generation(view: WorkloadView) -> list[PodView]:
    """The pods of a workload but those that newer ones have replaced, which are about to end."""
    return [
        pod
        for pod in view.pods
        if pod.phase != "Terminating" and pod.generation in (0, view.generation)
    ]


class _Follower:
    def __init__(
        self,
        session: Session,
        view: WorkloadView,
        pod: PodView,
        on_line: Callable[[str], None],
        patience: float,
    ) -> None:
        self._session = session
        self._view = view
        self._pod = pod
        self._on_line = on_line
        self._known = KnownLines(time.time())
        self.shown: frozenset[tuple[str | None, float, str]] = frozenset()
        self._patience = backoff.Patience(patience, first=_PAUSES[0], limit=_PAUSES[1])

    def run(self) -> int:
        is_first = True
        while True:
            try:
                if not is_first:
                    self._look_up()
                code = self._attempt()
            except KubetorchError as error:
                pause = self._patience.pause() if error.status in _PASSING else None
                if pause is None:
                    raise
                time.sleep(pause)
            else:
                if code is not None:
                    return code
                time.sleep(_PAUSES[0])
            is_first = False
            self._known.begin_again()

    def token(self, path: str) -> str:
        """The token for the pod (a `kubetorch.lib.http_client.Credential`)."""
        del path
        return self._view.token or ""

    def reject(self, token: str) -> bool:
        """The pod does not take it: an app may run for longer than a token is good for."""
        self._look_up()
        return self._view.token not in (None, token)

    def _look_up(self) -> None:
        spec, generation = self._view.spec, self._view.generation
        found = self._session.get_workload(spec.namespace, spec.name)
        if found.generation != generation:
            raise StartupError(f"another {spec.name} was deployed meanwhile")
        pod = next((pod for pod in found.pods if pod.name == self._pod.name), None)
        if pod is None:
            raise ServiceNotFoundError(f"pod {self._pod.name} of {spec.name} is gone")
        self._view, self._pod = found, pod

    def _attempt(self) -> int | None:
        """Show lines until the end of the app or of the connection; the exit code, if it ended."""
        session = self._session
        url = session.address(self._view, self._pod)
        hint = f"kt status {self._view.spec.name}"
        if not url:
            raise ControllerUnavailableError(f"pod {self._pod.name} has no address", hint=hint)
        with pod_transport.client(session.transport, url, self, hint=hint) as http:
            path = f"{routes.LOGS}?follow=1&tail={_TAIL}&app={self._view.generation}"
            with _get(http, path, timeout=None) as response:
                self._patience.renew()
                for line in response.iter_lines():
                    if line:
                        self._take(json.loads(line))
            with _get(http, routes.APP_STATUS) as response:
                status = json.loads(response.read())
        code = status.get("exit_code")
        return int(code) if status.get("running") is False and code is not None else None

    def _take(self, line: dict[str, Any]) -> None:
        if line.get("generation") != self._view.generation:
            return
        known = DeployLog(text=line["text"], pod=self._pod.name, time=line["time"])
        if self._known.is_new(known) and (known.pod, known.time, known.text) not in self.shown:
            self._on_line(known.text)


def _get(http: HttpClient, path: str, *, timeout: Timeout = ...) -> Response:
    response = http.request("GET", path, timeout=timeout)
    if response.status == 200:
        return response
    with response:
        raise refusal("GET", http.base_url + path, response.status, response.read())
