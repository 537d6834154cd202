"""Why each field of a rendered manifest stands there.

A field belongs to the parameter without which it would be another, or absent: that is found by
rendering without each of them in turn. What no parameter changes is the user's own, or one of the
constants that this module lists. So a field that nobody can explain is an error, and an
explanation cannot be older than the code that it explains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from kubetorch.manifests import gpus, labels, locating, raycluster, reading
from kubetorch.manifests.kinds import Manifest, Path
from kubetorch.manifests.parameters import PARAMETERS
from kubetorch.specs.autoscaling import AutoscalingSpec
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.frozen import thaw

Leaves = dict[Path, object]
Render = Callable[[ComputeSpec], Manifest]

_OBJECTS = "https://kubernetes.io/docs/concepts/overview/working-with-objects/"
_PROBES = "https://kubernetes.io/docs/concepts/configuration/liveness-readiness-startup-probes/"
_TRAINER = "https://www.kubeflow.org/docs/components/trainer/reference/"
_RAY = "https://docs.ray.io/en/latest/cluster/kubernetes/user-guides/config.html"
_SERVICES = "https://kubernetes.io/docs/concepts/services-networking/service/"
_HEADLESS = f"{_SERVICES}#headless-services"
_STATEFUL = "https://kubernetes.io/docs/concepts/workloads/controllers/statefulset/"
_CRON = "https://kubernetes.io/docs/concepts/workloads/controllers/cron-jobs/"
_OWN = "the user's manifest"
_OURS = "Kubetorch"


@dataclass(frozen=True, slots=True)
class Constant:
    """A field that no parameter changes.

    Attributes:
        path: The end of its path; `*` stands for anything within one key.
        about: What it is for; the name of a parameter where one decides on it that said nothing.
        source: What defines it; that of the parameter if not given.
    """

    path: Path
    about: str
    source: str = ""


#: The first that fits explains a field.
CONSTANTS = (
    Constant(("apiVersion",), "the kind", _OBJECTS),
    Constant(("kind",), "the kind", _OBJECTS),
    Constant(("metadata", "name"), "name of the service", _OBJECTS),
    Constant(("metadata", "namespace"), "namespace", _OBJECTS),
    Constant(("labels", labels.VERSION), "version of the package", _OURS),
    Constant(("labels", labels.TEMPLATE), "what the object was made from", _OURS),
    Constant(("labels", labels.USERNAME), "who deployed it", _OURS),
    Constant(("labels", labels.MODULE), "module of the callable", _OURS),
    Constant(("labels", labels.SERVICE), "name of the service", _OURS),
    Constant(("labels", labels.APP), "name of the service", _OURS),
    Constant(("selector", "matchLabels", labels.SERVICE), "pods of the service", _OURS),
    Constant(("annotations", labels.ALLOWED_SERIALIZATION), "allowed_serialization"),
    Constant(("annotations", raycluster.OVERWRITE_COMMAND), "the agent starts Ray", _RAY),
    Constant(("annotations", "autoscaling.knative.dev/*"), "autoscaling"),
    Constant(("annotations", "serving.knative.dev/progress-deadline"), "autoscaling"),
    Constant(("env", "<KT_APP_PORT>", "*"), "port of the app", _OURS),
    Constant(("env", "<KT_APP_HEALTHCHECK>", "*"), "health check of the app", _OURS),
    Constant(("strategy", "type"), "no call reaches pods of two templates", _OURS),
    Constant(("concurrencyPolicy",), "pods that serve do not end", _CRON),
    Constant(("podManagementPolicy",), "one call goes to all pods", _STATEFUL),
    Constant(("serviceName",), "gives each pod a name", _STATEFUL),
    Constant(("spec", "replicas"), "replicas"),
    Constant(("suspend",), "queue_name"),
    Constant(("containers", "<*>", "name"), "container of the agent", _OURS),
    Constant(("image",), "image"),
    Constant(("command", "*"), "starts the agent", _OURS),
    Constant(("args", "*"), "starts the agent", _OURS),
    Constant(("ports", "<http1>", "*"), "server_port"),
    Constant(("ports", "<http>", "*"), "where callers find the service", _SERVICES),
    Constant(("ports", "<*>", "*"), "port of Ray's head", _RAY),
    Constant(("startupProbe", "*"), "launch_timeout"),
    Constant(("*Probe", "*"), "asks the agent", _PROBES),
    Constant(("*Probe", "httpGet", "*"), "asks the agent", _PROBES),
    Constant(("env", "<KT_LOG_LEVEL>", "*"), "logging"),
    Constant(("resources", "*", gpus.RESOURCE), "gpus"),
    Constant(("resources",), "cpus"),
    Constant(("capabilities", "add", "*"), "freeze"),
    Constant(("serviceAccountName",), "service_account_name"),
    Constant(("volumes", "<dshm>", "*"), "shared_memory_limit"),
    Constant(("volumes", "<dshm>", "emptyDir", "*"), "shared_memory_limit"),
    Constant(("volumeMounts", "</dev/shm>", "*"), "shared_memory_limit"),
    Constant(("tolerations", "*", "*"), "gpus"),
    Constant(("rayVersion",), "RayCluster", _RAY),
    Constant(("enableInTreeAutoscaling",), "RayCluster", _RAY),
    Constant(("rayStartParams", "*"), "RayCluster", _RAY),
    Constant(("rayStartParams",), "RayCluster", _RAY),
    Constant(("<worker-group>", "*"), "replicas"),
    Constant(("spec", "selector", "*"), "pods that calls go to", _SERVICES),
    Constant(("clusterIP",), "gives each pod a name", _HEADLESS),
    Constant(("publishNotReadyAddresses",), "also before it is ready", _HEADLESS),
    Constant(("targetJobs", "*", "name"), "the job that trains", _TRAINER),
    Constant(("<node>", "name"), "the container that trains", _TRAINER),
)


def explain(compute: ComputeSpec, render: Render) -> tuple[Manifest, dict[Path, str]]:
    """A rendered manifest, and where each of its fields comes from.

    Args:
        compute: The compute.
        render: Renders a compute for this service.

    Raises:
        KeyError: Nothing explains a field.
    """
    manifest = render(compute)
    found = leaves(manifest)
    own = _own(compute)
    changes = list(_by_parameter(compute, render, found))
    explained = {}
    for path, value in found.items():
        names = [text for text, changed in changes if path in changed]
        if names:
            explained[path] = names[0]
        elif own.get(path, _ABSENT) == value:
            explained[path] = _OWN
        else:
            explained[path] = _constant(path)
    return manifest, explained


_ABSENT = object()


def _by_parameter(
    compute: ComputeSpec, render: Render, found: Leaves
) -> Iterator[tuple[str, set[Path]]]:
    """Each parameter that says something, and the fields that would not be without it."""
    without = _unsaid(compute)
    for name in ("service_template", *_OF_SERVICES, *_SOURCES):
        if getattr(compute, name) == getattr(without, name):
            continue
        other = leaves(render(replace(compute, **{name: getattr(without, name)})))
        changed = {path for path, value in found.items() if other.get(path, _ABSENT) != value}
        yield _text(name, _SOURCES.get(name) or _OF_SERVICES.get(name, _OURS)), changed


def _unsaid(compute: ComputeSpec) -> ComputeSpec:
    """A compute of the same mode in which nothing else is said."""
    if compute.manifest is not None:
        return reading.declared(thaw(compute.manifest), pod_template_path=compute.pod_template_path)
    scaling = None if compute.autoscaling is None else AutoscalingSpec()
    return ComputeSpec(autoscaling=scaling, distribution=compute.distribution)


def _own(compute: ComputeSpec) -> Leaves:
    """The fields of the user's manifest, as they are called in the rendered one."""
    if compute.manifest is None:
        return {}
    manifest = thaw(compute.manifest)
    kind = locating.kind_of(manifest, compute.pod_template_path)
    for place in locating.places(manifest, kind) if not kind.is_custom else ():
        place.container["name"] = kind.container
    agents = ("containers", f"<{kind.container}>", "name")
    return {path: value for path, value in leaves(manifest).items() if path[-3:] != agents}


def _constant(path: Path) -> str:
    for constant in CONSTANTS:
        end = path[-len(constant.path) :]
        if len(end) == len(constant.path) and all(map(fnmatchcase, end, constant.path)):
            return _text(constant.about, constant.source or _SOURCES[constant.about])
    raise KeyError(f"nothing explains {'.'.join(path)}")


#: Parameters that say which pods are called.
_OF_SERVICES = dict.fromkeys(("selector", "endpoint"), _SERVICES)
_SOURCES = {one.name: one.source for one in PARAMETERS}


def _text(about: str, source: str) -> str:
    return f"{about}: {source.removeprefix('https://')}"


# ---------------------------------------------------------------------------------------- leaves


def leaves(node: Any, path: Path = ()) -> Leaves:  # noqa: ANN401  # any node of a manifest
    """All values of a manifest by path; entries of lists are called by what tells them apart."""
    found: Leaves = {}
    if isinstance(node, dict) and node:
        for key, value in node.items():
            found |= leaves(value, (*path, key))
    elif isinstance(node, list) and node:
        for number, value in enumerate(node):
            found |= leaves(value, (*path, entry_name(value, number)))
    else:
        found[path] = node
    return found


def entry_name(value: object, number: int) -> str:
    """What tells an entry of a list apart from the others, in angle brackets."""
    if not isinstance(value, dict):
        return f"<{value}>"
    names = (value.get(key) for key in ("mountPath", "name", "key", "groupName"))
    return f"<{next((name for name in names if name), number)}>"
