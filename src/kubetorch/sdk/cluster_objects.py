"""Objects of the cluster as dictionaries, for programs of 0.5, which ask `kt.globals` for them.

Where there is a cluster its API server is asked, with the rights of the user; on this machine the
same objects are made in the form of a cluster. No method changes an object: `REPLACED` names the
replacements of the methods that did.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from kubetorch.errors import ControllerRequestError, KubernetesNotFoundError, SpecError
from kubetorch.k8s import kubeconfig, pod_streams
from kubetorch.k8s.client import Client
from kubetorch.k8s.pod_streams import LogOptions
from kubetorch.k8s.resources import PODS, Ref, Selection
from kubetorch.manifests import rendering, secrets, storage
from kubetorch.manifests.services import KubernetesServices
from kubetorch.sdk import logs
from kubetorch.sdk.controller import Controller
from kubetorch.sdk.pod_objects import pod_object
from kubetorch.sdk.transport.session import Session
from kubetorch.sdk.transport.tunnel import Tunnel
from kubetorch.specs.secret import SecretRef
from kubetorch.wire.messages import WorkloadView

Object = dict[str, Any]

#: Methods that changed objects, and their replacements.
REPLACED = {
    "apply": "kt.Compute.from_manifest(manifest) and .to(), or kt apply",
    "create_pvc": "kt.Volume(...).create(), or kt volumes create",
    "create_secret": "kt.Secret(...) in kt.Compute(secrets=[...]), or kt secrets create",
    "create_service": "kt.fn(f).to(kt.Compute(...)) makes its own; kt.Endpoint names one of yours",
    "delete": "handle.teardown(), or kt teardown",
    "delete_pvc": "kt.Volume.from_name(name).delete(), or kt volumes delete",
    "delete_secret": "kt secrets delete",
    "delete_services": "handle.teardown(), or kt teardown",
    "deploy": "kt.fn(f).to(kt.Compute(...)), or kt deploy",
    "get": "the methods that are named after what they read",
    "patch": "kt.Secret(..., override=True) and a deploy, or kt secrets update",
    "patch_secret": "kt.Secret(..., override=True) and a deploy, or kt secrets update",
    "post": "kt.fn(f).to(kt.Compute(...)), or kt deploy",
    "register_workload": "kt.fn(f).to(kt.Compute(selector={...}))",
}


def method_of(controller: Controller, session: Callable[[], Session], name: str) -> Any:  # noqa: ANN401  # a method of any type
    """The method of this name; a call of one that changed objects is refused."""
    if name in REPLACED:

        def refuse(*_args: Any, **_kwargs: Any) -> None:  # noqa: ANN401  # arguments of any type
            raise SpecError(
                f"controller_client().{name}() changed the cluster past Kubetorch, and is gone",
                hint=f"instead: {REPLACED[name]}",
            )

        return refuse
    if not name.startswith("_") and hasattr(ClusterObjects, name):
        return getattr(ClusterObjects(controller, session()), name)
    raise AttributeError(f"{type(controller).__name__!r} object has no attribute {name!r}")


def _lister(api_version: str, kind: str) -> Callable[..., Object]:
    def read(self: ClusterObjects, namespace: str, label_selector: str | None = None) -> Object:
        return self._list(api_version, kind, namespace, label_selector)

    return read


def _getter(api_version: str, kind: str) -> Callable[..., Object | None]:
    def read(
        self: ClusterObjects, namespace: str, name: str, ignore_not_found: bool = False
    ) -> Object | None:
        return self._get(api_version, kind, namespace, name, ignore_not_found)

    return read


class ClusterObjects:
    """Reads the objects of a cluster, or of this machine as if it were one.

    A list is a dictionary with `items`. A missing object is a `ControllerRequestError` with status
    404, or `None` with `ignore_not_found=True`.
    """

    def __init__(self, controller: Controller, session: Session) -> None:
        self._controller = controller
        self._session = session

    list_pods = _lister("v1", "Pod")
    list_pvcs = _lister("v1", "PersistentVolumeClaim")
    list_secrets = _lister("v1", "Secret")
    list_config_maps = _lister("v1", "ConfigMap")
    list_ingresses = _lister("networking.k8s.io/v1", "Ingress")
    get_pod = _getter("v1", "Pod")
    get_pvc = _getter("v1", "PersistentVolumeClaim")
    get_service = _getter("v1", "Service")
    get_deployment = _getter("apps/v1", "Deployment")
    #: One Secret, its values in base64.
    get_secret = _getter("v1", "Secret")

    def get_pod_logs(
        self, namespace: str, name: str, container: str | None = None, tail_lines: int | None = None
    ) -> str:
        if not self._session.is_local:
            options = LogOptions(container=container, tail=tail_lines)
            ref = Ref(PODS, name, namespace)
            log_bytes: bytes = self._ask(lambda client: pod_streams.read_log(client, ref, options))
            return log_bytes.decode("utf-8", "replace")
        for view in self._controller.list_workloads(namespace):
            if any(pod.name == name for pod in view.pods):
                lines = self._controller.stream_logs(
                    namespace, view.spec.name, tail=tail_lines, pod=name
                )
                return "".join(f"{logs.text(line)}\n" for line in lines)
        raise _missing("Pod", namespace, name)

    def list_pvcs_all_namespaces(self, label_selector: str | None = None) -> Object:
        return self._list("v1", "PersistentVolumeClaim", None, label_selector)

    def list_secrets_all_namespaces(self, label_selector: str | None = None) -> Object:
        return self._list("v1", "Secret", None, label_selector)

    def list_storage_classes(self) -> Object:
        return self._list("storage.k8s.io/v1", "StorageClass", None, None)

    def list_nodes(self, label_selector: str | None = None) -> Object:
        return self._list("v1", "Node", None, label_selector)

    def discover_resources(
        self,
        namespace: str,
        label_selector: str | None = None,
        name_filter: str | None = None,
        prefix_filter: str | None = None,
        include_pods: bool = False,
    ) -> dict[str, list[Object]]:
        """The services of a namespace: `workloads`, each with name, kind and object."""
        rows = []
        for view in self._controller.list_workloads(namespace):
            name, manifest = view.spec.name, rendering.of_workload(view.spec)
            is_meant = (name_filter or "") in name and name.startswith(prefix_filter or "")
            if is_meant and _is_selected(manifest, label_selector):
                row = {
                    "name": name,
                    "namespace": namespace,
                    "kind": view.kind,
                    "status": view.status,
                    "resource": manifest,
                }
                rows.append({**row, **({"pods": _pods(view)} if include_pods else {})})
        return {"workloads": rows}

    def fetch_services_for_teardown(
        self,
        namespace: str,
        services: str | Sequence[str] | None = None,
        prefix: str | None = None,
        teardown_all: bool = False,
        username: str | None = None,
        exact_match: bool = False,
    ) -> dict[str, list[Object]]:
        """The objects that a teardown would delete: `resources` with name, kind and API version."""
        service_names = [services] if isinstance(services, str) else list(services or ())
        prefixed_names = [
            f"{username}-{name}" for name in service_names if username and not exact_match
        ]
        rows = []
        for view in self._controller.list_workloads(namespace):
            name = view.spec.name
            is_own = teardown_all and username in (None, view.spec.username)
            begins = prefix is not None and name.startswith(prefix)
            if is_own or begins or name in service_names or name in prefixed_names:
                rows += [
                    {
                        "name": manifest["metadata"]["name"],
                        "kind": manifest["kind"],
                        "api_version": manifest["apiVersion"],
                    }
                    for manifest in _objects(view)
                ]
        return {"resources": rows}

    def get_connections(self) -> dict[str, dict[str, list[str]]]:
        """The pods whose agents are connected, by service: `workloads`."""
        views = self._controller.list_workloads()
        return {
            "workloads": {
                f"{view.spec.namespace}/{view.spec.name}": [
                    pod.name for pod in view.pods if pod.url
                ]
                for view in views
            }
        }

    # ------------------------------------------------------------------------------- how it is read

    def _list(
        self, api_version: str, kind: str, namespace: str | None, labels: str | None
    ) -> Object:
        if self._session.is_local:
            manifests = self._of_this_machine(kind, namespace)
            return {"items": [manifest for manifest in manifests if _is_selected(manifest, labels)]}

        async def read(client: Client) -> list[Object]:
            resource = await client.discovery.find(api_version, kind)
            selection = Selection(resource, namespace, labels=labels or "")
            return list((await client.list(selection)).items)

        return {"items": self._ask(read)}

    def _get(
        self, api_version: str, kind: str, namespace: str, name: str, ignore_not_found: bool
    ) -> Object | None:
        async def read(client: Client) -> Object:
            resource = await client.discovery.find(api_version, kind)
            return await client.get(Ref(resource, name, namespace))

        try:
            if not self._session.is_local:
                cluster_manifest: Object = self._ask(read)
                return cluster_manifest
            for local_manifest in self._of_this_machine(kind, namespace):
                if local_manifest["metadata"]["name"] == name:
                    return local_manifest
            raise _missing(kind, namespace, name)
        except (KubernetesNotFoundError, ControllerRequestError) as error:
            if error.status_code != 404:
                raise
            if ignore_not_found:
                return None
            raise _missing(kind, namespace, name) from error

    def _ask(self, question: Callable[[Client], Awaitable[Any]]) -> Any:  # noqa: ANN401  # as the question has it
        tunnel = getattr(self._session.transport, "tunnel", None)
        if tunnel is not None:
            return tunnel.ask(question, timeout=None)
        temporary_tunnel = Tunnel(kubeconfig.find())
        try:
            return temporary_tunnel.ask(question, timeout=None)
        finally:
            temporary_tunnel.close()

    def _of_this_machine(self, kind: str, namespace: str | None) -> Iterable[Object]:
        if kind == "Secret":
            for secret in self._controller.secrets.list(namespace):
                ref = SecretRef(secret.name, secret.object_name, secret.mount_type)
                secret_namespace = secret.namespace
                values = self._controller.secrets.values(secret_namespace, secret.object_name)
                data = {
                    key: base64.b64encode(secret_value).decode()
                    for key, secret_value in values.items()
                }
                yield {**secrets.secret_manifest(ref, namespace=secret_namespace), "data": data}
        elif kind == "PersistentVolumeClaim":
            for volume in self._controller.volumes.list(namespace):
                yield storage.claim_of(
                    volume.spec,
                    namespace=volume.namespace,
                    claim=volume.claim,
                    storage_class=volume.storage_class,
                    phase=volume.phase,
                )
        elif kind in ("Pod", "Service", "Deployment"):
            for view in self._controller.list_workloads(namespace):
                manifests = _pods(view) if kind == "Pod" else _objects(view)
                yield from (manifest for manifest in manifests if manifest["kind"] == kind)


def _pods(view: WorkloadView) -> list[Object]:
    return [pod_object(view, pod) for pod in view.pods]


def _objects(view: WorkloadView) -> list[Object]:
    """The objects of a service in a cluster: its workload and its Services."""
    manifest = rendering.of_workload(view.spec)
    return [manifest, *KubernetesServices.of(view.spec, manifest).render()]


def _is_selected(manifest: Object, labels: str | None) -> bool:
    """True if an object has these labels, `name=value` with commas."""
    object_labels = manifest["metadata"].get("labels") or {}
    pairs = (pair.partition("=") for pair in (labels or "").split(",") if pair)
    return all(object_labels.get(name) == text.lstrip("=") for name, _, text in pairs)


def _missing(kind: str, namespace: str, name: str) -> ControllerRequestError:
    url = f"{kind}/{namespace}/{name}"
    return ControllerRequestError("GET", url, 404, f"there is no {kind} {name!r} in {namespace!r}")
