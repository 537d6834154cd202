"""Following apps to their end: their lines, and what they ended with."""

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
from kubetorch.sdk import logs
from kubetorch.sdk.following import Known
from kubetorch.sdk.reach import way
from kubetorch.sdk.session import Session
from kubetorch.wire import failures, routes
from kubetorch.wire.messages import DeployLog, PodView, WorkloadView

#: Seconds without a word of a pod after which following it is given up.
PATIENCE = 60.0
#: First and longest pause between attempts, in seconds.
_PAUSES = (0.1, 2.0)
#: Lines that a stream begins with again after it broke.
_TAIL = 1000
_ANSWER_TIMEOUT = 30.0


def printer() -> Callable[[str], None]:
    """What shows lines on this program's standard output."""
    screen = logs.Screen()
    return screen.line


def follow(session: Session, view: WorkloadView, on_line: Callable[[str], None]) -> int:
    """Tell of the lines of all pods until their apps have ended; the first exit code but 0.

    Raises:
        ServiceNotFoundError: The service was torn down meanwhile.
        StartupError: Another generation took its place.
        ControllerUnavailableError: A pod was silent for too long.
    """
    pods = of_generation(view)
    prefixed = len(pods) > 1
    ends: list[int | KubetorchError | None] = [None] * len(pods)

    def run(number: int, pod: PodView) -> None:
        prefix = f"({pod.name}) " if prefixed else ""
        try:
            ends[number] = _Follower(session, view, pod, lambda text: on_line(prefix + text)).run()
        except KubetorchError as error:
            ends[number] = error

    threads = [threading.Thread(target=run, args=one, daemon=True) for one in enumerate(pods)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for end in ends:
        if isinstance(end, KubetorchError):
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
    """One pod.

    Args:
        session: The way to its controller.
        view: The workload.
        pod: The pod.
        on_line: Told of each line.
    """

    def __init__(
        self,
        session: Session,
        view: WorkloadView,
        pod: PodView,
        on_line: Callable[[str], None],
    ) -> None:
        self._session = session
        self._view = view
        self._pod = pod
        self._on_line = on_line
        self._known = Known(time.time())

    def run(self) -> int:
        """Follow it to its end; its exit code.

        Raises:
            KubetorchError: It cannot be followed any more.
        """
        pauses = backoff.exponential(first=_PAUSES[0], limit=_PAUSES[1])
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                code = self._attempt()
            except ControllerUnavailableError:
                if time.monotonic() > deadline:
                    raise
            else:
                if code is not None:
                    return code
                deadline = time.monotonic() + PATIENCE
                pauses = backoff.exponential(first=_PAUSES[0], limit=_PAUSES[1])
            time.sleep(next(pauses))
            self._known.begin_again()
            self._look_up()

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
        if not url:
            return None
        hint = f"kt status {self._view.spec.name}"
        with way.client(session.way, url, self._view.token, timeout=None, hint=hint) as http:
            path = f"{routes.LOGS}?follow=1&tail={_TAIL}&app={self._view.generation}"
            with http.request("GET", path) as response:
                if response.status != 200:
                    raise failures.rebuild(failures.parse_json(response.read()))
                for line in response.iter_lines():
                    if line:
                        self._take(json.loads(line))
            with http.request("GET", routes.APP_STATUS, timeout=_ANSWER_TIMEOUT) as response:
                status = json.loads(response.read())
        code = status.get("exit_code")
        return int(code) if status.get("running") is False and code is not None else None

    def _take(self, line: dict[str, Any]) -> None:
        if line.get("generation") != self._view.generation:
            return
        known = DeployLog(text=line["text"], pod=self._pod.name, time=line["time"])
        if self._known.is_new(known):
            self._on_line(known.text)
