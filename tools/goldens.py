"""`python -m tools.goldens FILE.py`: the YAML of every compute of a file, with origins.

The file is run as a module, so what stands below `if __name__ == "__main__"` is not. Each
`kt.Compute` at its top level is printed as the objects that a deploy would apply, named after its
variable, with a comment of where each field comes from. With `--into FOLDER` each goes to a file of
its own.

A field belongs to the parameter without which it would be another, or absent: that is found by
rendering without each of them in turn. What no parameter changes is the user's own, or one of the
constants that this module lists. So a field that nobody can explain is an error, and an
explanation cannot be older than the code that it explains.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from inspect import isclass
from pathlib import Path as main_Path
from typing import Any

import yaml

from kubetorch.manifests import (
    labels,
    parameters,
    raycluster,
    rendering,
    scheduling,
    storage,
)
from kubetorch.manifests.kinds import Manifest, Path
from kubetorch.manifests.parameters import PARAMETERS
from kubetorch.manifests.services import KubernetesServices
from kubetorch.manifests.workload_manifest import WorkloadManifest
from kubetorch.specs.autoscaling import AutoscalingSpec
from kubetorch.specs.compute import ComputeSpec, thaw

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
_USER_MANIFEST = "the user's manifest"
_KUBETORCH = "Kubetorch"


@dataclass(frozen=True, slots=True)
class Constant:
    """A field that no parameter changes."""

    path: Path
    about: str
    source: str = ""


#: The first that fits explains a field.
CONSTANTS = (
    Constant(("apiVersion",), "the kind", _OBJECTS),
    Constant(("kind",), "the kind", _OBJECTS),
    Constant(("metadata", "name"), "name of the service", _OBJECTS),
    Constant(("metadata", "namespace"), "namespace", _OBJECTS),
    Constant(("labels", labels.VERSION), "version of the package", _KUBETORCH),
    Constant(("labels", labels.TEMPLATE), "what the object was made from", _KUBETORCH),
    Constant(("labels", labels.USERNAME), "who deployed it", _KUBETORCH),
    Constant(("labels", labels.MODULE), "module of the callable", _KUBETORCH),
    Constant(("labels", labels.SERVICE), "name of the service", _KUBETORCH),
    Constant(("labels", labels.APP), "name of the service", _KUBETORCH),
    Constant(("selector", "matchLabels", labels.SERVICE), "pods of the service", _KUBETORCH),
    Constant(("annotations", labels.ALLOWED_SERIALIZATION), "allowed_serialization"),
    Constant(("annotations", raycluster.OVERWRITE_COMMAND), "the agent starts Ray", _RAY),
    Constant(("annotations", "autoscaling.knative.dev/*"), "autoscaling"),
    Constant(("annotations", "serving.knative.dev/progress-deadline"), "autoscaling"),
    Constant(("env", "<KT_APP_PORT>", "*"), "port of the app", _KUBETORCH),
    Constant(("env", "<KT_APP_HEALTHCHECK>", "*"), "health check of the app", _KUBETORCH),
    Constant(("strategy", "type"), "no call reaches pods of two templates", _KUBETORCH),
    Constant(("concurrencyPolicy",), "pods that serve do not end", _CRON),
    Constant(("podManagementPolicy",), "one call goes to all pods", _STATEFUL),
    Constant(("serviceName",), "gives each pod a name", _STATEFUL),
    Constant(("spec", "replicas"), "replicas"),
    Constant(("suspend",), "queue_name"),
    Constant(("containers", "<*>", "name"), "container of the agent", _KUBETORCH),
    Constant(("image",), "image"),
    Constant(("command", "*"), "starts the agent", _KUBETORCH),
    Constant(("args", "*"), "starts the agent", _KUBETORCH),
    Constant(("ports", "<http1>", "*"), "server_port"),
    Constant(("ports", "<http>", "*"), "where callers find the service", _SERVICES),
    Constant(("ports", "<*>", "*"), "port of Ray's head", _RAY),
    Constant(("startupProbe", "*"), "launch_timeout"),
    Constant(("*Probe", "*"), "asks the agent", _PROBES),
    Constant(("*Probe", "httpGet", "*"), "asks the agent", _PROBES),
    Constant(("env", "<KT_LOG_LEVEL>", "*"), "logging"),
    Constant(("resources", "*", scheduling.GPU_RESOURCE), "gpus"),
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
    """A rendered manifest, and the origin of each of its fields."""
    manifest = render(compute)
    rendered_leaves = leaves(manifest)
    user_leaves = _user_leaves(compute)
    changes = list(_by_parameter(compute, render, rendered_leaves))
    explained = {}
    for path, value in rendered_leaves.items():
        names = [text for text, changed in changes if path in changed]
        if names:
            explained[path] = names[0]
        elif user_leaves.get(path, _NO_VALUE) == value:
            explained[path] = _USER_MANIFEST
        else:
            explained[path] = _constant(path)
    return manifest, explained


_NO_VALUE = object()


def _by_parameter(
    compute: ComputeSpec, render: Render, rendered_leaves: Leaves
) -> Iterator[tuple[str, set[Path]]]:
    """Each parameter that is set, and the fields that would differ without it."""
    without = _without_parameters(compute)
    for name in ("service_template", *_OF_SERVICES, *_SOURCES):
        if getattr(compute, name) == getattr(without, name):
            continue
        other_leaves = leaves(render(replace(compute, **{name: getattr(without, name)})))
        changed = {
            path
            for path, value in rendered_leaves.items()
            if other_leaves.get(path, _NO_VALUE) != value
        }
        yield _text(name, _SOURCES.get(name) or _OF_SERVICES.get(name, _KUBETORCH)), changed


def _without_parameters(compute: ComputeSpec) -> ComputeSpec:
    """A compute of the same mode without further parameters."""
    if compute.manifest is not None:
        return parameters.read_manifest(
            thaw(compute.manifest), pod_template_path=compute.pod_template_path
        )
    scaling = None if compute.autoscaling is None else AutoscalingSpec()
    return ComputeSpec(autoscaling=scaling, distribution=compute.distribution)


def _user_leaves(compute: ComputeSpec) -> Leaves:
    """The fields of the user's manifest, by their paths in the rendered manifest."""
    if compute.manifest is None:
        return {}
    manifest = thaw(compute.manifest)
    workload = WorkloadManifest.parse(manifest, compute.pod_template_path)
    kind = workload.kind
    for template in workload.templates if not kind.is_custom else ():
        template.container["name"] = kind.container
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
_SOURCES = {parameter.name: parameter.source for parameter in PARAMETERS}


def _text(about: str, source: str) -> str:
    return f"{about}: {source.removeprefix('https://')}"


# ---------------------------------------------------------------------------------------- leaves


def leaves(node: Any, path: Path = ()) -> Leaves:  # noqa: ANN401  # any node of a manifest
    """All values of a manifest by path; entries of lists have their names in the path."""
    leaves_by_path: Leaves = {}
    if isinstance(node, dict) and node:
        for key, value in node.items():
            leaves_by_path |= leaves(value, (*path, key))
    elif isinstance(node, list) and node:
        for number, value in enumerate(node):
            leaves_by_path |= leaves(value, (*path, entry_name(value, number)))
    else:
        leaves_by_path[path] = node
    return leaves_by_path


def entry_name(value: object, number: int) -> str:
    """The name, path or key of an entry of a list, in angle brackets."""
    if not isinstance(value, dict):
        return f"<{value}>"
    names = (value.get(key) for key in ("mountPath", "name", "key", "groupName"))
    return f"<{next((name for name in names if name), number)}>"


_WIDTH = 2
#: Keys that come first in a dictionary, for readers; the other keys keep their order.
_FIRST = ("apiVersion", "kind", "metadata", "name", "namespace", "image", "command", "args")
#: Column at which comments begin, where lines are not longer.
_COLUMN = 56


def dump(manifest: Manifest, origins: Mapping[Path, str]) -> str:
    """A manifest as YAML; fields of one origin have one comment, at the top of their template."""
    return "".join(f"{line}\n" for line in _mapping(manifest, (), origins, 0, inherited=None))


def _mapping(
    node: Manifest, path: Path, origins: Mapping[Path, str], depth: int, *, inherited: str | None
) -> Iterator[str]:
    first = [key for key in _FIRST if key in node]
    for key in (*first, *(key for key in node if key not in _FIRST)):
        value = node[key]
        yield from _item(f"{_scalar(key)}:", value, (*path, key), origins, depth, inherited)


def _item(
    head: str,
    value: Any,  # noqa: ANN401  # any node of a manifest
    path: Path,
    origins: Mapping[Path, str],
    depth: int,
    inherited: str | None,
) -> Iterator[str]:
    common = _common(value, path, origins)
    comment = common if common != inherited else None
    indent = " " * (_WIDTH * depth)
    if isinstance(value, dict) and value:
        yield _line(f"{indent}{head}", comment)
        yield from _mapping(value, path, origins, depth + 1, inherited=common)
    elif isinstance(value, list) and value:
        yield _line(f"{indent}{head}", comment)
        for number, entry in enumerate(value):
            where = (*path, entry_name(entry, number))
            yield from _entry(entry, where, origins, depth, common)
    else:
        yield _line(f"{indent}{head} {_scalar(value)}", comment)


def _entry(
    value: Any,  # noqa: ANN401  # any node of a manifest
    path: Path,
    origins: Mapping[Path, str],
    depth: int,
    inherited: str | None,
) -> Iterator[str]:
    """An entry of a list: `- ` stands in the template of the first line's indentation."""
    indent = " " * (_WIDTH * depth)
    common = _common(value, path, origins)
    comment = common if common != inherited else None
    if not isinstance(value, dict) or not value:
        yield _line(f"{indent}- {_scalar(value)}", comment)
        return
    lines = _mapping(value, path, origins, depth + 1, inherited=common)
    first = next(lines)[len(indent) + _WIDTH :]
    yield _line(f"{indent}- {first}", comment)
    yield from lines


def _common(value: object, path: Path, origins: Mapping[Path, str]) -> str | None:
    """The origin of all fields in a node, if they have one."""
    leaf_origins = {origins[leaf] for leaf in leaves(value, path)}
    return leaf_origins.pop() if len(leaf_origins) == 1 else None


def _line(text: str, comment: str | None) -> str:
    return text if comment is None else f"{text:<{_COLUMN}}  # {comment}"


def _scalar(value: object) -> str:
    if value in ({}, []):
        return str(value)
    text = yaml.safe_dump(value, default_style=None, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the objects; the exit status is 1 if the file defines none."""
    parser = argparse.ArgumentParser(prog="python -m tools.goldens", description=__doc__)
    parser.add_argument("file", help="a Python file that defines kt.Compute objects")
    parser.add_argument("--into", type=main_Path, metavar="FOLDER", help="write a file for each")
    options = parser.parse_args(arguments)
    computes = dict(render_file(options.file))
    if not computes:
        sys.stderr.write(f"{options.file} defines no kt.Compute at its top level\n")
        return 1
    if options.into is None:
        sys.stdout.write("---\n".join(f"# {name}\n{text}" for name, text in computes.items()))
        return 0
    options.into.mkdir(parents=True, exist_ok=True)
    for name, text in computes.items():
        (options.into / f"{name}.yaml").write_text(text)
    return 0


def render_file(file: str) -> Iterator[tuple[str, str]]:
    """The variable of each compute of a file, in the order of their definition, and its YAML."""
    for variable, value in runpy.run_path(file).items():
        # The facade is a layer above: known by what it becomes.
        spec = value.to_spec() if hasattr(value, "to_spec") and not isclass(value) else None
        if not isinstance(spec, ComputeSpec):
            continue
        name = value.service_name or variable.replace("_", "-")
        yield variable, "---\n".join(documents(spec, name=name, namespace=value.namespace))


def documents(compute: ComputeSpec, *, name: str, namespace: str) -> Iterator[str]:
    """All objects of a service as commented YAML: its pods, its Services, the claims of volumes."""

    def render(compute: ComputeSpec) -> list[Manifest]:
        return _objects(compute, name=name, namespace=namespace)

    for key in map(_key, render(compute)):
        yield dump(*explain(compute, partial(_object_of_key, render, key)))


def _objects(compute: ComputeSpec, *, name: str, namespace: str) -> list[Manifest]:
    pods = (
        None
        if compute.is_selector_only
        else rendering.render(compute, namespace=namespace, name=name)
    )
    claims = [storage.claim(volume, namespace=namespace) for volume in compute.volumes]
    manifests = [
        pods,
        *KubernetesServices(compute, pods, namespace=namespace, name=name).render(),
        *claims,
    ]
    return [manifest for manifest in manifests if manifest is not None]


def _object_of_key(
    render: Callable[[ComputeSpec], list[Manifest]], key: tuple[str, str], compute: ComputeSpec
) -> Manifest:
    """The object of that key; empty if the compute renders no such object."""
    return next((manifest for manifest in render(compute) if _key(manifest) == key), {})


def _key(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


if __name__ == "__main__":
    raise SystemExit(main())
