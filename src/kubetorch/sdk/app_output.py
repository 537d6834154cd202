"""The output of an app: its lines from all pods, over connections that break, to its exit code."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
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
from kubetorch.sdk.service_logs import KnownLines
from kubetorch.sdk.transport import pod_transport
from kubetorch.sdk.transport.session import Session
from kubetorch.wire import routes
from kubetorch.wire.messages import DeployLog, PodView, WorkloadView

#: Seconds without a word of a pod after which following it is given up.
PATIENCE = 60.0
#: First and longest pause between attempts, in seconds.
_PAUSES = (0.1, 2.0)
#: Of answers that another attempt may help: a proxy in between does not get through just now.
_PASSING = frozenset({502, 503, 504})
#: Lines that a stream begins with again after it broke.
_TAIL = 1000


def follow(
    session: Session,
    view: WorkloadView,
    on_line: Callable[[str], None],
    *,
    patience: float = PATIENCE,
) -> int:
    """Pass on the lines of all pods until their apps have ended; the first exit code but 0."""
    pods = of_generation(view)
    prefixed = len(pods) > 1
    ends: list[int | BaseException] = [0] * len(pods)

    def run(number: int, pod: PodView) -> None:
        prefix = f"({pod.name}) " if prefixed else ""
        follower = _Follower(session, view, pod, lambda text: on_line(prefix + text), patience)
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
    """One pod."""

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
        self._patience = backoff.Patience(patience, first=_PAUSES[0], limit=_PAUSES[1])

    def run(self) -> int:
        """Follow it to its end; its exit code."""
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
        """What the pod lets this program in for (a `kubetorch.lib.http_client.Credential`)."""
        del path
        return self._view.token or ""

    def reject(self, token: str) -> bool:
        """The pod does not take it: an app may run for longer than a token is good for."""
        self._look_up()
        return self._view.token not in (None, token)

    def _look_up(self) -> None:
        """Ask where the pod is now."""
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
        if self._known.is_new(known):
            self._on_line(known.text)


def _get(http: HttpClient, path: str, *, timeout: Timeout = ...) -> Response:
    """What an agent answers, whose status is 200."""
    response = http.request("GET", path, timeout=timeout)
    if response.status == 200:
        return response
    with response:
        raise refusal("GET", http.base_url + path, response.status, response.read())
