"""The Kubernetes Services of a workload: the address of calls, and the names of its pods."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from kubetorch.manifests import agent_container, labels
from kubetorch.manifests.kinds import Kind, Manifest
from kubetorch.manifests.workload_manifest import WorkloadManifest
from kubetorch.specs.compute import AGENT_PORT, ComputeSpec
from kubetorch.specs.workload import WorkloadSpec

#: Port of the Service; it forwards to the agent's port.
PORT = 80
_NAME_CHARACTERS = 63
_HEADLESS_SUFFIX = "-headless"
_CALLED_SUFFIX = "-http"


#: Label of training jobs' pods. A selector that leaves its value open means the workload's job.
_JOB_NAME = "training.kubeflow.org/job-name"


class KubernetesServices:
    """The Services of one workload, and the labels of the pods behind them.

    There is no manifest where the user only selects existing pods.
    """

    def __init__(
        self, compute: ComputeSpec, manifest: Manifest | None, *, namespace: str, name: str
    ) -> None:
        path = compute.pod_template_path
        self._compute = compute
        self._workload = None if manifest is None else WorkloadManifest.parse(manifest, path)
        self._kind = None if self._workload is None else self._workload.kind
        self._namespace = namespace
        self._name = name

    @classmethod
    def of(cls, spec: WorkloadSpec, manifest: Manifest | None) -> KubernetesServices:
        return cls(spec.compute, manifest, namespace=spec.namespace, name=spec.name)

    @property
    def pool(self) -> dict[str, str]:
        """Labels of all pods of the workload.

        The user's selector comes first, then the object's own selector, then our label.
        """
        selector = self._compute.selector
        if selector is not None:
            return {key: text or self._name if key == _JOB_NAME else text for key, text in selector}
        if self._workload is None:
            return {labels.SERVICE: self._name}
        return pods_of(self._workload.object, self._workload.kind, name=self._name)

    @property
    def called(self) -> dict[str, str]:
        """Labels of the pods that calls go to: of a RayCluster the head, of a job the master."""
        endpoint = self._compute.endpoint
        if endpoint is not None and endpoint.selector is not None:
            return endpoint.selector
        return self.pool if self._kind is None else self.pool | dict(self._kind.routing)

    @property
    def is_scaled(self) -> bool:
        """True if calls go to a scaler, which counts them and makes pods for them."""
        return self._kind is not None and self._kind.is_autoscaled and not self._has_url

    @property
    def url(self) -> str:
        endpoint = self._compute.endpoint
        if endpoint is not None and endpoint.base_url is not None:
            return endpoint.base_url
        return f"http://{self.called_name or self._name}.{self._namespace}.svc.cluster.local"

    @property
    def called_name(self) -> str:
        """The name of the Service for calls; empty where nothing of ours is for them."""
        services = [] if self._has_url else self.render()
        return services[0]["metadata"]["name"] if services else ""

    @property
    def _has_url(self) -> bool:
        endpoint = self._compute.endpoint
        return endpoint is not None and endpoint.url is not None

    def render(self) -> list[Manifest]:
        """The Services: first the one for calls.

        There is none where the user has a URL, and none for a Knative Service, which makes its own.
        Several pods that answer one call, and a RayCluster, have a headless Service too: it gives
        each pod a name, also before it is ready.
        """
        services = []
        kind = self._kind
        if not self._has_url and (kind is None or not kind.is_autoscaled):
            # The kind's controller makes a Service of the workload's name, for the names of pods.
            has_namesake = kind is not None and kind.has_service
            called_name = _with_suffix(self._name, _CALLED_SUFFIX) if has_namesake else self._name
            services.append(self._service(called_name, self.called))
        if self._is_headless:
            service = self._service(headless_name(self._name), self.pool)
            service["spec"] |= {"clusterIP": "None", "publishNotReadyAddresses": True}
            services.append(service)
        return services

    @property
    def _is_headless(self) -> bool:
        kind, compute = self._kind, self._compute
        if (kind is not None and kind.is_autoscaled) or compute.autoscaling is not None:
            return False
        is_ray = kind is not None and kind.kind == "RayCluster"
        return is_ray or compute.distribution is not None or compute.pods > 1

    def _service(self, name: str, selector: Mapping[str, str]) -> Manifest:
        if self._workload is None:
            port = self._compute.server_port or AGENT_PORT
        else:
            port = agent_container.agent_port(self._workload.primary.container)
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {
                "name": name,
                "namespace": self._namespace,
                "labels": labels.of_pods(name=self._name, username=None),
            },
            "spec": {
                "selector": dict(selector),
                "ports": [{"name": "http", "port": PORT, "targetPort": port}],
            },
        }


def pods_of(manifest: Mapping[str, Any], kind: Kind, *, name: str) -> dict[str, str]:
    """Labels of all pods of an object."""
    if kind.pool is not None:
        return {kind.pool: manifest["metadata"]["name"] or name}
    chosen = (manifest.get("spec") or {}).get("selector")
    if kind.has_selector and chosen and chosen.get("matchLabels"):
        return dict(chosen["matchLabels"])
    return {labels.SERVICE: name}


def headless_name(name: str) -> str:
    """Name of the headless Service: `<name>-headless`, shortened by a digest if it is too long."""
    return _with_suffix(name, _HEADLESS_SUFFIX)


def _with_suffix(name: str, suffix: str) -> str:
    if len(name) + len(suffix) <= _NAME_CHARACTERS:
        return f"{name}{suffix}"
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{name[: _NAME_CHARACTERS - len(suffix) - 7]}-{digest}{suffix}"
