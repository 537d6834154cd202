"""Counts the pods that a manifest asks for, kind by kind."""

from __future__ import annotations

import copy
from typing import Any

from kubetorch.errors import SpecError
from kubetorch.manifests import kinds
from kubetorch.manifests.kinds import Group, Kind, Manifest, Path
from kubetorch.manifests.workload_manifest import ManifestParameter, PodTemplate, WorkloadManifest
from kubetorch.specs.compute import ComputeSpec

WORKER_GROUP = "worker-group"


_REPLICAS = "https://kubernetes.io/docs/concepts/workloads/"


def read(workload: WorkloadManifest) -> int:
    """Number of pods of the object: the called pods and the workers."""
    manifest, kind = workload.object, workload.kind
    called = _number(manifest, kind.primary.replicas, kind.primary.default)
    factor = _number(manifest, kind.factor, 1)
    return called * factor + sum(_workers(manifest, group) for group in kind.workers)


def running(workload: WorkloadManifest) -> int:
    """Number of pods of the latest template that run at one time, once all have started.

    It is less than `read` where a Job needs fewer pods to complete, a rolling update leaves pods of
    a StatefulSet as they are (`partition`), or a RayCluster's group is limited.
    """
    pod_count = read(workload)
    manifest, kind = workload.object, workload.kind
    paths = [] if kind.primary.replicas is None else [kind.primary.replicas]
    if paths and paths[0][-1] == "parallelism":
        parallelism = _number(manifest, paths[0], kind.primary.default)
        completions = _number(manifest, (*paths[0][:-1], "completions"), parallelism)
        return pod_count // max(1, parallelism) * min(parallelism, completions)
    if kind.kind == "StatefulSet":
        partition = ("spec", "updateStrategy", "rollingUpdate", "partition")
        return max(0, pod_count - _number(manifest, partition, 0))
    for group in kind.workers if kind.kind == "RayCluster" else ():
        for path in kinds.expand(manifest, group.replicas or ()):
            number = _number(manifest, path, group.default)
            pod_count -= max(0, number - _number(manifest, (*path[:-1], "maxReplicas"), number))
    return pod_count


def _workers(manifest: Manifest, group: Group) -> int:
    if group.replicas is None:
        return 0
    paths = kinds.expand(manifest, group.replicas)
    return sum(_number(manifest, path, group.default) for path in paths)


def _number(manifest: Manifest, path: Path | None, default: int) -> int:
    number = None if path is None else kinds.get(manifest, path)
    if number is None:
        return default
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        assert path is not None
        raise SpecError(f"{'.'.join(path)} is {number!r}; it must be a whole number, 0 or more")
    return number


def write(workload: WorkloadManifest, pod_count: int) -> None:
    if pod_count == read(workload):
        return
    manifest, kind = workload.object, workload.kind
    if kind.primary.replicas is None and not kind.workers:
        raise SpecError(
            f"replicas is {pod_count}; the number of pods of a {kind.kind} is not chosen by its "
            "manifest",
            hint="leave it out, or use a Deployment",
        )
    numbered = [group for group in kind.workers if group.replicas is not None]
    if numbered:
        _write_workers(manifest, kind, numbered[0], pod_count)
        workload.locate_templates()
        return
    factor = _number(manifest, kind.factor, 1)
    if not factor or pod_count % factor:
        assert kind.factor is not None
        raise SpecError(
            f"replicas is {pod_count}; the {kind.kind} has {factor} groups of equal size, at "
            f"{'.'.join(kind.factor)}",
            hint=f"choose a multiple of {factor}, or change the manifest",
        )
    assert kind.primary.replicas is not None
    _set_number(manifest, kind.primary.replicas, pod_count // factor)


def patch_to_none(workload: WorkloadManifest) -> Manifest:
    """The patch that leaves an object without pods; empty for kinds that always have pods.

    A kind that can be suspended is suspended: a controller may take an object of zero replicas for
    ended.
    """
    kind = workload.kind
    changed: Manifest = {}
    if kind.kind == "RayCluster":
        kinds.put(changed, ("spec", "suspend"), True)
    elif kind.suspend is not None:
        kinds.put(changed, kind.suspend, True)
    elif (path := kind.factor or kind.primary.replicas) is not None:
        kinds.put(changed, path, 0)
    return changed


def _set_number(manifest: Manifest, path: Path, number: int) -> None:
    kinds.put(manifest, path, number)
    completions = (*path[:-1], "completions")
    if path[-1] == "parallelism" and kinds.get(manifest, completions) is not None:
        # All pods of the job are to run side by side, so as many end.
        kinds.put(manifest, completions, number)


def _write_workers(manifest: Manifest, kind: Kind, group: Group, pod_count: int) -> None:
    """Give the first group of workers all pods but the called ones and other groups' workers."""
    assert group.replicas is not None
    group_path: Path = tuple("0" if key == "*" else key for key in group.replicas[:-1])
    called = _number(manifest, kind.primary.replicas, kind.primary.default)
    other_workers = _workers(manifest, group) - _number(
        manifest, (*group_path, "replicas"), group.default
    )
    number = pod_count - called - other_workers
    if number < 0:
        raise SpecError(
            f"replicas is {pod_count}; the {kind.kind} has {called + other_workers} pods beside "
            "its first group of workers",
            hint=f"{called + other_workers} or more",
        )
    if not kinds.get(manifest, (*group_path, "template")):
        kinds.put(manifest, group_path, _group_like_called(manifest, kind))
    workers: dict[str, Any] = kinds.get(manifest, group_path)
    workers["replicas"] = number
    if "maxReplicas" in workers:
        workers["maxReplicas"] = max(number, workers["maxReplicas"])
        workers["minReplicas"] = min(number, workers.get("minReplicas", 0))


def _group_like_called(manifest: Manifest, kind: Kind) -> Manifest:
    """A group of workers whose pod template is that of the called pods."""
    called_group = copy.deepcopy(kinds.get(manifest, kind.primary.template[:-1]))
    if kind.kind != "RayCluster":
        return {**called_group, "replicas": 0}
    return {
        "groupName": WORKER_GROUP,
        "minReplicas": 0,
        "maxReplicas": 0,
        "rayStartParams": {},
        "template": called_group["template"],
    }


def _write(template: PodTemplate, compute: ComputeSpec) -> None:
    if template.is_primary and not template.kind.is_autoscaled:
        write(template.workload, compute.pods)


PARAMETERS = (
    ManifestParameter(
        "replicas",
        "the number of pods of the kind, such as `spec.replicas`",
        lambda template: read(template.workload),
        _write,
        _REPLICAS,
    ),
)
