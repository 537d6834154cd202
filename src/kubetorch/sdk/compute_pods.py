"""The pods of the service that runs on a `kt.Compute`: their descriptions, and commands in them."""

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
from kubetorch.sdk.pod_objects import Attributes, pod_object
from kubetorch.sdk.transport import local_port, pod_transport
from kubetorch.sdk.transport.session import Session
from kubetorch.sdk.tuning import TIMING
from kubetorch.specs.image import ImageSpec, PipStep, RunStep, Step, quoted_requirement
from kubetorch.wire import messages, routes
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.messages import PodView, WorkloadView
from kubetorch.wire.pod_commands import RunEnd, RunEvent, RunStepNow

#: The pods that a user means: their names, or indexes into those that run.
Nodes = str | int | Iterable[str | int] | None
#: Names of distributions as requirements begin with them.
_REQUIREMENT_NAME = re.compile(
    r"^\s*([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(\[[^\]]*\])?\s*$"
)


@dataclass(frozen=True)
class StepResult:
    pod: str
    step: Step
    exit_code: int
    output: str
    errors: str

    def as_list(self) -> list[int | str]:
        """Exit code, output and errors; the output of a failing command is among its errors."""
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
    """The pods of one service. Each method asks the controller for the present pods."""

    def __init__(self, session: Session, namespace: str, service: str) -> None:
        self._session = session
        self._namespace = namespace
        self._service = service

    def _view(self) -> WorkloadView:
        return self._session.get_workload(self._namespace, self._service)

    def list_all(self) -> list[Attributes]:
        """All pods; none if the service is gone."""
        try:
            view = self._view()
            descriptions = self._session.ask(
                lambda controller: controller.describe_pods(self._namespace, self._service)
            )
        except ServiceNotFoundError:
            return []
        description_by_name = {
            description["metadata"]["name"]: description for description in descriptions
        }
        return [pod_object(view, pod, description_by_name.get(pod.name)) for pod in view.pods]

    def running_names(self) -> list[str]:
        """Names of the pods that run, without pods that are about to end."""
        try:
            return [pod.name for pod in self._view().pods if pod.phase == "Running"]
        except ServiceNotFoundError:
            return []

    def show_logs(self, *, follow: bool, tail: int, pod: str | None) -> None:
        view = self._view()
        names = [listed_pod.name for listed_pod in view.pods]
        if pod is not None and pod not in names:
            raise SpecError(
                f"pod is {pod!r}; {view.spec.name} has no such pod",
                hint=f"it has {', '.join(names) or 'none'}",
            )
        screen = Screen()
        pod_logs = service_logs.ServiceLogs(
            self._session, view.spec.namespace, view.spec.name, pod=pod
        )
        for line in pod_logs.lines(tail=tail, follow=follow):
            screen.line(f"({line.pod}) {logs.text(line)}")

    def run(self, step: Step, node: Nodes) -> list[StepResult]:
        """Run a step in the pods that are chosen, one after the other."""
        view = self._view()
        pods = {pod.name: pod for pod in view.pods}
        pod_names = _pod_names(view, node)
        return [_run(self._session, view, pods[name], step) for name in pod_names]

    def apply(self, image: Image, node: Nodes) -> None:
        """Upload the files that an image copies, and run its steps."""
        namespace = self._view().spec.namespace
        for step in _uploaded(self._session, image.to_spec(), namespace).steps:
            for step_result in self.run(step, node):
                step_result.check()

    def install(self, requirement: str, node: Nodes, *, override: bool) -> None:
        """Install a requirement in pods that lack it; with `override` this machine's version."""
        for pod in _pod_names(self._view(), node):
            missing_requirement = self._missing(requirement, pod, override=override)
            if missing_requirement is not None:
                for step_result in self.run(PipStep(quoted_requirement(missing_requirement)), pod):
                    step_result.check()

    def _missing(self, requirement: str, pod: str, *, override: bool) -> str | None:
        """The requirement that a pod does not fulfil yet."""
        match = _REQUIREMENT_NAME.match(requirement)
        if match is None:
            return requirement
        name = match[1]
        (folder_test,) = self.run(RunStep(f"test -d {name}"), pod)
        if folder_test.exit_code == 0:  # a folder that was copied there
            return f"./{requirement.strip()}"
        try:
            local_version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return requirement
        if override:
            return f"{requirement.strip()}=={local_version}"
        code = f"import importlib.metadata as m; m.version({name!r})"
        (version_test,) = self.run(RunStep(f'python -c "{code}"'), pod)
        return None if version_test.exit_code == 0 else requirement

    def local_port(self) -> int:
        view = self._view()
        return backend.port_of(self._session, view.spec.namespace, view.spec.name)

    def open_shell(self, pod_name: str | None) -> None:
        """Run a shell on this program's terminal, in the oldest pod if none is named."""
        view = self._view()
        if not any(pod.url for pod in view.pods):
            raise RuntimeError(f"{view.spec.name} has no pod that runs")
        shells.run(self._session, view, local_port.choose(view, pod_name))


def _run(session: Session, view: WorkloadView, pod: PodView, step: Step) -> StepResult:
    body = messages.encode(RunStepNow(step, wire_tuning.TIMING.image_step_seconds))
    texts: dict[str, list[str]] = {"stdout": [], "stderr": []}
    url = session.address(view, pod)
    client = pod_transport.client(session.transport, url, session.own_token(view))
    timeout = wire_tuning.TIMING.image_step_seconds + TIMING.image_step_margin_seconds
    with client, client.request("POST", routes.RUN, body=body, timeout=timeout) as answer:
        if answer.status >= 300:
            raise refusal("POST", url + routes.RUN, answer.status, answer.read())
        for line in answer.iter_lines():
            event: RunEvent = messages.decode(RunEvent, line)  # type: ignore[arg-type]  # a union
            if isinstance(event, RunEnd):
                return StepResult(
                    pod.name, step, event.exit_code, *("".join(t) for t in texts.values())
                )
            texts[event.source].append(f"{event.text}\n")
    raise ControllerUnavailableError(f"{pod.name} did not say how the command ended")


def _uploaded(session: Session, image: ImageSpec, namespace: str) -> ImageSpec:
    """The image with the digests of the files that it copies, after their upload."""
    image, scans = attachments.scan_copies(image, cache=environment.cache_dir())
    controller = session.controller()
    for scan in scans:
        for warning in scan.warnings:
            parameters.warn(warning)
        digests = [scan.digest, *scan.tree.digests()]
        missing = controller.missing_blobs(digests, namespace)
        if missing:
            controller.upload(transfer.compressed(missing, scan.stream), namespace)
    return image


def _pod_names(view: WorkloadView, node: Nodes) -> list[str]:
    running_pods = [pod.name for pod in view.pods if pod.phase == "Running"]
    # A pod that serves nothing, such as one that a deploy replaces, runs nothing either.
    serving_pods = [
        pod.name for pod in view.pods if pod.name in running_pods and pod.generation
    ] or running_pods
    if node in (None, "all"):
        if not running_pods:
            raise ControllerUnavailableError(f"{view.spec.name} has no pod that runs")
        return serving_pods
    chosen_nodes = [node] if isinstance(node, (str, int)) else list(node or ())
    names = [_name_of_node(serving_pods, running_pods, chosen_node) for chosen_node in chosen_nodes]
    for chosen_node, name in zip(chosen_nodes, names, strict=True):
        if name not in running_pods:
            raise SpecError(
                f"node is {chosen_node!r}; {view.spec.name} has no such pod that runs",
                hint=f"it has {', '.join(running_pods) or 'none'}",
            )
    return names


def _name_of_node(serving: list[str], running: list[str], node: str | int) -> str:
    """The name of the pod with this name, or with this index."""
    index = parameters.whole(node)
    if str(node) in running or index is None or not 0 <= index < len(serving):
        return str(node)
    return serving[index]
