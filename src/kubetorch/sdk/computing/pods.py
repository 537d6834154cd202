"""The pods of a compute that a service runs on: which there are, and what they say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kubetorch.errors import KubetorchError, ServiceNotFoundError, SpecError
from kubetorch.sdk.computing.attachments import Attachments

if TYPE_CHECKING:
    from kubetorch.sdk.computing.pod_objects import Attributes
    from kubetorch.sdk.session import Session
    from kubetorch.wire.messages import WorkloadView


class Pods(Attachments):
    """What can be asked of the pods."""

    def _view(self) -> WorkloadView:
        """The service as the controller sees it.

        Raises:
            SpecError: Nothing was deployed to this compute.
            ServiceNotFoundError: The service is gone.
        """
        if self._service_name is None:
            raise SpecError(
                "this Compute has no pods: nothing was deployed to it",
                hint="kt.fn(train).to(compute) deploys a function",
            )
        return self.session().get_workload(self.namespace, self._service_name)

    def session(self) -> Session:
        """The way to the controller: in the cluster of its kubeconfig, if it names one."""
        # What deploys and calls need is loaded by programs that do.
        from kubetorch.sdk import services  # noqa: PLC0415

        # That of a service that was found is a path of another machine, perhaps.
        return services.session(None if self._is_found else self._spec.kubeconfig_path)

    def pods(self) -> list[Attributes]:
        """Its pods as Kubernetes describes them; their keys are attributes, too.

        There are none before something is deployed, and after its teardown.
        """
        if self._service_name is None:
            return []
        from kubetorch.sdk.computing import pod_objects  # noqa: PLC0415  # as in `session`

        try:
            view = self._view()
        except ServiceNotFoundError:
            return []
        return [pod_objects.of_pod(view, pod) for pod in view.pods]

    def pod_names(self) -> list[str]:
        """Names of the pods that run, but for those that are about to end."""
        from kubetorch.sdk.computing import pod_objects  # noqa: PLC0415  # as in `session`

        return [pod.metadata.name for pod in self.pods() if pod_objects.is_running(pod)]

    def is_up(self) -> bool:
        """Whether there are pods, and all of them run; not so if nobody can be asked."""
        try:
            pods = self.pods()
        except KubetorchError:
            return False
        return bool(pods) and len(self.pod_names()) == len(pods)

    def logs(self, follow: bool = False, tail: int = 100, pod: str | None = None) -> None:
        """Show what the pods have logged, as `kt logs` does.

        Args:
            follow: Go on with new lines until the service is gone.
            tail: How many of the last lines to begin with.
            pod: Only this pod.

        Raises:
            SpecError: Nothing was deployed to this compute, or there is no such pod.
            ServiceNotFoundError: The service is gone.
        """
        view = self._view()
        names = [one.name for one in view.pods]
        if pod is not None and pod not in names:
            raise SpecError(
                f"pod is {pod!r}; {view.spec.name} has no such pod",
                hint=f"it has {', '.join(names) or 'none'}",
            )
        from kubetorch.sdk import service_logs  # noqa: PLC0415  # as in `session`
        from kubetorch.sdk.logs import Screen  # noqa: PLC0415  # as in `session`

        screen = Screen()
        found = service_logs.ServiceLogs(
            self.session(), view.spec.namespace, view.spec.name, pod=pod
        )
        for line in found.lines(tail=tail, follow=follow):
            screen.line(f"({line.pod}) {service_logs.text(line)}")
