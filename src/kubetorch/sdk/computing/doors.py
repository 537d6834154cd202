"""Ways into the pods of a compute: a port of this machine, and a shell."""

from __future__ import annotations

from kubetorch.sdk.computing.pods import Pods


class Doors(Pods):
    """What a compute whose service runs can be reached by."""

    def client_port(self) -> int:
        """A port of this machine that leads to the pods, for as long as this program runs.

        Whoever asks there needs a token, as at the pods: `.request_headers` of what was deployed,
        or `kt token`. Paths may begin with `/<namespace>/<service>:<port>`, as an `Endpoint` has
        them.

        Raises:
            SpecError: Nothing was deployed to it.
            ServiceNotFoundError: The service is gone.
        """
        view = self._view()
        from kubetorch.sdk import services  # noqa: PLC0415  # loaded by a deploy, not by an import

        return services.port_of(self.session(), view.spec.namespace, view.spec.name)

    def ssh(self, pod_name: str | None = None) -> None:
        """A shell in a pod, on this program's terminal, until it is left.

        Args:
            pod_name: Name of the pod; the oldest that runs if not given.

        Raises:
            RuntimeError: There is no pod that runs.
            ServiceNotFoundError: There is no such pod, or the service is gone.
        """
        from kubetorch.sdk import forwarding, shells  # noqa: PLC0415  # few programs need it

        view = self._view()
        if not any(pod.url for pod in view.pods):
            raise RuntimeError(f"{view.spec.name} has no pod that runs")
        shells.run(self.session(), view, forwarding.choose(view, pod_name))
