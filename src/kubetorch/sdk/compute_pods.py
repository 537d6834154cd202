"""The pods of the service that runs on a `kt.Compute`: what there is, and commands in them."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable
from dataclasses import dataclass

from kubetorch.config import environment
from kubetorch.datastore import transfer
from kubetorch.errors import (
    ControllerUnavailableError,
    ImageStepError,
    ServiceNotFoundError,
    SpecError,
)
from kubetorch.sdk import backend, logs, parameters, service_logs, shells
from kubetorch.sdk.controller import refusal
from kubetorch.sdk.deploys import attachments
from kubetorch.sdk.image import Image
from kubetorch.sdk.logs import Screen
from kubetorch.sdk.pod_objects import Attributes, of_pod
from kubetorch.sdk.transport import local_port, pod_transport
from kubetorch.sdk.transport.session import Session
from kubetorch.specs.image import ImageSpec, PipStep, RunStep, Step, quoted_requirement
from kubetorch.wire import messages, routes
from kubetorch.wire.messages import PodView, WorkloadView
from kubetorch.wire.pod_commands import RunEnd, RunEvent, RunStepNow

#: The pods that a user means: their names, or indexes into those that run.
Nodes = str | int | Iterable[str | int] | None
#: Names of distributions as requirements begin with them.
_NAME = re.compile(r"^\s*([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(\[[^\]]*\])?\s*$")


#: Seconds that a step may take, and that its answer may take beyond them.
_STEP_TIMEOUT = 3600.0
_MARGIN = 30.0


@dataclass(frozen=True)
class Done:
    pod: str
    step: Step
    exit_code: int
    output: str
    errors: str

    def as_list(self) -> list[int | str]:
        """Exit code, output and errors; what a failing one wrote is among its errors."""
        if self.exit_code == 0:
            return [0, self.output, self.errors]
        return [self.exit_code, "", self.output + self.errors]

    def check(self) -> None:
        if self.exit_code:
            error = ImageStepError(
                f"{self.step.text('pip install')!r} ended with exit code {self.exit_code} in "
                f"{self.pod}:\n{self.output}{self.errors}".rstrip()
            )
            error.step, error.exit_code = self.step.text("pip install"), self.exit_code
            error.pod_name = self.pod
            raise error


class ComputePods:
    """The pods of one service. Each method asks the controller which there are."""

    def __init__(self, session: Session, namespace: str, service: str) -> None:
        self._session = session
        self._namespace = namespace
        self._service = service

    def _view(self) -> WorkloadView:
        return self._session.get_workload(self._namespace, self._service)

    def found(self) -> list[Attributes]:
        """All pods; none if the service is gone."""
        try:
            view = self._view()
            described = self._session.ask(
                lambda controller: controller.describe_pods(self._namespace, self._service)
            )
        except ServiceNotFoundError:
            return []
        by_name = {one["metadata"]["name"]: one for one in described}
        return [of_pod(view, pod, by_name.get(pod.name)) for pod in view.pods]

    def running_names(self) -> list[str]:
        """Names of the pods that run, but for those that are about to end."""
        try:
            return [pod.name for pod in self._view().pods if pod.phase == "Running"]
        except ServiceNotFoundError:
            return []

    def show_logs(self, *, follow: bool, tail: int, pod: str | None) -> None:
        view = self._view()
        names = [one.name for one in view.pods]
        if pod is not None and pod not in names:
            raise SpecError(
                f"pod is {pod!r}; {view.spec.name} has no such pod",
                hint=f"it has {', '.join(names) or 'none'}",
            )
        screen = Screen()
        found = service_logs.ServiceLogs(
            self._session, view.spec.namespace, view.spec.name, pod=pod
        )
        for line in found.lines(tail=tail, follow=follow):
            screen.line(f"({line.pod}) {logs.text(line)}")

    def run(self, step: Step, node: Nodes) -> list[Done]:
        """Run a step in the pods that are chosen, one after the other."""
        view = self._view()
        pods = {pod.name: pod for pod in view.pods}
        chosen = _chosen(view, node)
        return [_run(self._session, view, pods[name], step) for name in chosen]

    def apply(self, image: Image, node: Nodes) -> None:
        """Upload what an image copies, and run its steps."""
        namespace = self._view().spec.namespace
        for step in _uploaded(self._session, image.to_spec(), namespace).steps:
            for done in self.run(step, node):
                done.check()

    def install(self, requirement: str, node: Nodes, *, override: bool) -> None:
        """Install a requirement where it is not importable; `override`: as it is here."""
        for pod in _chosen(self._view(), node):
            wanted = self._missing(requirement, pod, override=override)
            if wanted is not None:
                for done in self.run(PipStep(quoted_requirement(wanted)), pod):
                    done.check()

    def _missing(self, requirement: str, pod: str, *, override: bool) -> str | None:
        """The requirement that a pod does not fulfil yet."""
        match = _NAME.match(requirement)
        if match is None:
            return requirement
        name = match[1]
        (found,) = self.run(RunStep(f"test -d {name}"), pod)
        if found.exit_code == 0:  # a folder that was copied there
            return f"./{requirement.strip()}"
        try:
            here = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return requirement
        if override:
            return f"{requirement.strip()}=={here}"
        code = f"import importlib.metadata as m; m.version({name!r})"
        (there,) = self.run(RunStep(f'python -c "{code}"'), pod)
        return None if there.exit_code == 0 else requirement

    def local_port(self) -> int:
        view = self._view()
        return backend.port_of(self._session, view.spec.namespace, view.spec.name)

    def open_shell(self, pod_name: str | None) -> None:
        """Run a shell on this program's terminal, in the oldest pod if none is named."""
        view = self._view()
        if not any(pod.url for pod in view.pods):
            raise RuntimeError(f"{view.spec.name} has no pod that runs")
        shells.run(self._session, view, local_port.choose(view, pod_name))


def _run(session: Session, view: WorkloadView, pod: PodView, step: Step) -> Done:
    body = messages.encode(RunStepNow(step, _STEP_TIMEOUT))
    texts: dict[str, list[str]] = {"stdout": [], "stderr": []}
    url = session.address(view, pod)
    client = pod_transport.client(session.transport, url, session.own_token(view))
    timeout = _STEP_TIMEOUT + _MARGIN
    with client, client.request("POST", routes.RUN, body=body, timeout=timeout) as answer:
        if answer.status >= 300:
            raise refusal("POST", url + routes.RUN, answer.status, answer.read())
        for line in answer.iter_lines():
            event: RunEvent = messages.decode(RunEvent, line)  # type: ignore[arg-type]  # a union
            if isinstance(event, RunEnd):
                return Done(pod.name, step, event.exit_code, *("".join(t) for t in texts.values()))
            texts[event.source].append(f"{event.text}\n")
    raise ControllerUnavailableError(f"{pod.name} did not say how the command ended")


def _uploaded(session: Session, image: ImageSpec, namespace: str) -> ImageSpec:
    """The image with the digests of what it copies, which the controller has now in a namespace."""
    image, scans = attachments.scan_copies(image, cache=environment.cache_dir())
    controller = session.controller()
    for scan in scans:
        for warning in scan.warnings:
            parameters.warn(warning)
        wanted = [scan.digest, *scan.tree.digests()]
        missing = controller.missing_blobs(wanted, namespace)
        if missing:
            controller.upload(transfer.compressed(missing, scan.stream), namespace)
    return image


def _chosen(view: WorkloadView, node: Nodes) -> list[str]:
    running = [pod.name for pod in view.pods if pod.phase == "Running"]
    # A pod that serves nothing, such as one that a deploy replaces, runs nothing either.
    serving = [pod.name for pod in view.pods if pod.name in running and pod.generation] or running
    if node in (None, "all"):
        if not running:
            raise ControllerUnavailableError(f"{view.spec.name} has no pod that runs")
        return serving
    chosen = [node] if isinstance(node, (str, int)) else list(node or ())
    names = [_name(serving, running, one) for one in chosen]
    for one, name in zip(chosen, names, strict=True):
        if name not in running:
            raise SpecError(
                f"node is {one!r}; {view.spec.name} has no such pod that runs",
                hint=f"it has {', '.join(running) or 'none'}",
            )
    return names


def _name(serving: list[str], running: list[str], node: str | int) -> str:
    """The name of the pod with this name, or with this index."""
    index = parameters.whole(node)
    if str(node) in running or index is None or not 0 <= index < len(serving):
        return str(node)
    return serving[index]
