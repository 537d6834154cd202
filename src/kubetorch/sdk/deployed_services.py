"""The services that a program has deployed: a line at its end names those that stay up."""

from __future__ import annotations

import os
import sys

from kubetorch.config import environment
from kubetorch.config.settings import config
from kubetorch.errors import KubetorchError
from kubetorch.lib import processes, terminal
from kubetorch.sdk import backend
from kubetorch.sdk.transport.session import Session
from kubetorch.sdk.tuning import TIMING
from kubetorch.wire import messages, routes
from kubetorch.wire.messages import WorkloadView


class DeployedServices:
    def __init__(self) -> None:
        self._deployed: dict[tuple[str, str], Session] = {}
        self._pid = os.getpid()
        processes.at_exit(self.say)

    def note(self, opened: Session, view: WorkloadView) -> None:
        """Note a service that this program has deployed, and that stays up when the program ends.

        A job ends by itself, and pods that a selector finds are not the service's own.
        """
        spec = view.spec
        is_job = spec.callable.app is not None and spec.callable.app.port is None
        if not (is_job or spec.compute.is_selector_only):
            self._deployed[spec.namespace, spec.name] = opened

    def say(self) -> None:
        """Write the line, where a person reads it."""
        is_heard = terminal.is_terminal(sys.stderr) and self._pid == os.getpid()
        if not is_heard or backend.choices.is_quiet or config.quiet or environment.is_in_pod():
            return
        views = [view for view in map(self._view_of, self._deployed) if view is not None]
        if views:
            terminal.say_once(_line(views))

    def _view_of(self, service: tuple[str, str]) -> WorkloadView | None:
        try:
            controller = self._deployed[service].controller()
            answer = controller.ask(
                "GET", routes.workload(*service), timeout=TIMING.service_lookup_seconds
            )
        except KubetorchError:  # the service is gone, or the controller does not answer
            return None
        return messages.decode(WorkloadView, answer)


def _line(views: list[WorkloadView]) -> str:
    first = views[0].spec
    where = "" if first.namespace == config.namespace else f" -n {first.namespace}"
    if len(views) == 1:
        return f"{_described(views[0])} stays up; kt teardown {first.name}{where} deletes it"
    described = ", ".join(map(_described, views))
    return (
        f"{len(views)} services stay up: {described}; kt teardown {first.name}{where} deletes "
        "that one, kt teardown -a all of yours"
    )


def _described(view: WorkloadView) -> str:
    pods = len(view.pods)
    gpus_per_pod = view.spec.compute.gpus or ""
    gpus = pods * int(gpus_per_pod) if gpus_per_pod.isdecimal() else 0
    counts = [(pods, "pod"), *([(gpus, "GPU")] if gpus else [])]
    texts = (f"{number} {noun}{'' if number == 1 else 's'}" for number, noun in counts)
    return f"{view.spec.name} ({', '.join(texts)})"


deployed_services = DeployedServices()
