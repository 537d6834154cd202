"""The Kubernetes Services of a workload: where calls go, and the names of its pods."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from kubetorch.manifests import labels, locating, serving
from kubetorch.manifests.kinds import Kind, Manifest
from kubetorch.specs.compute import ComputeSpec

#: Port of the Service, whatever the agent's is.
PORT = 80
_NAME_LIMIT = 63
_HEADLESS = "-headless"
_CALLED = "-http"


def pool(compute: ComputeSpec, manifest: Mapping[str, Any] | None, *, name: str) -> dict[str, str]:
    """Labels of all pods of a workload.

    What the user says goes first, then what the object itself finds its pods by, then our label.

    Args:
        compute: The compute.
        manifest: What it was rendered as; `None` for one that only names pods that are there.
        name: Name of the service.
    """
    if compute.selector is not None:
        return _with_job_name(compute.selector, name)
    if manifest is None:
        return {labels.SERVICE: name}
    return pods_of(manifest, locating.kind_of(manifest, compute.pod_template_path), name=name)


def pods_of(manifest: Mapping[str, Any], kind: Kind, *, name: str) -> dict[str, str]:
    """Labels of all pods of an object.

    Args:
        manifest: The object.
        kind: Its kind.
        name: Name of the service.
    """
    if kind.pool is not None:
        return {kind.pool: manifest["metadata"]["name"] or name}
    chosen = (manifest.get("spec") or {}).get("selector")
    if kind.has_selector and chosen and chosen.get("matchLabels"):
        return dict(chosen["matchLabels"])
    return {labels.SERVICE: name}


#: Label of training jobs' pods. A selector that leaves its value open means the workload's job.
_JOB_NAME = "training.kubeflow.org/job-name"


def _with_job_name(selector: tuple[tuple[str, str], ...], name: str) -> dict[str, str]:
    return {key: text or name if key == _JOB_NAME else text for key, text in selector}


def called(
    compute: ComputeSpec, manifest: Mapping[str, Any] | None, *, name: str
) -> dict[str, str]:
    """Labels of the pods that calls go to: of a RayCluster the head, of a training job the master.

    The arguments are those of `pool`.
    """
    if compute.endpoint is not None and compute.endpoint.selector is not None:
        return compute.endpoint.selector
    found = pool(compute, manifest, name=name)
    if manifest is None:
        return found
    return found | dict(locating.kind_of(manifest, compute.pod_template_path).routing)


def render(
    compute: ComputeSpec, manifest: Mapping[str, Any] | None, *, namespace: str, name: str
) -> list[Manifest]:
    """The Services of a workload, the one that is called first.

    There is none where the user has a URL, and none for a Knative Service, which makes its own.
    Several pods that answer one call, and a RayCluster, have a headless one too: it gives each pod
    a name, also before it is ready.

    Args:
        compute: The compute.
        manifest: What it was rendered as; `None` for one that only names pods that are there.
        namespace: Namespace of the objects.
        name: Name of the service.
    """
    found = []
    kind = None if manifest is None else locating.kind_of(manifest, compute.pod_template_path)
    is_called_elsewhere = compute.endpoint is not None and compute.endpoint.url is not None
    port = _port(compute, manifest, kind)
    if not is_called_elsewhere and (kind is None or not kind.is_autoscaled):
        selector = called(compute, manifest, name=name)
        # Of one name there is one: that of the kind's controller has the names of pods.
        own = _with(name, _CALLED) if kind is not None and kind.has_service else name
        found.append(_service(namespace, own, name, selector, port))
    if _is_headless(compute, kind):
        spec = {"clusterIP": "None", "publishNotReadyAddresses": True}
        service = _service(
            namespace, headless_name(name), name, pool(compute, manifest, name=name), port
        )
        found.append(service | {"spec": service["spec"] | spec})
    return found


def url(
    compute: ComputeSpec, manifest: Mapping[str, Any] | None, *, namespace: str, name: str
) -> str:
    """Where programs in the cluster call a workload. The arguments are those of `render`."""
    if compute.endpoint is not None and compute.endpoint.base_url is not None:
        return compute.endpoint.base_url
    found = render(compute, manifest, namespace=namespace, name=name)
    called_name = found[0]["metadata"]["name"] if found else name
    return f"http://{called_name}.{namespace}.svc.cluster.local"


def is_scaled(compute: ComputeSpec, manifest: Mapping[str, Any] | None) -> bool:
    """Whether calls go to a scaler, which counts them and makes pods for them.

    The arguments are those of `render`.
    """
    if manifest is None or (compute.endpoint is not None and compute.endpoint.url is not None):
        return False
    return locating.kind_of(manifest, compute.pod_template_path).is_autoscaled


def headless_name(name: str) -> str:
    """Name of the headless Service: `<name>-headless`, or the most of it that names allow."""
    return _with(name, _HEADLESS)


def _with(name: str, suffix: str) -> str:
    if len(name) + len(suffix) <= _NAME_LIMIT:
        return f"{name}{suffix}"
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{name[: _NAME_LIMIT - len(suffix) - 7]}-{digest}{suffix}"


def _is_headless(compute: ComputeSpec, kind: Kind | None) -> bool:
    if kind is not None and kind.is_autoscaled:
        return False
    is_ray = kind is not None and kind.kind == "RayCluster"
    return is_ray or compute.distribution is not None or compute.pods > 1


def _port(compute: ComputeSpec, manifest: Mapping[str, Any] | None, kind: Kind | None) -> int:
    if manifest is None or kind is None:
        return compute.server_port or serving.PORT
    return serving.port(locating.places(dict(manifest), kind)[0].container)


def _service(
    namespace: str, name: str, workload: str, selector: Mapping[str, str], port: int
) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": labels.of_pods(name=workload, username=None),
        },
        "spec": {
            "selector": dict(selector),
            "ports": [{"name": "http", "port": PORT, "targetPort": port}],
        },
    }
