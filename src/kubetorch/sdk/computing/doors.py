"""Ways into the pods of a compute: a port of this machine, and a shell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kubetorch.errors import SpecError

if TYPE_CHECKING:
    from kubetorch.wire.messages import WorkloadView


class Doors:
    """What a compute whose service runs can be reached by."""

    _service_name: str | None

    @property
    def namespace(self) -> str:
        """Kubernetes namespace of the service."""
        raise NotImplementedError

    def client_port(self) -> int:
        """A port of this machine that leads to the pods, for as long as this program runs.

        Whoever asks there needs a token, as at the pods: `.request_headers` of what was deployed,
        or `kt token`. Paths may begin with `/<namespace>/<service>:<port>`, as an `Endpoint` has
        them.

        Raises:
            SpecError: Nothing was deployed to it.
            ServiceNotFoundError: The service is gone.
        """
        view = self._deployed()
        from kubetorch.sdk import services  # noqa: PLC0415  # loaded by a deploy, not by an import

        return services.port_of(view.spec.namespace, view.spec.name)

    def ssh(self, pod_name: str | None = None) -> None:
        """A shell in a pod, on this program's terminal, until it is left.

        Args:
            pod_name: Name of the pod; the oldest that runs if not given.

        Raises:
            RuntimeError: There is no pod that runs.
            ServiceNotFoundError: There is no such pod, or the service is gone.
        """
        from kubetorch.sdk import forwarding, shells  # noqa: PLC0415  # few programs need it

        view = self._deployed()
        if not any(pod.url for pod in view.pods):
            raise RuntimeError(f"{view.spec.name} has no pod that runs")
        shells.run(forwarding.choose(view, pod_name))

    def _deployed(self) -> WorkloadView:
        if self._service_name is None:
            raise SpecError(
                "nothing was deployed to this Compute yet", hint="kt.fn(train).to(compute)"
            )
        from kubetorch.sdk import services  # noqa: PLC0415  # loaded by a deploy, not by an import

        return services.session().get_workload(self.namespace, self._service_name)
