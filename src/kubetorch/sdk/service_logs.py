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
from kubetorch.sdk.tuning import LIMITS, TIMING
from kubetorch.wire import routes
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.messages import DeployLog, PodView, WorkloadView

_Key = tuple[float, str, str]


class KnownLines:
    """Recognises the lines that came already, when a stream of lines begins again.

    After `begin_again` the stream repeats lines from before the break; `is_new` is then false for
    lines that came before, and for lines that are older than all of these.
    """

    def __init__(self, started: float) -> None:
        self._started = started
        self._is_first_time = True
        #: The last lines of each pod.
        self._recent: dict[str, deque[_Key]] = {}
        #: The remembered lines of each pod that were not repeated since `begin_again`.
        self._expected: dict[str, Counter[_Key]] = {}
        #: Time of the first line of each pod, and of its newest.
        self._first: dict[str, float] = {}
        self._newest: dict[str, float] = {}

    @property
    def count(self) -> int:
        """The number of remembered lines: a stream that begins again has to repeat so many."""
        return sum(len(keys) for keys in self._recent.values())

    def begin_again(self) -> None:
        """The stream begins again, and may repeat lines."""
        self._is_first_time = False
        self._expected = {pod: Counter(keys) for pod, keys in self._recent.items()}

    def is_new(self, line: DeployLog) -> bool:
        """True if a line did not come before; the line is known from now on."""
        pod, key = line.pod, (line.time, line.source, line.text)
        if not self._is_first_time:
            # Lines of one burst may have the same time, so the time of the first line is old, too.
            if line.time <= self._first.get(pod, self._started):
                return False
            if line.time < self._newest.get(pod, self._started) - TIMING.log_disorder_seconds:
                return False
            expected = self._expected.get(pod)
            if expected is not None and expected[key] > 0:
                expected[key] -= 1
                return False
        self._recent.setdefault(pod, deque(maxlen=LIMITS.remembered_lines)).append(key)
        self._first.setdefault(pod, line.time)
        self._newest[pod] = max(line.time, self._newest.get(pod, line.time))
        return True


#: Factor of the requested lines where only the lines of one rank are shown.
_RANK_FACTOR = 16


@dataclass(frozen=True)
class ServiceLogs:
    session: Session
    namespace: str
    name: str
    pod: str | None = None
    rank: int | None = None
    system: bool = False

    def lines(self, *, tail: int, follow: bool = False) -> Iterator[DeployLog]:
        """The last lines, and with `follow` the following ones.

        After a broken connection, such as by a restart of the local service, the lines go on over
        a new one; no line is missing or comes twice.
        """
        known_lines = KnownLines(started=time.time())
        last_lines: deque[DeployLog] = deque(maxlen=tail)
        line_factor = 1 if self.rank is None else _RANK_FACTOR
        requested_lines = min(
            (tail + LIMITS.margin_lines) * line_factor, wire_tuning.LIMITS.log_tail_lines
        )
        for line in self._ask(tail=requested_lines, follow=False):
            known_lines.is_new(line)
            if self._is_wanted(line):
                last_lines.append(line)
        yield from last_lines
        if follow:
            yield from filter(self._is_wanted, self._new_lines(known_lines))

    def _is_wanted(self, line: DeployLog) -> bool:
        is_of_rank = self.rank is None or line.rank == self.rank
        return is_of_rank and (self.system or line.source != "agent")

    def _new_lines(self, known_lines: KnownLines) -> Iterator[DeployLog]:
        """Lines as they come, over connections that break."""
        patience = backoff.Patience(
            self.session.transport.patience,
            first=TIMING.log_first_delay_seconds,
            limit=TIMING.log_longest_delay_seconds,
        )
        while True:
            known_lines.begin_again()
            controller = self.session.controller()
            try:
                lines = self._ask(
                    tail=min(
                        max(known_lines.count, LIMITS.margin_lines),
                        wire_tuning.LIMITS.log_tail_lines,
                    ),
                    follow=True,
                )
                patience.renew()
                for line in lines:
                    if known_lines.is_new(line):
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

#: Statuses of a proxy that does not reach the pod at this moment: another attempt may help.
_TRANSIENT_STATUSES = frozenset({502, 503, 504})


def follow_app(
    session: Session,
    view: WorkloadView,
    on_line: Callable[[str], None],
    *,
    patience: float = TIMING.log_patience_seconds,
    shown: Collection[tuple[str | None, float, str]] = (),
) -> int:
    """Pass on the lines of all pods until their apps end; returns their first exit code but 0.

    `shown` has pods, times and texts of lines that are not passed on.
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

    threads = [
        threading.Thread(target=run, args=numbered_pod, daemon=True)
        for numbered_pod in enumerate(pods)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for end in ends:
        if isinstance(end, BaseException):
            raise end
    return next((end for end in ends if isinstance(end, int) and end), 0)


def of_generation(view: WorkloadView) -> list[PodView]:
    """The pods of a workload, without pods that newer ones replace."""
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
        self._known_lines = KnownLines(time.time())
        self.shown: frozenset[tuple[str | None, float, str]] = frozenset()
        self._patience = backoff.Patience(
            patience, first=TIMING.log_first_delay_seconds, limit=TIMING.log_longest_delay_seconds
        )

    def run(self) -> int:
        is_first = True
        while True:
            try:
                if not is_first:
                    self._refresh_view()
                code = self._attempt()
            except KubetorchError as error:
                pause = self._patience.pause() if error.status in _TRANSIENT_STATUSES else None
                if pause is None:
                    raise
                time.sleep(pause)
            else:
                if code is not None:
                    return code
                time.sleep(TIMING.log_first_delay_seconds)
            is_first = False
            self._known_lines.begin_again()

    def token(self, path: str) -> str:
        """The token for the pod (a `kubetorch.lib.http_client.Credential`)."""
        del path
        return self._view.token or ""

    def reject(self, token: str) -> bool:
        """The pod refuses the token: an app may run for longer than a token is valid."""
        self._refresh_view()
        return self._view.token not in (None, token)

    def _refresh_view(self) -> None:
        spec, generation = self._view.spec, self._view.generation
        view = self._session.get_workload(spec.namespace, spec.name)
        if view.generation != generation:
            raise StartupError(f"another {spec.name} was deployed meanwhile")
        pod = next((pod for pod in view.pods if pod.name == self._pod.name), None)
        if pod is None:
            raise ServiceNotFoundError(f"pod {self._pod.name} of {spec.name} is gone")
        self._view, self._pod = view, pod

    def _attempt(self) -> int | None:
        """Show lines until the end of the app or of the connection; the exit code, if it ended."""
        session = self._session
        url = session.address(self._view, self._pod)
        hint = f"kt status {self._view.spec.name}"
        if not url:
            raise ControllerUnavailableError(f"pod {self._pod.name} has no address", hint=hint)
        with pod_transport.client(session.transport, url, self, hint=hint) as http:
            path = (
                f"{routes.LOGS}?follow=1&tail={LIMITS.repeated_lines}&app={self._view.generation}"
            )
            with _get(http, path, timeout=None) as response:
                self._patience.renew()
                for line in response.iter_lines():
                    if line:
                        self._show_line(json.loads(line))
            with _get(http, routes.APP_STATUS) as response:
                status = json.loads(response.read())
        code = status.get("exit_code")
        return int(code) if status.get("running") is False and code is not None else None

    def _show_line(self, line: dict[str, Any]) -> None:
        if line.get("generation") != self._view.generation:
            return
        log_line = DeployLog(text=line["text"], pod=self._pod.name, time=line["time"])
        if (
            self._known_lines.is_new(log_line)
            and (log_line.pod, log_line.time, log_line.text) not in self.shown
        ):
            self._on_line(log_line.text)


def _get(http: HttpClient, path: str, *, timeout: Timeout = ...) -> Response:
    response = http.request("GET", path, timeout=timeout)
    if response.status == 200:
        return response
    with response:
        raise refusal("GET", http.base_url + path, response.status, response.read())
