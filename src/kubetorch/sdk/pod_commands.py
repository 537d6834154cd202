"""Running steps in pods that serve, by requests to their agents."""

from __future__ import annotations

from dataclasses import dataclass

from kubetorch.config import environment
from kubetorch.datastore import transfer
from kubetorch.errors import ControllerUnavailableError, ImageStepError
from kubetorch.sdk.controller import refusal
from kubetorch.sdk.deploys import copies
from kubetorch.sdk.reach import way
from kubetorch.sdk.session import Session
from kubetorch.specs.image import ImageSpec, Step
from kubetorch.wire import messages, routes
from kubetorch.wire.messages import PodView, WorkloadView
from kubetorch.wire.running import RunEnd, RunEvent, RunStepNow

#: Seconds that an answer may take beyond the step's own time.
_MARGIN = 30.0


@dataclass(frozen=True)
class Done:
    """A step that was run.

    Attributes:
        pod: Where.
        step: The step.
        exit_code: What it ended with.
        output, errors: What it wrote.
    """

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
        """Raise if it failed.

        Raises:
            ImageStepError: It did.
        """
        if self.exit_code:
            error = ImageStepError(
                f"{self.step.text('pip install')!r} ended with exit code {self.exit_code} in "
                f"{self.pod}:\n{self.output}{self.errors}".rstrip()
            )
            error.step, error.exit_code = self.step.text("pip install"), self.exit_code
            error.pod_name = self.pod
            raise error


def run(
    session: Session, view: WorkloadView, pod: PodView, step: Step, *, timeout: float = 3600.0
) -> Done:
    """Run a step in a pod.

    Args:
        session: The way to its controller.
        view: The workload.
        pod: The pod.
        step: The step.
        timeout: Seconds after which it is ended, with exit code 124.

    Raises:
        ControllerUnavailableError: The pod does not answer.
        KubetorchError: The step was refused.
    """
    body = messages.encode(RunStepNow(step, timeout))
    texts: dict[str, list[str]] = {"stdout": [], "stderr": []}
    url = session.address(view, pod)
    client = way.client(session.way, url, session.own_token(view))
    with client, client.request("POST", routes.RUN, body=body, timeout=timeout + _MARGIN) as answer:
        if answer.status >= 300:
            raise refusal("POST", url + routes.RUN, answer.status, answer.read())
        for line in answer.iter_lines():
            event: RunEvent = messages.decode(RunEvent, line)  # type: ignore[arg-type]  # a union
            if isinstance(event, RunEnd):
                return Done(pod.name, step, event.exit_code, *("".join(t) for t in texts.values()))
            texts[event.source].append(f"{event.text}\n")
    raise ControllerUnavailableError(f"{pod.name} did not say how the command ended")


def uploaded(session: Session, image: ImageSpec, namespace: str) -> ImageSpec:
    """The image with the digests of what it copies, which the controller has now in a namespace.

    Raises:
        SpecError: A source is gone, or cannot be read.
    """
    image, scans = copies.scan(image, cache=environment.cache_dir())
    controller = session.controller()
    for scan in scans:
        wanted = [scan.digest, *scan.tree.digests()]
        missing = controller.missing_blobs(wanted, namespace)
        if missing:
            controller.upload(transfer.compressed(missing, scan.stream), namespace)
    return image
