"""Connections to a controller and to pods in a cluster, through its API server.

URLs are of hosts that only this transport knows: `http://POD.NAMESPACE.tunnel:32300` is a port of
a pod, `http://kubetorch-controller.NAMESPACE.tunnel:8080` the port of a ready pod of the
controller. Where the user may not forward ports of pods, calls go through the controller:
`http://kubetorch-controller.NAMESPACE.tunnel:8080/team/service#pod`.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kubetorch.errors import (
    ConfigError,
    ControllerUnavailableError,
    KubernetesForbiddenError,
    KubernetesNotFoundError,
    KubernetesRequestError,
    KubetorchError,
)
from kubetorch.k8s import failures
from kubetorch.k8s.resources import PODS, SERVICES, Ref, Selection
from kubetorch.lib import tuning as lib_tuning
from kubetorch.manifests import labels
from kubetorch.sdk.transport.login import Login
from kubetorch.sdk.transport.pod_transport import (
    DIRECT,
    pod_headers,
    relay_url,
    service_url,
)
from kubetorch.sdk.transport.tunnel import Tunnel
from kubetorch.sdk.tuning import TIMING
from kubetorch.wire.routes import CONTROLLER, CONTROLLER_PORT

if TYPE_CHECKING:
    from kubetorch.k8s.client import Client
    from kubetorch.k8s.kubeconfig import Access
    from kubetorch.k8s.resources import Object
    from kubetorch.wire.messages import PodView

#: Labels of the controller's pods.
LABELS = "app.kubernetes.io/name=kubetorch,app.kubernetes.io/component=controller"
#: The end of the hosts of our URLs; no such domain exists.
_SUFFIX = ".tunnel"


class PortForwardTransport:
    """See the module (a `kubetorch.sdk.transport.pod_transport.PodTransport`)."""

    patience = TIMING.port_forward_patience_seconds

    def __init__(self, access: Access, install_namespace: str, namespace: str) -> None:
        self.access = access
        self.install_namespace = install_namespace
        self.tunnel = Tunnel(access)
        self.login = Login(self.tunnel, namespace, install_namespace)
        self.controller_url = f"http://{CONTROLLER}.{install_namespace}{_SUFFIX}:{CONTROLLER_PORT}"
        self._controller_pod: str | None = None
        #: The pod that did not answer as the controller: another pod may lead.
        self._avoided: str | None = None
        #: Permissions to forward pods' ports, by namespace, and the end of their validity.
        self._may_forward: dict[str, tuple[bool, float]] = {}
        #: An unused connection to the controller, and the moment when it was made.
        self._spare: tuple[socket.socket, float] | None = None

    # -------------------------------------------------------------------------- the controller

    def is_installed(self, *, timeout: float | None) -> bool:
        try:
            self._controller_pod = self.tunnel.ask(self._find_controller_pod, timeout=timeout)
        except ControllerUnavailableError:
            return True
        return self._controller_pod is not None

    async def _find_controller_pod(self, client: Client) -> str | None:
        listing = await client.list(Selection(PODS, self.install_namespace, labels=LABELS))
        ready = sorted((pod for pod in listing.items if _is_ready(pod)), key=_rank)
        names = [str(pod["metadata"]["name"]) for pod in ready]
        if names:
            return next((name for name in names if name != self._avoided), names[0])
        if not listing.items and await _is_unknown(client, self.install_namespace):
            return None
        states = ", ".join(f"{pod['metadata']['name']} is {_state(pod)}" for pod in listing.items)
        raise ControllerUnavailableError(
            f"no pod of {CONTROLLER} in namespace {self.install_namespace} is ready: "
            f"{states or 'there is none'}",
            hint=f"kubectl -n {self.install_namespace} describe deployment {CONTROLLER}",
        )

    def _dial_controller(self, timeout: float | None) -> socket.socket:
        known_pod = self._controller_pod
        if known_pod is not None:
            try:
                return self.tunnel.dial(self.install_namespace, known_pod, CONTROLLER_PORT, timeout)
            except KubernetesRequestError as error:
                if isinstance(error, KubernetesForbiddenError):
                    raise
                self._controller_pod = None
        name = self._controller_pod = self.tunnel.ask(self._find_controller_pod, timeout=timeout)
        if name is None:
            raise ConfigError(
                f"Kubetorch is not installed in namespace {self.install_namespace} "
                f"({self.access.origin})",
                hint="kt install; or KT_INSTALL_NAMESPACE, if it is installed in another one",
            )
        try:
            return self.tunnel.dial(self.install_namespace, name, CONTROLLER_PORT, timeout)
        except KubernetesNotFoundError as error:
            raise ConnectionRefusedError(f"{name} is gone") from error

    def prepare(self) -> Exception | None:
        """Log in and connect to the controller at the same time, before either is needed.

        What does not succeed is tried again when it is needed; one of the reasons is returned.
        """
        failures: list[Exception] = []

        def attempt(step: Callable[[], object]) -> None:
            try:
                step()
            except (KubetorchError, OSError) as error:
                failures.append(error)

        opening = threading.Thread(
            target=attempt, args=(self._open_spare,), name="kubetorch-open", daemon=True
        )
        opening.start()
        attempt(lambda: self.login.token(""))
        opening.join()
        return failures[0] if failures else None

    def _open_spare(self) -> None:
        self._spare = self._dial_controller(TIMING.tunnel_answer_seconds), time.monotonic()

    def _take_spare(self) -> socket.socket | None:
        spare, self._spare = self._spare, None
        if spare is None:
            return None
        connection, since = spare
        if time.monotonic() - since < lib_tuning.TIMING.client_idle_connection_seconds:
            return connection
        connection.close()
        return None

    def forget_controller(self) -> None:
        """The pod of the controller did not answer: find its pod anew."""
        self._avoided, self._controller_pod = self._controller_pod, None

    # ------------------------------------------------------------------------------------ pods

    def address(self, namespace: str, service: str, pod: PodView) -> str:
        """A port of the pod, or the controller's relay where ports may not be forwarded."""
        port = urlsplit(pod.url).port if pod.url else None
        if port is None:
            return ""
        if not self._may_forward_ports(namespace):
            return relay_url(self.controller_url, namespace, service, pod.name)
        return f"http://{pod.name}.{namespace}{_SUFFIX}:{port}"

    def scaler(self, namespace: str, service: str, url: str) -> str:
        """The controller's relay: a forwarded port would bypass the scaler."""
        del url
        return service_url(self.controller_url, namespace, service)

    def connect(self, url: str, timeout: float | None) -> socket.socket:
        """Forward a port, in a connection of its own."""
        parts = urlsplit(url)
        host = parts.hostname or ""
        if not host.endswith(_SUFFIX):
            return DIRECT.connect(url, timeout)
        if url.startswith(self.controller_url):
            return self._take_spare() or self._dial_controller(timeout)
        pod, _, namespace = host.removesuffix(_SUFFIX).rpartition(".")
        try:
            return self.tunnel.dial(namespace, pod, parts.port or 80, timeout)
        except KubernetesNotFoundError as error:
            raise ConnectionRefusedError(f"pod {pod} is gone") from error
        except KubernetesForbiddenError as error:
            # Asked again, the route gets an address at the controller.
            self._may_forward[namespace] = (
                False,
                time.monotonic() + TIMING.forward_permission_seconds,
            )
            raise ConnectionAbortedError(error.message) from error
        except KubernetesRequestError as error:
            if failures.may_pass(error):  # the pod's node does not answer
                raise ConnectionAbortedError(error.message) from error
            raise

    def headers(self, url: str) -> Mapping[str, str]:
        """The host as behind any forwarded port, and for the relay the pod."""
        parts = urlsplit(url)
        if not (parts.hostname or "").endswith(_SUFFIX):
            return {}
        return {"Host": f"localhost:{parts.port}", **pod_headers(url)}

    def base_url(self, namespace: str, service: str) -> str | None:
        del namespace, service
        return None

    def close(self) -> None:
        if self._spare is not None:
            self._spare[0].close()
        self.tunnel.close()

    def _may_forward_ports(self, namespace: str) -> bool:
        permission = self._may_forward.get(namespace)
        if permission is None or permission[1] < time.monotonic():
            allowed = self.tunnel.ask(lambda client: _may_forward(client, namespace))
            permission = self._may_forward[namespace] = (
                allowed,
                time.monotonic() + TIMING.forward_permission_seconds,
            )
        return permission[0]


async def _is_unknown(client: Client, namespace: str) -> bool:
    """True if the namespace has no Service of a controller, as far as the user may see it."""
    try:
        await client.get(Ref(SERVICES, CONTROLLER, namespace))
    except KubernetesNotFoundError:
        return True
    except KubernetesForbiddenError:
        return False
    return False


async def _may_forward(client: Client, namespace: str) -> bool:
    """True if the API server says that ports of the namespace's pods may be forwarded."""
    attributes = {"namespace": namespace, "resource": "pods", "subresource": "portforward"}
    for verb in ("create", "get"):  # which of them is asked for depends on its version
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {**attributes, "verb": verb}},
        }
        try:
            answer = await client.create(review)
        except KubernetesRequestError:
            return True  # the first forward will show it
        if (answer.get("status") or {}).get("allowed"):
            return True
    return False


def _is_ready(pod: Object) -> bool:
    if (pod.get("metadata") or {}).get("deletionTimestamp"):
        return False
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in conditions
    )


def _rank(pod: Object) -> tuple[bool, str]:
    """Sort the leader first, then the oldest."""
    metadata = pod["metadata"]
    leads = labels.LEADS in (metadata.get("labels") or {})
    return not leads, str(metadata.get("creationTimestamp") or "")


def _state(pod: Object) -> str:
    status = pod.get("status") or {}
    for container in status.get("containerStatuses") or []:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason"):
            return str(waiting["reason"])
    if (pod.get("metadata") or {}).get("deletionTimestamp"):
        return "Terminating"
    return str(status.get("phase") or "Unknown")
